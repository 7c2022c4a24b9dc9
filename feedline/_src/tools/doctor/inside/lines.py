"""The line of the user's code that led to a call."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from types import FrameType

_FEEDLINE = str(Path(__file__).parents[4]) + os.sep
_LIBRARIES = tuple(
    {
        f"{folder}{os.sep}"
        for folder in (*map(sysconfig.get_path, ("stdlib", "purelib", "scripts")), *site.getsitepackages())
    }
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_JAX = tuple(f"{packages}{name}{os.sep}" for packages in _PACKAGES for name in ("jax", "jaxlib"))


def user_line(frame: FrameType | None = None) -> str:
    """`file:line` of the innermost frame that is the user's.

    A frame of a library counts only if no frame is the user's, and one of jax or of this package never does.

    Args:
      frame: where to begin; None: at the caller's.
    """
    frame = frame or sys._getframe(1)
    library = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return shown(file, frame.f_lineno)
        if not library and not _is_jax(file) and f"{os.sep}doctor{os.sep}inside{os.sep}" not in file:
            library = shown(file, frame.f_lineno)
        frame = frame.f_back
    return library or "unknown"


def is_users(file: str) -> bool:
    """Whether a file is no library's."""
    return not file.startswith((_FEEDLINE, *_LIBRARIES, "<frozen")) and not any(map(file.__contains__, _PACKAGES))


def shown(file: str, line: int) -> str:
    """A line as it is reported: relative to the current folder, if that is shorter."""
    near = os.path.relpath(file) if os.path.isabs(file) else file
    return f"{min(near, file, key=len)}:{line}"


def _is_jax(file: str) -> bool:
    return any(map(file.__contains__, _JAX))
