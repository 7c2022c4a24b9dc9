"""Samples the stack of the training thread: what it waits for, and which threads hold the GIL."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import random
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

Guarded = Callable[[str], contextlib.AbstractContextManager[None]]
_FEEDLINE = str(Path(__file__).parents[3]) + os.sep
_MACHINERY = (str(Path(__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<frozen")
_SCRIPTS = sysconfig.get_path("scripts") + os.sep
_FOLDER = os.getcwd()
_COMPILING = ("/jax/_src/compiler.py", "/jax/_src/interpreters/mlir.py")
FETCH, PLACE, INPUT = "fetch", "place", "input"
_OF_JAX = {
    **dict.fromkeys(("__float__", "__int__", "__bool__", "__index__", "__complex__", "__array__"), FETCH),
    **dict.fromkeys(("__repr__", "__str__", "__format__", "_item", "tolist", "_value"), FETCH),
    **dict.fromkeys(("device_get", "block_until_ready"), FETCH),
    **dict.fromkeys(("device_put", "asarray", "array"), PLACE),
    **dict.fromkeys(("make_array_from_process_local_data", "make_array_from_callback"), PLACE),
}
"""{name of a function of jax or NumPy: what a thread does in it}."""
_IN_C = re.compile(r"\b(np|numpy)\.(as)?array\(|\.block_until_ready\(")
"""Source lines that fetch or wait without a Python frame in jax; NumPy can read buffers of CPU devices itself."""
_MAX_TEXT = 40
_INTERVAL_S = 0.002
_LATE_S = 0.003
"""A longer wait for the GIL means that other Python code competes for it (switch interval: 5 ms)."""
_THREADS_EVERY, _WRITE_EVERY = 250, 1000  # samples: about 0.5 s and 2 s


class Activity(NamedTuple):
    """What a thread was doing, and the line of the user's code that made it do this.

    FETCH: waits for a value from the devices; PLACE: transfers to them; INPUT: waits in `next`; "": none of these.
    """

    kind: str
    line: str
    text: str


def activity(frame: FrameType | None) -> Activity:
    """What the thread with this innermost frame is doing. The call nearest to the user's code decides."""
    stack = _stack(frame)
    iterators = [i for i, each in enumerate(stack) if _is_next(each) and room(each) != "user"]
    outermost = iterators[-1] if iterators else -1  # what it calls may be the user's transform
    user = _users(stack[outermost + 1 :])
    if user is None:
        return Activity("", "unknown", "")
    text = _source(user.f_code.co_filename, user.f_lineno)
    inner = stack[max(outermost, 0) : stack.index(user)]
    kind = FETCH if not inner and _IN_C.search(text) else ""
    for each in inner:
        if _is_next(each):
            kind = INPUT
        elif room(each) == "jax":
            kind = _OF_JAX.get(each.f_code.co_name, kind)
    if kind != INPUT and any(each.f_code.co_filename.endswith(_COMPILING) for each in inner):
        kind = ""
    return Activity(kind, shown(user.f_code.co_filename, user.f_lineno), text)


def _stack(frame: FrameType | None) -> list[FrameType]:
    return [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]


def _is_next(frame: FrameType) -> bool:
    return frame.f_code.co_name == "__next__"


def _source(file: str, line: int) -> str:
    """The beginning of a line of source code; empty if unknown."""
    text = linecache.getline(file, line).partition("  #")[0].strip()
    return f"{text[: _MAX_TEXT - 1]}…" if len(text) > _MAX_TEXT else text


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the user's code in this stack."""
    found = _users(_stack(frame))
    return shown(found.f_code.co_filename, found.f_lineno) if found else "unknown"


def _users(stack: list[FrameType]) -> FrameType | None:
    """The innermost frame of the user's code; without any, that of an installed library or program."""
    wanted = (frame for name in ("user", "library") for frame in stack if room(frame) == name)
    return next(wanted, None)


def room(frame: FrameType) -> str:
    return room_of(frame.f_code.co_filename)


