"""What the stack of a thread shows: the line of the user's code, and what that line waits for."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import site
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_FEEDLINE = str(Path(__file__).parents[4]) + os.sep
_DOCTOR = str(Path(__file__).parents[1]) + os.sep
_FOLDER = os.getcwd()
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES = tuple(
    folder + os.sep for folder in (*map(sysconfig.get_path, ("purelib", "scripts")), *site.getsitepackages())
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_JAX = tuple(f"{folder}{name}{os.sep}" for folder in _PACKAGES for name in ("jax", "jaxlib", "numpy"))

FETCH, PLACE, INPUT, COMPILE, CALL = "fetch", "place", "input", "compile", "call"
_OF_JAX = {
    **dict.fromkeys(("__float__", "__int__", "__bool__", "__index__", "__complex__", "__array__"), FETCH),
    **dict.fromkeys(("__repr__", "__str__", "__format__", "_item", "tolist", "_value"), FETCH),
    **dict.fromkeys(("device_get", "block_until_ready"), FETCH),
    **dict.fromkeys(("device_put", "asarray", "array", "make_array_from_process_local_data"), PLACE),
    "make_array_from_callback": PLACE,
}
"""Functions in jax's files, by name."""
_COMPILING = tuple(f"{os.sep}jax{os.sep}_src{os.sep}{name}.py" for name in ("compiler", "interpreters/mlir"))
_IN_C = re.compile(r"\b(np|numpy)\.(as)?array\(|\.block_until_ready\(")
"""Calls that fetch or wait without a frame of Python: NumPy reads the buffers of CPU devices itself."""
_MAX_TEXT = 40


class Activity(NamedTuple):
    """What a thread was doing.

    Attributes:
      kind: FETCH: waits for a value of the devices; PLACE: transfers to them; INPUT: waits in `next`; COMPILE;
        CALL: in a compiled function; or "" for anything else.
      line: file:line of the user's code.
      text: the expression there.
    """

    kind: str
    line: str
    text: str


def activity(frame: FrameType | None) -> Activity:
    """What the thread with this innermost frame is doing. The call nearest to the user's code decides."""
    iterator = _library_iterator(frame)
    if iterator is not None:  # it may run code of the user's: a transform, a decoder
        frame = iterator
    user = user_frame(iterator.f_back if iterator is not None else frame)
    if user is None:
        return Activity("", "unknown", "")
    kind, text = "", _expression(user.f_code, user.f_lasti)
    if frame is user and _IN_C.search(text):
        kind = FETCH
    while frame is not None and frame is not user:
        kind = _kind(frame, kind)
        frame = frame.f_back
    return Activity(kind, shown(user.f_code.co_filename, user.f_lineno), text)


def _library_iterator(frame: FrameType | None) -> FrameType | None:
    """The outermost `__next__` of a library on this stack."""
    found = None
    while frame is not None:
        if frame.f_code.co_name == "__next__" and not is_users(frame.f_code.co_filename):
            found = frame
        frame = frame.f_back
    return found


def moves_data(frame: FrameType) -> bool:
    """Whether this is a function of jax that fetches or places."""
    return frame.f_code.co_name in _OF_JAX and any(map(frame.f_code.co_filename.__contains__, _JAX))


def _kind(frame: FrameType, within: str) -> str:
    """What a library's frame does, given what the frames that it called do."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if name == "__next__":
        return INPUT
    if within == COMPILE or file.endswith(_COMPILING):
        return COMPILE
    if file.startswith(_DOCTOR):
        return within or CALL
    return _OF_JAX[name] if moves_data(frame) else within


@functools.lru_cache(1024)
def _expression(code: CodeType, instruction: int) -> str:
    """The source of the expression that an instruction belongs to, its first line; empty if it is not known."""
    first, last, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    if first is None:
        return ""
    line = linecache.getline(code.co_filename, first).encode()[start : end if last == first else None]
    text = line.decode(errors="replace").partition("  #")[0].strip()
    return f"{text[: _MAX_TEXT - 1]}…" if len(text) > _MAX_TEXT or last != first else text


def user_line(frame: FrameType | None) -> str:
    """`file:line` of the user's code in this stack."""
    found = user_frame(frame)
    return shown(found.f_code.co_filename, found.f_lineno) if found else "unknown"


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame that is the user's; without one, the innermost of a library that uses jax."""
    library = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return frame
        if library is None and not _is_machinery(file):
            library = frame
        frame = frame.f_back
    return library


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is no library's."""
    return not (file.startswith((_FEEDLINE, _STANDARD, *_LIBRARIES, "<frozen")) or _is_packaged(file))


@functools.cache
def _is_machinery(file: str) -> bool:
    """Whether a file is of jax, NumPy, the standard library, or the doctor's own."""
    standard = file.startswith((_STANDARD, "<frozen")) and not _is_packaged(file)
    return standard or file.startswith(_DOCTOR) or any(map(file.__contains__, _JAX))


def _is_packaged(file: str) -> bool:
    return any(map(file.__contains__, _PACKAGES))


def shown(file: str, line: int) -> str:
    """A line as it is reported: relative to the folder in which the job began, if that is shorter."""
    near = os.path.relpath(file, _FOLDER) if os.path.isabs(file) else file
    return f"{min(near, file, key=len)}:{line}"
