"""A build hook of hatchling that compiles feedline/_src/native/columns.c for wheels and installations.

The wheel is tagged for the platform and for any Python 3, since the library does not call Python. Without a C
compiler, or with ``FEEDLINE_PURE_PYTHON=1``, the wheel is pure Python: a missing compiler is no error.

For a release, ``FEEDLINE_TARGET`` is the platform tag of the wheel, for which ``CC`` compiles (see `.ci/wheels`).
Then a library that cannot be compiled is an error.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
_SOURCE = "feedline/_src/native/columns.c"
_LIBRARY = "feedline/_src/native/libcolumns.so.6"  # on macOS, too: ctypes loads it by its path


class CompileLibrary(BuildHookInterface):  # type: ignore[misc]
    """Adds the compiled library to a wheel, or for an editable install writes it next to its source."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs a wheel of the kind `version`: "standard" or "editable"."""
        self._folder = tempfile.TemporaryDirectory()
        library = Path(self.root if version == "editable" else self._folder.name, _LIBRARY)
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)  # of an earlier build
        target = os.environ.get("FEEDLINE_TARGET")
        if _compiled(Path(self.root, _SOURCE), library, self.app.display_warning):
            platform = target or sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
            if version != "editable":
                build_data["force_include"][str(library)] = _LIBRARY
        elif target:
            raise RuntimeError(f"the wheel for {target} has no library; see the warning above, and set CC")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling once the wheel is packed."""
        self._folder.cleanup()


def _compiled(source: Path, library: Path, warn: Any) -> bool:
    """Compile the library, and return whether that succeeded. A failure is a warning, never an error."""
    if os.environ.get("FEEDLINE_PURE_PYTHON", "0") not in ("", "0"):
        return False
    compiler = shlex.split(os.environ.get("CC", "")) or [c for c in ("cc", "gcc", "clang") if shutil.which(c)][:1]
    if not compiler:
        warn("no C compiler was found (cc, gcc, clang, $CC): feedline computes with NumPy, slower")
        return False
    result = subprocess.run([*compiler, *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True)
    if result.returncode or not library.exists():
        library.unlink(missing_ok=True)
        warn(f"{compiler[0]} could not compile {source.name}, so feedline computes with NumPy:\n{result.stderr}")
        return False
    return True
