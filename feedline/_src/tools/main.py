"""The `feedline` command: runs a subcommand, and reports a failure as one line and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from feedline._src.agreement.monitor import abort, leave, say
from feedline._src.errors import FeedError
from feedline._src.native.library import implementation
from feedline._src.tools.cli.interrupt import EndedBySignal, Terminated, interrupts_get_through, terminations_raise
from feedline._src.tools.cli.terminal import help_text, listed, printable
from feedline._src.version import __version__

COMMANDS = {
    "train": "train.command:Train",
    "launch": "launch:Launch",
    "inspect": "inspect.command:Inspect",
    "convert": "convert.command:Convert",
    "audit": "audit.command:Audit",
    "bench feed": "bench.command:FeedBenchmark",
    "bench modes": "bench.command:ModesBenchmark",
    "bench practices": "bench.command:PracticesBenchmark",
    "diagnose": "doctor.command:Diagnose",
    "doctor": "doctor.command:Doctor",
}
"""Module and class of each subcommand. The class is a dataclass of options; its `run` returns the exit code."""
_HELP = """usage: feedline COMMAND [-h] [OPTIONS]

Keeps sharded accelerators fed. `feedline --version` prints the version.
"""
_FEED_ERROR = 1
_WRONG_ARGUMENT = 2
_SIGNAL_BASE = 128  # plus the signal's number, as in a shell


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; None: this process's own command line.

    Returns:
      The exit code: 0; 1 after a FeedError; 2 if an argument is wrong; 3 and 4 after warnings and errors of the
      doctor; 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP. Raises SystemExit instead for --help, for a
      command line that cannot be parsed, and for training that a signal ended between two steps.
    """
    if argv is not None:
        return _exit_code(list(argv))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the locale's encoding may lack characters
    arguments = sys.argv[1:]
    heeds_signals = arguments[:1] in (["train"], ["launch"])
    with interrupts_get_through(), contextlib.nullcontext() if heeds_signals else terminations_raise():
        code = _exit_code(arguments)
    if code:
        # a normal exit could hang: it waits for threads that are stuck in a read, and, in jax's shutdown barrier,
        # for processes that wait for this one
        leave(code)
    return code


def _exit_code(arguments: list[str]) -> int:
    if arguments == ["--version"]:
        print(f"feedline {__version__}, columns by {implementation()}")
        return 0
    try:
        return int(_parsed(arguments).run())
    except EndedBySignal as end:  # not a failure: the exit waits for the other processes, as usual
        if str(end):
            say(printable(str(end)))
        sys.exit(_SIGNAL_BASE + end.number)
    except Terminated as end:
        return _report_failure(end, _SIGNAL_BASE + end.number)
    except KeyboardInterrupt as interrupt:
        return _report_failure(interrupt, _SIGNAL_BASE + signal.SIGINT)
    except (FeedError, ValueError, TypeError, OSError, ImportError) as error:  # ImportError: a format's library
        return _report_failure(error, _FEED_ERROR if isinstance(error, FeedError) else _WRONG_ARGUMENT)


def _parsed(arguments: list[str]) -> Any:
    """The subcommand with its options. Its field `command`, if any, holds the arguments after the first `--`."""
    import tyro  # imported here, so that `_exit_code` handles a Ctrl-C during the import

    name = next((each for each in COMMANDS if arguments[: len(words := each.split())] == words), "")
    if not name:
        _list_commands(arguments)
    own = arguments[len(name.split()) :]
    command, given = _loaded(name), []
    if "--" in own and "command" in command.__dataclass_fields__:
        separator = own.index("--")
        own, given = own[:separator], own[separator + 1 :]
    config = (tyro.conf.FlagCreatePairsOff,)
    parsed = tyro.cli(command, prog=f"feedline {name}", description=help_text(command), args=own, config=config)
    return dataclasses.replace(parsed, command=tuple(given)) if given else parsed


def _loaded(name: str) -> Any:
    module, _, command = COMMANDS[name].partition(":")
    return getattr(importlib.import_module(f"feedline._src.tools.{module}"), command)


def _list_commands(arguments: list[str]) -> NoReturn:
    """Print the help of all commands, or of those that begin with the given word, and exit."""
    asked = arguments[-1:] in (["-h"], ["--help"])
    name = " ".join(arguments[:2])
    if not asked:
        say(printable(f"there is no command {name!r}; choose one of these" if name else "a command is missing"))
    group = [each for each in COMMANDS if each.split()[0] in arguments[:1]] or COMMANDS
    out = sys.stdout if asked else sys.stderr
    print(_HELP, listed({each: _loaded(each) for each in group}), sep="\n", file=out)
    sys.exit(0 if asked else _WRONG_ARGUMENT)


def _report_failure(error: BaseException, code: int) -> int:
    """Print the error as one line, report it to the run's other processes, and return the exit code."""
    say(printable(" ".join(str(error).split()) or "interrupted"))
    abort(error)
    return code


if __name__ == "__main__":
    sys.exit(main())
