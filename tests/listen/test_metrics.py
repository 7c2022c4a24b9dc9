"""The table of metrics: names by Prometheus' rules, values, rates for TensorBoard; the page that lists them."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import feedline
from feedline._src.listen.metrics import METRICS, samples, scalars
from feedline._src.listen.statistics import Statistics
from feedline._src.trainer import logs
from feedline.trainer import Progress, TensorBoardLog

PAGE = (Path(__file__).parent.parent.parent / "docs" / "metrics.md").read_text()
NUMBERS = [field.name for field in dataclasses.fields(Statistics) if field.name not in ("source_epochs", "stores")]
STORES = {"requests": 1600, "retries": 200, "hedged": 300, "fetched_bytes": 400, "cached": 500, "wait_s": 0.6}
FULL = Statistics(
    **{name: i + 1 for i, name in enumerate(NUMBERS)}, source_epochs={"web": 0.1, "books": 0.2}, stores=STORES
)


def test_names_follow_the_rules_of_prometheus():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"feedline(_[a-z0-9]+)+", metric.name)
        assert not metric.name.endswith(("_count", "_sum", "_bucket", "_info", "_created"))  # of other kinds
        assert not re.search(r"_(s|ms|milliseconds|kb|percent|share)(_total)?$", metric.name)  # base units
        assert metric.help.endswith(".")
        assert "\n" not in metric.help
        assert metric.label in ("", "stage", "bound", "source", "request")


def test_each_field_of_the_statistics_is_a_value_and_no_value_comes_from_nowhere():
    values = {(metric.name, label): value for metric, label, value in samples(FULL)}
    assert len({*values.values()}) == len(values)
    numbers = {getattr(FULL, name) for name in NUMBERS} | {*FULL.source_epochs.values()}
    numbers |= {*STORES.values(), 1100} - {1600}  # 1600 requests are 1100 first ones, 200 retries and 300 hedges
    assert numbers - {*values.values()} == set()
    assert {*values.values()} - numbers == set()
    assert {metric.name for metric, _, _ in samples(FULL)} == {
        metric.name for metric in METRICS if metric.name not in ("feedline_bound", "feedline_headroom_ratio")
    }


def test_what_is_not_known_yet_is_left_out():
    known = {metric.short for metric, _, _ in samples(Statistics())}
    left_out = {metric.short for metric, _, _ in samples(FULL)} - known
    stores = {"store_requests_total", "store_fetched_bytes_total", "store_cached_blocks_total"}
    stores |= {"store_wait_seconds_total", "source_epochs"}
    assert left_out == {"au_ratio", "wait_ratio", "transfer_seconds"} | stores


def test_a_report_adds_what_limits_training_and_the_headroom(sharding):
    with feedline.Feed({"x": np.zeros((640, 2))}, 64, sharding) as feed:
        for _, _ in zip(range(20), feed, strict=False):
            pass
        report = feed.report()
        values = {(m.name, label): value for m, label, value in samples(feed.statistics(), report)}
    bounds = {label: value for (name, label), value in values.items() if name == "feedline_bound"}
    assert bounds.pop(report.bound) == 1.0
    assert [*bounds.values()] == [0.0] * 5
    headroom = {label: value for (name, label), value in values.items() if name == "feedline_headroom_ratio"}
    assert headroom == report.headroom


def test_scalars_are_rates_since_the_statistics_before():
    before = Statistics(batches=10, rows=100, wait_s=1.0, placed_bytes=1000, au=0.5, wait_p50_s=0.1)
    now = Statistics(
        batches=30, rows=500, wait_s=2.0, read_s=4.0, placed_bytes=5000, au=0.8, wait_share=0.1, wait_p50_s=0.2
    )
    found = scalars(now, before, elapsed_s=2.0)
    expected = {
        "feedline/batches_per_second": 10.0,
        "feedline/rows_per_second": 200.0,
        "feedline/placed_bytes_per_second": 2000.0,
        "feedline/wait_seconds_per_batch": 0.05,
        "feedline/stage_seconds_per_batch/read": 0.2,
        "feedline/au_ratio": 0.8,
        "feedline/wait_ratio": 0.1,
        "feedline/wait_p50_seconds": 0.2,
    }
    assert {name: found[name] for name in expected} == expected
    assert "feedline/transfer_seconds" not in found
    first = scalars(now)
    assert first == {name: value for name, value in found.items() if "_per_" not in name}
    idle = scalars(now, now, elapsed_s=2.0)  # such as during an evaluation
    assert idle["feedline/rows_per_second"] == 0.0
    assert not any(name.endswith("_per_batch") for name in idle)


def read(folder):
    """{name: {step: value}} as TensorBoard shows a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


