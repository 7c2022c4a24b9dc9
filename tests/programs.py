"""Starts programs for tests, with the usual signals and a time limit, and kills them at the end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

PATIENCE_S = 300
"""How long a program may take unless its test says otherwise. A program that hangs fails only its own test."""


def restore_signals():
    """Let the programs that this process starts receive the signals that this process ignores.

    `nohup`, and `&` in a script, start a program with signals ignored. Child programs inherit an ignored signal,
    but no handler. So with an empty handler here they get the default, and a hangup still does not end pytest.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else lambda *_: None)


def importing(**variables):
    """The environment of a program that imports modules of tests."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | variables


@contextlib.contextmanager
def started(command, *, limit_s=PATIENCE_S, **options):
    """Start a program in its own session. Kill all processes in it after the block, or after `limit_s`."""
    with subprocess.Popen(command, start_new_session=True, **options) as program:
        limit = threading.Timer(limit_s, _kill, [program.pid])
        limit.daemon = True
        limit.start()
        try:
            yield program
        finally:
            limit.cancel()
            _kill(program.pid)


def run(command, *, timeout=PATIENCE_S, check=False, capture_output=False, **options):
    """Like `subprocess.run`, for a program that `started` starts."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, limit_s=timeout + PATIENCE_S, **options) as program:
        done = subprocess.CompletedProcess(program.args, None, *program.communicate(timeout=timeout))
        done.returncode = program.returncode
    if check:
        done.check_returncode()
    return done


def _kill(session):
    """Kill all processes of a session, whatever process groups they are in."""
    killed = set()
    while new := {session, *_groups_of(session)} - killed:  # repeated, because a group may have been added since
        for group in new:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)  # also kills a process that is being started
        killed |= new


def _groups_of(session):
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            _, _, group, its_session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            if int(its_session) == session:
                found.add(int(group))
    return found
