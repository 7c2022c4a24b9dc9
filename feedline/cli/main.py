"""The `feedline` command: finds the subcommand, and turns its failures into one line and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, Protocol

from feedline.agreement.monitor import abort, leave
from feedline.cli.interrupt import Ended, interrupts_get_through
from feedline.errors import FeedError
from feedline.native.library import implementation
from feedline.version import __version__

_READING_FAILED = 1
_WRONG_ARGUMENT = 2
_KILLED = 128  # and the signal's number, as shells count
_INTERRUPTED = _KILLED + signal.SIGINT


class Command(Protocol):
    """A subcommand with its options."""

    def run(self) -> int:
        """Do it, and give back the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      argv: without the program's name. None: those of this process.

    Returns:
      The exit code: 0; 1 if reading failed; 2 if an argument is wrong; 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
      SystemExit: after --help, where the command line cannot be understood, and after training that a signal
        ended between two steps.
    """
    if argv is not None:
        return _ran(list(argv))
    with interrupts_get_through():
        code = _ran(sys.argv[1:])
    if code:
        _leave(code)
    return code


def _ran(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"feedline {__version__}, columns by {implementation()}")
        return 0
    try:
        return _parsed(arguments).run()
    except Ended as end:  # no failure: all processes end so, and wait for each other as at any end
        if str(end):
            _say(str(end))
        sys.exit(_KILLED + end.number)
    except KeyboardInterrupt as interrupt:
        return _failed(interrupt, _INTERRUPTED)
    except FeedError as error:
        return _failed(error, _READING_FAILED)
    except (ValueError, TypeError, OSError) as error:
        return _failed(error, _WRONG_ARGUMENT)


def _parsed(arguments: list[str]) -> Command:
    """The subcommand with its options. What follows the first -- of `launch` is its command, untouched."""
    import tyro  # here, and not above, so that Ctrl-C meanwhile is met by `_ran`

    from feedline.cli.audit import Audit
    from feedline.cli.bench import Bench
    from feedline.cli.described import described
    from feedline.cli.launch import Launch
    from feedline.cli.train import Train

    border = arguments.index("--") if arguments[:1] == ["launch"] and "--" in arguments else len(arguments)

    def subcommand(name: str, command: type) -> Any:
        text = described(command, alone=arguments[:1] == [name])
        return Annotated[command, tyro.conf.subcommand(name, description=text)]

    parsed: Train | Launch | Audit | Bench = tyro.cli(
        subcommand("train", Train)
        | subcommand("launch", Launch)
        | subcommand("audit", Audit)
        | subcommand("bench", Bench),
        prog="feedline",
        description="Keeps sharded accelerators fed. `feedline --version` prints the version.",
        args=arguments[:border],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if isinstance(parsed, Launch) and border < len(arguments):
        return dataclasses.replace(parsed, command=tuple(arguments[border + 1 :]))
    return parsed


def _failed(error: BaseException, code: int) -> int:
    """Say why, in one line, and give back the exit code. The other processes of the run hear it, too."""
    _say(" ".join(str(error).split()) or "interrupted")
    abort(error)
    return code


def _say(told: str) -> None:
    with contextlib.suppress(OSError):  # who reads it may be gone
        # one write: threads of a library that failed may be writing tracebacks
        sys.stderr.write(f"feedline: {told}\n")
        sys.stderr.flush()


def _leave(code: int) -> NoReturn:
    """End this process, without what a normal exit would wait for.

    That is a thread that is stuck in a read and, at jax's shutdown barrier, all other processes of the
    run, which in their turn wait for this one.
    """
    leave(code)


if __name__ == "__main__":
    sys.exit(main())
