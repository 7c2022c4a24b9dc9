"""Compiles feedline/native/columns.c when a wheel is built or the project is installed: a build hook of hatchling.

The wheel is tagged for the platform and for any Python 3, since the library does not call Python. Without a C
compiler, or with ``FEEDLINE_PURE_PYTHON=1``, the wheel is a pure one: an install never fails because of the library.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_SOURCE = "feedline/native/columns.c"
_LIBRARY = "feedline/native/libcolumns.so"


class CompileColumns(BuildHookInterface):  # type: ignore[misc]
    """Adds the compiled library to the wheel, and to the source tree for an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs a wheel."""
        library = Path(self.root, _LIBRARY)
        library.unlink(missing_ok=True)  # of an earlier build
        if not self._compiled(Path(self.root, _SOURCE), library):
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(library)] = _LIBRARY

    def _compiled(self, source: Path, library: Path) -> bool:
        if os.environ.get("FEEDLINE_PURE_PYTHON", "0") not in ("", "0"):
            return False
        compiler = shlex.split(os.environ.get("CC", "")) or _first_of("cc", "gcc", "clang")
        if not compiler:
            self.app.display_warning(
                "no C compiler was found (cc, gcc, clang, $CC): NumPy will do the work of columns.c"
            )
            return False
        done = subprocess.run([*compiler, *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True)
        if done.returncode:
            library.unlink(missing_ok=True)
            self.app.display_warning(
                f"{compiler[0]} could not compile columns.c, NumPy will do its work:\n{done.stderr}"
            )
        return done.returncode == 0


def _first_of(*names: str) -> list[str]:
    return [name for name in names if shutil.which(name)][:1]
