"""The line of progress: what it says, how it is shortened, on a terminal and elsewhere."""

import io
import re
import sys
import time

import jax.numpy as jnp
import numpy as np
import programs
import pytest
from rich.console import Console

import feedline
from feedline._src.listen.report import RecentReport
from feedline._src.listen.statistics import Statistics
from feedline._src.trainer.live import LiveLine, line, progress_parts
from feedline._src.trainer.loop import Progress

FIRST = Progress(1, {"loss": 2.3}, resumed=0, rows=128, elapsed_s=0.0, elapsed_rows=0, wait_s=0.0)
LATER = Progress(
    1001, {"loss": 0.5, "accuracy": 0.9}, resumed=0, rows=128128, elapsed_s=2.0, elapsed_rows=128000, wait_s=0.1
)
ESCAPES = r"\x1b\[\??\d*[A-Za-z]|[\r\n]"  # what moves the cursor, or erases


class Judged:
    """A report, as far as the line reads it."""

    def __init__(self, bound="read", drained=True):
        self.bound, self.drained = bound, drained


class Counting:
    """A feed that says how often it was asked."""

    def __init__(self, seen, judged):
        self.seen, self.judged, self.asked, self.reports = seen, judged, 0, 0

    def statistics(self):
        self.asked += 1
        return self.seen

    def report(self):
        self.reports += 1
        if isinstance(self.judged, Exception):
            raise self.judged
        return self.judged


SEEN = Statistics(batches=1000, rows=128000, placed_bytes=128000 * 25_000, au=0.02, wait_share=0.41)


def told(progress, steps=2000, feed=None, width=None):
    return line(progress_parts(progress, steps, feed, None if feed is None else RecentReport()), width)


def test_without_a_feed():
    assert told(FIRST) == "step 1 of 2,000 | loss 2.3000"
    assert told(FIRST, None) == "step 1 | loss 2.3000"
    assert told(LATER) == "step 1,001 of 2,000 | loss 0.5000 | 64,000 rows/s | wait 5% | accuracy 0.9000"


def test_with_a_feed():
    feed = Counting(SEEN, Judged())
    assert told(FIRST, feed=feed) == "step 1 of 2,000 | loss 2.3000"
    assert told(LATER, feed=feed) == (
        "step 1,001 of 2,000 | loss 0.5000 | 64,000 rows/s | wait 41% | read limits | 1.6 GB/s | accuracy 0.9000"
    )
    slow = Counting(Statistics(batches=1, rows=128, placed_bytes=128 * 200), ValueError("too few batches"))
    assert told(LATER, feed=slow).endswith(" | 64,000 rows/s | wait 5% | 12.8 MB/s | accuracy 0.9000")
    early = Counting(SEEN, Judged(drained=False))  # by batches that were read ahead
    assert "limits" not in told(LATER, feed=early)


@pytest.mark.parametrize("width", range(20, 120, 20))
def test_it_is_shortened_from_the_right_by_whole_parts(width):
    whole = told(LATER, feed=Counting(SEEN, Judged()))
    short = told(LATER, feed=Counting(SEEN, Judged()), width=width)
    assert len(short) <= width
    assert whole == short or whole.startswith(f"{short} | ")
    if width >= 80:
        assert short.endswith(("read limits", "1.6 GB/s", "accuracy 0.9000"))


def test_a_report_takes_at_most_a_hundredth_of_the_time_and_never_ends_training(monkeypatch, caplog):
    now_s = 100.0
    monkeypatch.setattr("feedline._src.listen.report.time.monotonic", lambda: now_s)

    class Slow(Counting):
        def report(self):
            nonlocal now_s
            now_s += 0.05  # as with many simulations
            return super().report()

    feed, recent, began_s = Slow(SEEN, Judged()), RecentReport(), now_s
    while now_s < began_s + 60:
        assert recent.of(feed).bound == "read"
        now_s += 0.1
    assert feed.reports * 0.05 <= 0.011 * 60
    assert feed.reports > 10

    cheap, recent, began_s = Counting(SEEN, Judged()), RecentReport(), now_s
    while now_s < began_s + 10:
        recent.of(cheap)
        now_s += 0.1
    assert cheap.reports == 10

    broken = Counting(SEEN, RuntimeError("a defect"))
    assert "limits" not in told(LATER, feed=broken)
    assert [record.message for record in caplog.records] == ["feedline could not judge how its feed works"]


def test_without_a_terminal_lines_are_rare():
    text, feed = io.StringIO(), Counting(SEEN, Judged())
    with LiveLine(2000, Console(file=text), feed) as live:
        for _ in range(100):
            live(LATER)
    assert text.getvalue() == f"{told(LATER, feed=feed)}\n"
    assert feed.asked == 2


def test_on_a_terminal_one_line_is_updated_and_erased():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, color_system=None, width=80)
    with LiveLine(lambda: 2000, console, Counting(SEEN, Judged())) as live:
        live(FIRST)
        time.sleep(0.11)  # it is updated ten times a second
        live(LATER)
    assert "step 1 of 2,000" in text.getvalue()
    assert "step 1,001 of 2,000 | loss 0.5000 | 64,000 rows/s | wait 41% | read limits" in text.getvalue()
    assert max(map(len, re.split(ESCAPES, text.getvalue()))) <= 80
    assert text.getvalue().endswith("\x1b[2K")  # the line is erased


def test_a_feed_is_told_from_something_else():
    with pytest.raises(TypeError, match=r"^feed must have a method statistics\(\), .* got \[\]"):
        LiveLine(feed=[])


def test_of_a_real_feed(sharding):
    text = io.StringIO()
    with (
        feedline.Feed({"x": np.zeros((640, 100), np.float32)}, 64, sharding) as feed,
        LiveLine(console=Console(file=text), feed=feed) as live,
    ):
        for _, batch in zip(range(40), feed, strict=False):
            jnp.sum(batch["x"]).block_until_ready()
        live(LATER)
    assert re.fullmatch(
        r"step 1,001 \| loss 0.5000 \| 64,000 rows/s \| wait \d+% \| \w+ limits \| 25.6 MB/s \| accuracy 0.9000\n",
        text.getvalue(),
    )


@pytest.mark.slow
def test_train_shows_the_line_unless_it_is_to_be_quiet():
    command = [sys.executable, "-m", "feedline", "train", "--steps", "20"]
    shown, quiet = (
        programs.run([*command, *options], capture_output=True, text=True, check=True).stderr.splitlines()
        for options in ([], ["--quiet"])
    )
    assert quiet == ["feedline: process 0 of 1, found no other"]
    assert any(re.match(r"step 1 of 20 \| loss \d\.\d{4}", line) for line in shown)
