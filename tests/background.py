"""Helpers of tests: run functions on threads, find threads that do not end, wait until an object is freed."""

import functools
import gc
import threading
import time
from concurrent.futures import Future

PATIENCE_S = 30
"""A test waits at most this long for something that normally comes at once."""


def spawn(function):
    """Run `function` on a daemon thread. Returns a future of what it returns or raises."""
    return _started(function)[0]


def _started(function):
    """Run `function` on a daemon thread. Returns the future of its result, and the thread."""
    future = Future()

    def run():
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised by the future
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return future, thread


def at_once(function, arguments):
    """Call `function` with each argument on threads that begin together. Returns results, or raises an error."""
    together = threading.Barrier(len(arguments))

    def begin(argument):
        together.wait(2 * PATIENCE_S)
        return function(argument)

    running = [_started(functools.partial(begin, argument)) for argument in arguments]
    found = [future.result(2 * PATIENCE_S) for future, _ in running]
    for _, thread in running:
        thread.join(PATIENCE_S)  # a running thread still refers to what the function used
    return found


def arrived(event):
    """Wait for an event that must come."""
    assert event.wait(PATIENCE_S)


def left_behind(before):
    """Names of the threads that were not there `before` and do not end."""
    deadline = time.monotonic() + PATIENCE_S
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in new if thread.is_alive()]


def is_collected(reference):
    """Whether a weak reference dies. `gc.collect` is repeated: it does nothing while another thread collects."""
    deadline = time.monotonic() + PATIENCE_S
    while reference() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return reference() is None
