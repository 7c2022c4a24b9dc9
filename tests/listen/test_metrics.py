"""The table of metrics: names, values, rates for TensorBoard. The page and the dashboard agree with the table."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

import feedline
from feedline._src.listen.report import BOUNDS, Bound, Report
from feedline._src.listen.statistics import METRICS, Statistics, samples, scalars
from feedline._src.trainer import logs
from feedline.trainer import TensorBoardLog

PAGE = (Path(__file__).parent.parent.parent / "docs" / "waiting.md").read_text()
NUMBERS = [
    field.name
    for field in dataclasses.fields(Statistics)
    if field.name not in ("source_epochs", "tokens", "stores")
]
STORES = {"requests": 1600, "retries": 200, "hedged": 300, "fetched_bytes": 400, "cached": 500, "wait_s": 0.6}
FULL = Statistics(
    **{name: i + 1 for i, name in enumerate(NUMBERS)},
    source_epochs={"web": 0.1, "books": 0.2},
    tokens={"web": 10**6, "books": 10**7},
    stores=STORES,
)


@pytest.fixture
def feed(sharding):
    with feedline.Feed({"x": np.zeros((640, 2), np.float32)}, 64, sharding) as feed:
        yield feed


def test_each_field_of_the_statistics_is_a_value_and_no_value_comes_from_nowhere():
    values = {(metric.name, label): value for metric, label, value in samples(FULL)}
    assert len({*values.values()}) == len(values)
    numbers = {getattr(FULL, name) for name in NUMBERS} | {*FULL.source_epochs.values(), *FULL.tokens.values()}
    numbers |= {*STORES.values(), 1100} - {1600}  # 1600 requests are 1100 first ones, 200 retries and 300 hedges
    assert numbers - {*values.values()} == set()
    assert {*values.values()} - numbers == set()
    assert {metric.name for metric, _, _ in samples(FULL)} == {
        metric.name for metric in METRICS if metric.name not in ("feedline_bound", "feedline_headroom_ratio")
    }


def test_what_is_not_known_yet_is_left_out():
    known = {metric.name for metric, _, _ in samples(Statistics())}
    left_out = {metric.name for metric, _, _ in samples(FULL)} - known
    names = "au_ratio wait_ratio transfer_seconds source_epochs tokens_total store_requests_total"
    names += " store_fetched_bytes_total store_cached_blocks_total store_wait_seconds_total"
    assert left_out == {f"feedline_{name}" for name in names.split()}


def test_a_report_adds_what_limits_training_and_the_headroom(feed):
    for _, _ in zip(range(20), feed, strict=False):
        pass
    report = feed.report()
    values = {(m.name, label): value for m, label, value in samples(feed.statistics(), report)}
    bounds = {label: value for (name, label), value in values.items() if name == "feedline_bound"}
    assert bounds == {**dict.fromkeys(BOUNDS, 0.0), report.bound: 1.0}
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
    """{name: {step: value}} that TensorBoard shows of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


@pytest.mark.slow
def test_tensorboard_shows_the_metrics_beside_the_loss_at_most_once_a_second(feed, tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now_s)
    with TensorBoardLog(tmp_path, feed=feed) as log:
        for step in range(1, 26):
            next(feed)
            log.write(step, {"loss": 1.0})
            now_s += 0.125
    shown, last = read(tmp_path), feed.statistics()
    assert list(shown["loss"]) == [*range(1, 26)]
    assert list(shown["feedline/ready_batches"]) == [1, 9, 17, 25]
    assert shown["feedline/rows_per_second"] == {9: 512.0, 17: 512.0, 25: 512.0}
    assert shown["feedline/threads"][25] == last.threads
    for name, of_all in (("wait_seconds_per_batch", last.wait_s), ("stage_seconds_per_batch/read", last.read_s)):
        assert 0 < 8 * sum(shown[f"feedline/{name}"].values()) < of_all * 1.001


def test_the_page_lists_all_metrics_and_no_others():
    rows = [f"| `{m.name}` | {m.kind} | {', '.join([*filter(None, [m.label])])} | {m.help} |" for m in METRICS]
    listed = [line for line in PAGE.splitlines() if line.startswith("| `feedline_")]
    assert listed == [row.replace("|  |", "| |") for row in rows]
    names = {metric.name for metric in METRICS}
    assert {*re.findall(r"\bfeedline_\w+", PAGE)} <= names
    tags = {f"feedline/{name}" for name in re.findall(r"`feedline/([\w/]+)`", PAGE)}
    assert tags <= scalars(FULL, Statistics(), 1.0).keys()
    assert tags


def test_each_bound_is_in_the_type_the_docstring_the_page_and_the_dashboard():
    assert Bound.__args__ == (*BOUNDS,)
    assert re.findall(r'"(\w+)"', re.search(r" bound: .*", Report.__doc__)[0]) == [*BOUNDS]
    assert re.findall(r'^\| `"(\w+)"`', PAGE, re.MULTILINE) == [*BOUNDS]
    (panel,) = (panel for panel in PANELS if panel["title"] == "What limits training")
    assert panel["description"] == " ".join(f"{bound}: {meaning}." for bound, meaning in BOUNDS.items())
    assert "bound=" not in panel["targets"][0]["expr"]  # none is left out


# --- examples/grafana.json, checked without Grafana ---

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
NAMES = {metric.name: metric for metric in METRICS}
VARIABLES = {variable["name"] for variable in DASHBOARD["templating"]["list"]}


def labels_of(names):
    return {"feed", "process", "instance", "job"}.union(*([NAMES[name].label] for name in names)) - {""}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_the_expressions_of_a_panel_fit_the_metrics(panel):
    """Its metrics and labels exist; it takes rates of counters only; its legend names labels of the metrics."""
    for target in panel["targets"]:
        expression = target["expr"]
        names = re.findall(r"\bfeedline\w*", expression)
        assert names
        assert {*names} <= NAMES.keys()
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
            pairs = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers)
            assert {"feed", "process"} <= {label for label, _ in pairs} <= labels_of([name])
            assert {value.removeprefix("$") for _, value in pairs} <= VARIABLES
        rated = re.findall(r"\brate\((\w+)\{[^}]*\}\[\$__rate_interval\]\)", expression)
        counters = {name for name in names if NAMES[name].kind == "counter"}
        assert {*rated} <= counters
        assert counters == {*rated} or "since the feed was built" in panel["description"]
        assert {"feed"} <= {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= labels_of(names)
