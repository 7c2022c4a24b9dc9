"""The `feedline` command: runs a subcommand, and reports a failure as one line and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, Protocol

from feedline._src.agreement.monitor import abort, leave
from feedline._src.errors import FeedError
from feedline._src.native.library import implementation
from feedline._src.tools.cli.interrupt import EndedBySignal, Terminated, interrupts_get_through, terminations_raise
from feedline._src.tools.cli.terminal import printable
from feedline._src.version import __version__

_FEED_ERROR = 1
_WRONG_ARGUMENT = 2
_SIGNAL_BASE = 128  # plus the signal's number, as in a shell
_INTERRUPTED = _SIGNAL_BASE + signal.SIGINT


class Command(Protocol):
    """A subcommand with its options."""

    def run(self) -> int:
        """Run the command, and return the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      argv: without the program's name. None: those of this process.

    Returns:
      The exit code: 0; 1 if reading failed; 2 if an argument is wrong; 3 and 4 after warnings and errors of the
      doctor; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    Raises:
      SystemExit: after --help, after a command line that cannot be parsed, and after training that a signal
        ended between two steps.
    """
    if argv is not None:
        return _exit_code(list(argv))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale may lack a character of a table
    arguments = sys.argv[1:]
    heeds_signals = arguments[:1] in (["train"], ["launch"])
    with interrupts_get_through(), contextlib.nullcontext() if heeds_signals else terminations_raise():
        code = _exit_code(arguments)
    if code:
        _exit_at_once(code)
    return code


def _exit_code(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"feedline {__version__}, columns by {implementation()}")
        return 0
    try:
        return _parsed(arguments).run()
    except (
        EndedBySignal
    ) as end:  # no failure: all processes end like this, and wait for each other as at a normal exit
        if str(end):
            _print_error(str(end))
        sys.exit(_SIGNAL_BASE + end.number)
    except Terminated as end:
        return _report_failure(end, _SIGNAL_BASE + end.number)
    except KeyboardInterrupt as interrupt:
        return _report_failure(interrupt, _INTERRUPTED)
    except FeedError as error:
        return _report_failure(error, _FEED_ERROR)
    except (ValueError, TypeError, OSError) as error:
        return _report_failure(error, _WRONG_ARGUMENT)


def _parsed(arguments: list[str]) -> Command:
    """The subcommand with its options. Three of them take everything after the first -- as a command."""
    import tyro  # imported here, so that `_exit_code` handles a Ctrl-C during the import

    from feedline._src.tools.audit.command import Audit
    from feedline._src.tools.bench.command import Bench
    from feedline._src.tools.cli.terminal import help_text
    from feedline._src.tools.convert.command import Convert
    from feedline._src.tools.doctor.command import Doctor
    from feedline._src.tools.doctor.diagnose_command import Diagnose
    from feedline._src.tools.inspect.command import Inspect
    from feedline._src.tools.launch.command import Launch
    from feedline._src.tools.train.command import Train

    takes_command = arguments[:1] in (["launch"], ["diagnose"], ["doctor"]) and "--" in arguments
    separator = arguments.index("--") if takes_command else len(arguments)

    def subcommand(name: str, command: type) -> Any:
        text = help_text(command, alone=arguments[:1] == [name])
        return Annotated[command, tyro.conf.subcommand(name, description=text)]

    parsed: Train | Launch | Inspect | Convert | Audit | Bench | Diagnose | Doctor = tyro.cli(
        subcommand("train", Train)
        | subcommand("launch", Launch)
        | subcommand("inspect", Inspect)
        | subcommand("convert", Convert)
        | subcommand("audit", Audit)
        | subcommand("bench", Bench)
        | subcommand("diagnose", Diagnose)
        | subcommand("doctor", Doctor),
        prog="feedline",
        description="Keeps sharded accelerators fed. `feedline --version` prints the version.",
        args=arguments[:separator],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    if isinstance(parsed, Launch | Diagnose | Doctor) and separator < len(arguments):
        return dataclasses.replace(parsed, command=tuple(arguments[separator + 1 :]))
    return parsed


def _report_failure(error: BaseException, code: int) -> int:
    """Print the error in one line, and return the exit code. The run's other processes receive the error, too."""
    _print_error(" ".join(str(error).split()) or "interrupted")
    abort(error)
    return code


def _print_error(message: str) -> None:
    with contextlib.suppress(OSError):  # a closed pipe
        # one write: threads of a library that failed may be writing tracebacks
        sys.stderr.write(f"feedline: {printable(message)}\n")
        sys.stderr.flush()


def _exit_at_once(code: int) -> NoReturn:
    """End this process, without waiting as a normal exit does.

    A normal exit waits for threads that are stuck in a read and, in jax's shutdown barrier, for all other
    processes of the run, which wait for this one.
    """
    leave(code)


if __name__ == "__main__":
    sys.exit(main())
