"""A program as two processes, under `feedline launch`."""

import sys

import programs

PATIENCE_S = 120
FEEDLINE = [sys.executable, "-m", "feedline"]


def launched(*command):
    """What `command` wrote as two processes of two CPU devices each, which all ended well."""
    launch = ["launch", "--processes", "2", "--cpu", "--devices-per-process", "2", "--"]
    done = programs.run([*FEEDLINE, *launch, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done
