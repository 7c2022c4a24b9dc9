"""The line of progress: what it says, how it is shortened, on a terminal and elsewhere."""

import io
import os
import re
import sys
import termios
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import programs
import pytest
from rich.console import Console

import feedline
from feedline._src.listen.report import BOUNDS
from feedline._src.listen.statistics import Statistics
from feedline._src.trainer import live as live_module
from feedline.trainer import LiveLine, Progress

FIRST = Progress(1, {"loss": 2.3}, resumed=0, rows=128, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0)
LATER = Progress(
    1001, {"loss": 0.5, "accuracy": 0.9}, resumed=0, rows=128128, elapsed_s=2.0, elapsed_rows=128000, wait_s=0.1
)
SEEN = Statistics(batches=1000, rows=128000, placed_bytes=128000 * 25_000, au=0.02, wait_share=0.41)
WHOLE = "step 1,001 of 2,000 | loss 0.5000 | 64,000 rows/s | wait 41% | limit: read | 1.6 GB/s | accuracy 0.9000"


def feed_of(seen=SEEN, bound="read"):
    """The part of a feed that the line reads. `bound`: what limits training, or the error of the report."""

    def report():
        if isinstance(bound, Exception):
            raise bound
        return SimpleNamespace(bound=bound)

    return SimpleNamespace(statistics=lambda: seen, report=report)


@pytest.fixture(autouse=True)
def never_printed_again(monkeypatch):
    """Without a terminal, only the first line is printed, however long the machine stands still."""
    monkeypatch.setattr(live_module, "_PRINT_EVERY_S", 1e6)


def told(progress, steps=2000, feed=None):
    text = io.StringIO()
    with LiveLine(steps, Console(file=text), feed) as live:
        for _ in range(20):  # lines are rare without a terminal
            live(progress)
    return text.getvalue().removesuffix("\n")


FEW = Statistics(batches=1, rows=128, placed_bytes=128 * 200)


@pytest.mark.parametrize(
    ("progress", "steps", "feed", "expected"),
    [
        (FIRST, 2000, None, "step 1 of 2,000 | loss 2.3000"),
        (FIRST, None, feed_of(), "step 1 | loss 2.3000"),
        (LATER, 2000, None, WHOLE.replace("41% | limit: read | 1.6 GB/s", "5%")),
        (LATER, 2000, feed_of(FEW, ValueError()), WHOLE.replace("41% | limit: read | 1.6 GB/s", "5% | 12.8 MB/s")),
        *(
            (LATER, 2000, feed_of(bound=bound), WHOLE.replace("read", bound))
            for bound in BOUNDS
            if bound != "machine"
        ),
        (LATER, 2000, feed_of(bound="machine"), WHOLE.replace("read", "busy machine")),
        (LATER, 2000, feed_of(bound=RuntimeError("a defect")), WHOLE.replace(" | limit: read", "")),
    ],
)
def test_the_line(progress, steps, feed, expected):
    assert told(progress, steps, feed) == expected


def test_names_of_metrics_are_no_markup():
    named = Progress(1, {"loss": 2.0, "top[/5]": 1.0, ":smile:": 0.0}, 0, 128, 0.0, 0, 0.0)
    assert told(named, None) == "step 1 | loss 2.0000 | top[/5] 1.0000 | :smile: 0.0000"


@pytest.mark.parametrize(("width", "shown"), [(200, WHOLE), (80, WHOLE[:74]), (40, WHOLE[:33]), (9, "step 1,0…")])
def test_the_last_parts_are_left_out_if_the_terminal_is_narrow(width, shown):
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    with LiveLine(2000, console, feed_of()) as live:
        live(LATER)
    assert shown in re.split(r"\x1b\[\??\d*[A-Za-z]|[\r\n]", console.file.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize(("width", "more"), [(80, " | 64,000 rows/s | wait 5%"), (40, "")])
def test_on_a_terminal_one_line_is_updated_fits_and_is_erased(width, more):
    ours, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, width))
    updates = f"with LiveLine(2000000) as live: live({FIRST}); time.sleep(0.11); live({LATER})"
    command = [sys.executable, "-c", f"import time; from feedline.trainer import *\n{updates}"]
    env = programs.importing(TERM="xterm", COLUMNS="")
    programs.run(command, env=env, stdin=terminal, stdout=terminal, stderr=terminal, check=True)
    text = os.read(ours, 10_000).decode()
    os.close(ours), os.close(terminal)
    lines = filter(None, re.split(r"\x1b\[\??\d*[A-Za-z]|[\r\n]", text))  # what moves the cursor, or erases
    assert set(lines) == {"step 1 of 2,000,000 | loss 2.3000", f"step 1,001 of 2,000,000 | loss 0.5000{more}"}
    assert text.endswith("\x1b[2K")  # the line is erased


def test_of_a_real_feed(sharding):
    with feedline.Feed({"x": np.zeros((640, 100), np.float32)}, 64, sharding) as feed:
        for _, batch in zip(range(40), feed, strict=False):
            jnp.sum(batch["x"]).block_until_ready()
        line = told(LATER, None, feed)
    assert re.fullmatch(
        r"step 1,001 \| loss 0.5000 \| 64,000 rows/s \| wait \d+% \| limit: .+ \| 25.6 MB/s \| accuracy 0.9000",
        line,
    )
    with pytest.raises(TypeError, match=r"^feed must have a method statistics\(\), .* got \[\]"):
        LiveLine(feed=[])
