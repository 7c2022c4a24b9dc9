"""The command line as a whole: what it imports, where arguments go, how failures end."""

import sys

import programs
import pytest

import feedline
from feedline._src.native import library
from feedline._src.tools.launch import Launch
from feedline._src.tools.main import COMMANDS, main
from feedline._src.tools.train.command import Train

HEAVY = {"jax", "jaxlib", "numpy", "flax", "optax", "grain", "rich.live"}
IMPORTED = """
import sys
from feedline._src.tools.main import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print(ended.code)
print(*sys.modules)
"""
STUCK = """
import sys, threading
from feedline._src.tools.main import main
threading.Thread(target=threading.Event().wait).start()
sys.argv[1:] = ["train", "--steps", "0"]
sys.exit(main())
"""


def run(*arguments):
    return programs.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(arguments):
    *told, modules = run("-c", IMPORTED, *arguments).stdout.splitlines()
    modules = set(modules.split())
    assert "feedline._src.tools.main" in modules
    assert not HEAVY & modules
    if arguments == ["--help"]:
        assert [name for name in COMMANDS if not any(line.startswith(f"  {name} ") for line in told)] == []
    elif arguments == ["--version"]:
        assert told[0] == f"feedline {feedline.__version__}, columns by {library.implementation()}"


def test_a_c_library_that_does_not_load_is_replaced_by_numpy(monkeypatch):
    monkeypatch.setenv("FEEDLINE_PURE_PYTHON", "0")
    monkeypatch.setattr(library, "PATH", library.PATH.with_name("library.py"))
    with pytest.warns(UserWarning, match="cannot be loaded .*, so feedline computes with NumPy"):
        assert library.library.__wrapped__() is None


@pytest.mark.parametrize(
    "arguments", [[], ["trian"], ["bench"], ["bench", "fed"], ["train", "--bogus"], ["train", "--mode", "jit"]]
)
def test_a_command_line_that_cannot_be_understood(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (feedline.FeedError("a row\n  could not be read", row=7), 1, "a row could not be read [row 7]"),
        (ValueError("--steps must be at least 1"), 2, "--steps must be at least 1"),
        (TypeError("a batch must be a dict"), 2, "a batch must be a dict"),
        (FileNotFoundError("there is no file x.npy"), 2, "there is no file x.npy"),
        (ImportError("pyarrow is not installed"), 2, "pyarrow is not installed"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(error, code, told, monkeypatch, capsys):
    def run(self):
        raise error

    monkeypatch.setattr(Train, "run", run)
    assert main(["train"]) == code
    assert capsys.readouterr() == ("", f"feedline: {told}\n")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--", "python", "train.py", "--cpu"], ("python", "train.py", "--cpu")),
        (["--cpu", "--", "sh", "-c", "a -- b", "--", "c"], ("sh", "-c", "a -- b", "--", "c")),
        (["--", "--processes", "9"], ("--processes", "9")),
    ],
)
def test_launch_gets_its_command_untouched(arguments, command, monkeypatch):
    seen = []
    monkeypatch.setattr(Launch, "run", lambda self: seen.append(self) or 7)
    assert main(["launch", "--processes", "2", *arguments]) == 7
    assert seen == [Launch(2, cpu="--cpu" in arguments[:1], command=command)]


def test_without_standard_error_the_exit_code_is_the_same(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["inspect", "missing.npy"]) == 2


def test_a_failed_program_does_not_wait_for_threads():
    ended = run("-c", STUCK)
    assert (ended.returncode, ended.stderr) == (2, "feedline: --steps must be at least 1, got 0\n")
