"""Creates the environment of each entrant of the peers benchmark, with venv and pip."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

_INSTALL_LIMIT_S = 1800.0
_ERROR_LINES = 4


class CannotRun(RuntimeError):
    """An entrant cannot be measured: it cannot be installed, failed, or did not answer."""


def interpreter_for(requirements: Path, folder: Path | None) -> Path:
    """The Python that an entrant runs in.

    Args:
      requirements: its requirements.txt, with lines `name==version`. Without this file the entrant runs in
        this interpreter.
      folder: where environments are kept; entrants with equal requirements share one. All get this
        interpreter's version of jax. None: use this interpreter.

    Raises:
      CannotRun: pip failed; or `folder` is None and this interpreter lacks a requirement.
    """
    if not requirements.exists():
        return Path(sys.executable)
    lines = [line.strip() for line in requirements.read_text().splitlines()]
    wanted = [line for line in lines if line and not line.startswith("#")]
    if folder is not None:
        return _made([*wanted, f"jax=={importlib.metadata.version('jax')}"], folder)
    missing = [line for line in wanted if not _is_here(*line.split("=="))]
    if missing:
        raise CannotRun(f"this interpreter lacks {' '.join(missing)}; give a folder as --environments")
    return Path(sys.executable)


def _is_here(name: str, version: str) -> bool:
    try:
        return importlib.metadata.version(name) == version
    except importlib.metadata.PackageNotFoundError:
        return False


def _made(wanted: list[str], folder: Path) -> Path:
    """Create the environment, unless an earlier run completed it."""
    digest = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    home = folder.absolute() / f"{wanted[0].partition('==')[0]}-{digest}"
    python, complete = home / "bin" / "python", home / "complete"
    if complete.exists():
        return python
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(home)],
        [str(python), "-m", "pip", "install", "--quiet", *wanted],
    ):
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_INSTALL_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise CannotRun(f"{' '.join(wanted)}: not installed after {error.timeout:.0f} s") from error
        if ended.returncode:
            raise CannotRun(f"{' '.join(wanted)} could not be installed: {last_lines(ended.stderr)}")
    complete.touch()
    return python


def last_lines(text: str) -> str:
    """The last lines of a program's output, which contain its error, joined to one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-_ERROR_LINES:])
