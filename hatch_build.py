"""A build hook of hatchling that compiles the C files of feedline/_src/native for wheels and installations.

The wheel is tagged for the platform and for any Python 3, since the libraries do not call Python. Without a C
compiler, or with ``FEEDLINE_PURE_PYTHON=1``, the wheel is pure Python: a missing compiler is no error.
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
_LIBRARIES = {
    "feedline/_src/native/columns.c": ("feedline/_src/native/libcolumns.so.4", "computes with NumPy"),
    "feedline/_src/native/jpeg.c": ("feedline/_src/native/libjpegpart.so.1", "decodes JPEGs whole"),
}
"""The library that is made of each source, and what feedline does without it."""


class CompileLibraries(BuildHookInterface):  # type: ignore[misc]
    """Adds the compiled libraries to a wheel, or for an editable install writes them next to their sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs a wheel of the kind `version`: "standard" or "editable"."""
        self._folder = tempfile.TemporaryDirectory()
        for source, (place, without) in _LIBRARIES.items():
            library = Path(self.root if version == "editable" else self._folder.name, place)
            library.parent.mkdir(parents=True, exist_ok=True)
            library.unlink(missing_ok=True)  # of an earlier build
            if _compiled(Path(self.root, source), library, without, self.app.display_warning):
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
                if version != "editable":
                    build_data["force_include"][str(library)] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called by hatchling once the wheel is packed."""
        self._folder.cleanup()


def _compiled(source: Path, library: Path, without: str, warn: Any) -> bool:
    """Compile the library, and return whether that succeeded. A failure is a warning, never an error."""
    if os.environ.get("FEEDLINE_PURE_PYTHON", "0") not in ("", "0"):
        return False
    compiler = shlex.split(os.environ.get("CC", "")) or [c for c in ("cc", "gcc", "clang") if shutil.which(c)][:1]
    if not compiler:
        warn(f"no C compiler was found (cc, gcc, clang, $CC): feedline {without}, slower")
        return False
    result = subprocess.run([*compiler, *FLAGS, str(source), "-o", str(library)], capture_output=True, text=True)
    if result.returncode or not library.exists():
        library.unlink(missing_ok=True)
        warn(f"{compiler[0]} could not compile {source.name}, so feedline {without}:\n{result.stderr}")
        return False
    return True
