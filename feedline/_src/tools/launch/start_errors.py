"""Why a command could not be started, and what to do about it."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Sequence

_EXAMPLE = ", as in `-- python train.py`"
_INTERPRETER = f"make it executable, or name its interpreter first{_EXAMPLE}"
_FIXES = {
    errno.EACCES: _INTERPRETER,
    errno.ENOEXEC: _INTERPRETER,
    errno.ENOENT: f"correct it, or give its path{_EXAMPLE}",
    errno.ENOTDIR: "correct its path: a part of it is no folder",
    errno.EAGAIN: "no further process may be started: start fewer, or raise the limit (`ulimit -u`, or pids.max "
    "of the control group)",
    errno.EMFILE: "the launcher may open no further file, and needs two for each process: raise `ulimit -n`",
    errno.ENFILE: "this machine may open no further file: close some, or raise fs.file-max",
    errno.ENOMEM: "there is no memory for another process: start fewer, or end others",
    errno.E2BIG: "the command and the environment variables are too long: shorten them",
}


def cannot_start(command: Sequence[str], error: OSError) -> tuple[int, str]:
    """The exit code, as that of a shell, and the message.

    Example:
      >>> cannot_start(["trian"], OSError(errno.ENOENT, "No such file"))
      (127, 'cannot run trian: No such file; correct it, or give its path, as in `-- python train.py`')
    """
    if error.errno == errno.EACCES and not _may_be_there(command[0]):
        error = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    fix = _FIXES.get(error.errno or 0, "try whether it runs without the launcher")
    if error.errno == errno.ENOENT:
        fix = _fix_of_missing(command[0]) or fix
    code = 127 if error.errno == errno.ENOENT else 126
    return code, f"cannot run {shlex.quote(command[0])}: {error.strerror}; {fix}"


def _may_be_there(program: str) -> bool:
    """Whether the error EACCES is about this file, and not about a folder of PATH that is closed to this user."""
    return os.sep in program or any(os.path.exists(os.path.join(path, program)) for path in os.get_exec_path())


def _fix_of_missing(program: str) -> str | None:
    """What is missing if the program itself is there. A name without a slash is only looked for on PATH."""
    if shutil.which(program):
        return f"its first line names an interpreter that is not there; correct that, or name one first{_EXAMPLE}"
    if os.path.isfile(program):
        path = shlex.quote(os.path.join(os.curdir, program))
        return (
            f"this folder has it, but PATH does not: give its path, as in `{path}`, or its interpreter{_EXAMPLE}"
        )
    return None
