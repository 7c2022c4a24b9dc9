"""Runs a part of the GPU benchmark in a process of its own, and passes on each result as soon as it is there.

A process that has used a GPU holds most of its memory until it ends: JAX allocates 75 % of it at once. So the
process of gpu.py never initialises a backend. Each part has a new process, which finds all of the memory free. The
cases of the parts "modes" and "practices" are processes again, so the processes of these two parts initialise no
backend either. The user's XLA_PYTHON_CLIENT_* variables hold in all of them, and none is set here. A part that
crashes or hangs ends only itself.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback

_GRACE_S = 60
"""How long the last case of a part may go on after the part's deadline. Then its processes are killed."""

WHOLE = "the part"
"""Stands for a case in the error of a part whose process failed as a whole."""


def part(cases_of, scale, chosen, deadline):
    """Run the cases of a part in a new process. Yields (kind, case, value) as `section` does.

    If that process fails as a whole, yields an error of the case `WHOLE`.
    """
    try:
        limit_s = max(0.0, deadline - time.monotonic()) + _GRACE_S
        yield from streamed(limit_s, _section_of, cases_of, scale, chosen, deadline)
    except RuntimeError as error:
        yield "errors", WHOLE, str(error)


def section(cases, deadline):
    """Run each case that there is time for: yields ("results", case, figures), or if it fails ("errors", case,
    message), and the others run. Those without time: ("skipped", case, why).

    Args:
      deadline: by `time.monotonic()`. No case begins that would end later if it took as long as the longest yet.
    """
    longest = 0.0
    for name, case in cases.items():
        started = time.monotonic()
        if started + longest > deadline:
            left = max(0, deadline - started)
            yield "skipped", name, f"{left:.1f} s were left, and a case took up to {longest:.1f} s"
            continue
        try:
            figures = case()
            yield "results", name, {"case": name, **figures, "wall_s": time.monotonic() - started}
        except Exception as error:  # noqa: BLE001  recorded and printed, and the exit code is 1
            yield "errors", name, f"{type(error).__name__}: {error}"
        longest = max(longest, time.monotonic() - started)


def matches(case, chosen):
    """Whether the name of a case contains one of the chosen texts. Without any, every case is chosen."""
    return not chosen or any(text in case for text in chosen)


def _section_of(cases_of, scale, chosen, deadline):
    return section({name: case for name, case in cases_of(scale).items() if matches(name, chosen)}, deadline)


def called(seconds, call, *arguments):
    """`call(*arguments)` in a new process. Raises as `streamed`."""
    (value,) = streamed(seconds, _once, call, arguments)
    return value


def _once(call, arguments):
    yield call(*arguments)


def streamed(seconds, call, *arguments):
    """Yields what the generator `call(*arguments)` yields in a new process, in which it is imported by name.

    Raises:
      RuntimeError: it raised an exception, its process died, or it was ended after `seconds`.
    """
    spawn = multiprocessing.get_context("spawn")  # a forked process would share the parent's threads and locks
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_send, args=(sender, seconds, call, arguments))
    process.start()
    sender.close()  # so that the end of the process is the end of the pipe
    end = time.monotonic() + seconds
    try:
        while receiver.poll(max(0.0, end - time.monotonic())):
            try:
                kind, value = receiver.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"its process died with exit code {process.exitcode}") from None
            if kind == "end":
                process.join(20)
                return
            if kind == "error":
                raise RuntimeError(value)
            yield value
        raise RuntimeError(f"it hung or was too slow, and was ended after {seconds:.0f} s")
    finally:
        _end(process)


def _end(process):
    """End the process, and those that it has started, which would keep the GPU's memory."""
    process.kill()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _send(sender, seconds, call, arguments):
    os.setpgrp()  # for `_end`. Not a new session, which would outlive a terminal or a job that is ended
    faulthandler.dump_traceback_later(max(1.0, seconds - 5))  # shows where it hangs
    try:
        for value in call(*arguments):
            sender.send(("value", value))
    except Exception as error:  # noqa: BLE001  raised in the parent
        traceback.print_exc()
        sender.send(("error", f"{type(error).__name__}: {error}"))
    else:
        sender.send(("end", None))