@functools.cache
def room_of(file: str) -> str:
    """Who owns a file: "user", "jax" (and NumPy), "machinery" (the doctor, the standard library), "library"."""
    package = re.search(r"/(?:site|dist)-packages/(\w*)", file)
    if file.startswith(_MACHINERY[0]) or (package is None and file.startswith(_MACHINERY)):
        return "machinery"
    if package is not None:
        return "jax" if package[1] in ("jax", "jaxlib", "numpy") else "library"
    return "library" if file.startswith((_FEEDLINE, _SCRIPTS)) else "user"


def shown(file: str, line: int) -> str:
    """file:line, as a path relative to the folder in which the job began if that is shorter."""
    near = os.path.relpath(file, _FOLDER) if os.path.isabs(file) else file
    return f"{min(near, file, key=len)}:{line}"


class Sampler:
    """A daemon thread that samples the main thread's stack every 2 ms, until the process ends.

    To see the stack, the sampler needs the GIL. While the main thread runs Python code, the sampler often gets the
    GIL only when that code begins to wait, so too many samples would show a wait. Therefore a sample of a wait
    (FETCH, INPUT) counts only if the main thread has used a processor for less than half of the time since the
    last sample, and a sample of a transfer (PLACE) only if the sampler got the GIL at once.

    The sampler calls `write` every two seconds, because a killed process writes nothing at its end.
    """

    def __init__(self, guarded: Guarded, write: Callable[[], None]) -> None:
        self._guarded, self._write = guarded, write
        self._began = self._ended = time.perf_counter()
        self._samples = self._late = 0
        self._seen: Counter[Activity] = Counter()
        self._threads: dict[int, tuple[float, float, str, str]] = {}  # CPU seconds (first and last), name, line
        self._main = threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="feedline doctor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        ran, waited = cpu_seconds(self._main), processor_wait()
        draw = random.Random()  # not the module's own generator, which the job may have seeded
        while True:
            pause = _INTERVAL_S * draw.uniform(0.5, 1.5)  # random, so as not to be in step with the loop
            wakes = time.perf_counter() + pause
            time.sleep(pause)
            now, ran_before, waited_before = time.perf_counter(), ran, waited
            with self._guarded("sampling"):  # `waited` last, since it releases the GIL
                ran, seen = cpu_seconds(self._main), activity(sys._current_frames().get(self._main.ident or 0))
                waited = processor_wait()
                is_late = now - wakes - (waited - waited_before) > _LATE_S
                is_idle = ran - ran_before < (now - self._ended) / 2
                if seen.kind and (is_idle if seen.kind in (FETCH, INPUT) else not is_late):
                    self._seen[seen] += 1
                self._late += is_late
                if self._samples % _THREADS_EVERY == 0:
                    self._look_at_threads()
            self._samples, self._ended = self._samples + 1, now
            if self._samples % _WRITE_EVERY == _THREADS_EVERY:
                self._write()

    def _look_at_threads(self) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread in (self._thread, self._main) or thread.native_id is None or thread.ident is None:
                continue
            with contextlib.suppress(OSError):  # it has ended
                now, line = cpu_seconds(thread), user_line(frames.get(thread.ident))
                first = self._threads.get(thread.native_id, (now,))[0]
                self._threads[thread.native_id] = first, now, thread.name, line

    def as_object(self) -> dict[str, Any]:
        """JSON values: the share of the samples at each line, and how busy the other Python threads were."""
        samples, seconds = max(1, self._samples), max(1e-9, self._ended - self._began)
        return {
            "samples": self._samples,
            "late_share": self._late / samples,
            "lines": [{**seen._asdict(), "share": n / samples} for seen, n in self._seen.copy().most_common()],
            "threads": [
                {"name": name, "busy_share": (last - first) / seconds, "line": line}
                for first, last, name, line in list(self._threads.values())
            ],
        }


def cpu_seconds(thread: threading.Thread) -> float:
    """How long a thread has used a processor. `OSError` if it has ended."""
    # Linux's id of the thread's CPU clock; `time.pthread_getcpuclockid` crashes if the thread has ended
    return time.clock_gettime(~(thread.native_id or 0) << 3 | 6)


def processor_wait() -> float:
    """How long this thread has waited for a processor, in seconds; 0 where the kernel does not report it."""
    with contextlib.suppress(FileNotFoundError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0
