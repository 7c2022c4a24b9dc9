"""The `feedline` command: finds the subcommand, and turns its failures into one line and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import feedline
from feedline.cli.train import Train
from feedline.errors import FeedError

_USAGE_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
      argv: without the program's name. None: those of this process.

    Returns:
      The exit code: 0; 1 if reading failed; 2 if an argument is wrong; 130 after Ctrl-C.

    Raises:
      SystemExit: after --help, and where the command line cannot be understood.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"feedline {feedline.__version__}")
        return 0
    try:
        return _parsed(arguments).run()
    except KeyboardInterrupt:
        return _failed("interrupted", _INTERRUPTED)
    except FeedError as error:
        return _failed(str(error), 1)
    except (ValueError, TypeError, OSError) as error:
        return _failed(str(error), _USAGE_ERROR)


def _parsed(arguments: list[str]) -> Train | Launch:
    """The subcommand with its options. What follows the first -- is the command that `launch` starts."""
    import tyro

    own, _, command = _split(arguments)
    commands = Annotated[Train, tyro.conf.subcommand("train")] | Annotated[Launch, tyro.conf.subcommand("launch")]
    chosen = tyro.cli(
        commands, 
        prog="feedline",
        description="feedline keeps sharded accelerators fed. --version prints its version.",
        args=own,
        config=(tyro.conf.FlagCreatePairsOff,),
    )


def _failed(message: str, code: int) -> int:
    """Tell why, in one line, and give back the exit code."""
    print("feedline:", *message.split(), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
