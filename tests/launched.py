"""Runs a program as two processes, under `feedline launch`."""

import sys

import programs

PATIENCE_S = programs.PATIENCE_S
FEEDLINE = [sys.executable, "-m", "feedline"]
LAUNCH = [*FEEDLINE, "launch", "--processes", "2", "--cpu", "--devices-per-process", "2", "--"]


def launched(*command):
    """Run `command` as two processes of two CPU devices each; both must succeed. Returns a `CompletedProcess`."""
    done = programs.run([*LAUNCH, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done