@pytest.fixture
def feed(sharding):
    with feedline.Feed({"x": np.zeros((640, 2), np.float32)}, 64, sharding) as feed:
        yield feed


@pytest.mark.slow
def test_tensorboard_shows_the_metrics_beside_the_loss(feed, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_SAMPLING_INTERVAL_S", 0.0)
    with TensorBoardLog(tmp_path, feed=feed) as log:
        for step, _ in zip(range(1, 31), feed, strict=False):
            if step % 10 == 0:
                log(Progress(step, {"loss": 1 / step}, 0, 64 * step, 1.0, 64 * step, 0.1))
    shown, last = read(tmp_path), feed.statistics()
    assert list(shown["loss"]) == list(shown["feedline/au_ratio"]) == [10, 20, 30]
    assert list(shown["feedline/rows_per_second"]) == [20, 30]
    assert shown["feedline/au_ratio"][30] == pytest.approx(last.au)
    assert shown["feedline/threads"][30] == last.threads
    for name, of_all in (("wait_seconds", last.wait_s), ("stage_seconds/read", last.read_s)):
        first, _, label = name.partition("/")
        values = shown[f"feedline/{first}_per_batch" + (f"/{label}" if label else "")]
        assert 0 < 10 * sum(values.values()) < of_all * 1.001
    assert {"loss", "rows_per_s", "wait_share"} == {name for name in shown if "/" not in name}


@pytest.mark.slow
def test_tensorboard_asks_a_feed_at_most_once_a_second(feed, tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    with TensorBoardLog(tmp_path, feed=feed) as log:
        for step in range(1, 26):
            next(feed)
            log.write(step, {"loss": 1.0})
            now_s += 0.125
    shown = read(tmp_path)
    assert list(shown["loss"]) == [*range(1, 26)]
    assert list(shown["feedline/ready_batches"]) == [1, 9, 17, 25]
    assert shown["feedline/rows_per_second"] == {9: 512.0, 17: 512.0, 25: 512.0}


@pytest.mark.slow
def test_a_loop_of_ones_own_writes_values_and_a_later_run_hides_what_it_repeats(tmp_path):
    for loss, first in ((1.0, 10), (2.0, 30)):
        with TensorBoardLog(tmp_path) as log:
            for step in range(first, 51, 10):
                log.write(step, {"loss": np.float32(loss), "accuracy": None if step == 50 else 0.5})
    shown = read(tmp_path)
    assert shown["loss"] == {10: 1.0, 20: 1.0, 30: 2.0, 40: 2.0, 50: 2.0}
    assert list(shown["accuracy"]) == [10, 20, 30, 40]


def test_tensorboard_refuses_what_has_no_statistics(tmp_path):
    with pytest.raises(TypeError, match=r"feed must have a method statistics\(\), .*; give the feed itself"):
        TensorBoardLog(tmp_path, feed=[1])


def test_the_page_lists_all_metrics_and_no_others():
    rows = [f"| `{m.name}` | {m.kind} | {', '.join([*filter(None, [m.label])])} | {m.help} |" for m in METRICS]
    listed = [line for line in PAGE.splitlines() if line.startswith("| `feedline_")]
    assert listed == [row.replace("|  |", "| |") for row in rows]
    names = {metric.name for metric in METRICS}
    assert {*re.findall(r"\bfeedline_\w+", PAGE)} <= names
    tags = {f"feedline/{name}" for name in re.findall(r"`feedline/([\w/]+)`", PAGE)}
    assert tags <= scalars(FULL, Statistics(), 1.0).keys()
    assert tags
