"""`feed.trace`: the file for each kind of feed, and the events of a hand-written record of one batch."""

import itertools
import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from trace_file import STAGES, Trace, feed_of

from feedline import Feed
from feedline._src.listen import trace as traces
from feedline._src.listen.trace import Events
from feedline._src.record import BatchRecord, PartTimes, PlaceTimes

KINDS = [
    "one thread", "threads share a batch", "a transform", "a stream", "prefetch 0", "several steps a call",
    "padded",
    pytest.param("a worker", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_of_each_kind_of_feed(kind, tmp_path):
    each = 2 if kind == "several steps a call" else 1
    with feed_of(kind, tmp_path) as feed:
        next(feed)
        before = feed.statistics()
        with feed.trace(tmp_path / "trace.json") as path:
            places = []
            for _ in range(3):
                places.append((feed.epoch, feed.position))
                next(feed)
        after = feed.statistics()
        next(feed)  # not in the trace
    trace = Trace(path)
    steps = [each * number for number in (2, 3, 4)]
    assert path == tmp_path / "trace.json"
    assert [span.args["step"] for span in trace.named("step")] == steps
    for name in ("wait", "place", "step"):
        whole = [span.args for span in trace.named(name)]
        assert [(args["step"], args["epoch"], args["position"]) for args in whole] == [
            (step, *place) for step, place in zip(steps, places, strict=True)
        ]
        assert {(args["rows"], args["bytes"]) for args in whole} == {
            (64 * each, each * 64 * 17 if kind == "padded" else each * 64 * 16)
        }
    # an arrow leads from the read of each part to the placing of its batch, and another from there to the step
    chains = trace.chains()
    assert {chain[-1] for chain in chains} == {("step", step) for step in steps}
    assert all([name for name, _ in chain] == ["read", "place", "step"] for chain in chains)
    assert all(len({step for _, step in chain}) == 1 for chain in chains)
    assert len(chains) == len(trace.named("read"))
    parts = {"threads share a batch": 2, "several steps a call": 4}.get(kind, 1)
    assert len(chains) == 3 * parts
    # the same sums as in the statistics, but for rounding to nanoseconds
    for stage in (*STAGES, "wait"):
        expected = getattr(after, f"{stage}_s") - getattr(before, f"{stage}_s")
        assert trace.seconds(stage) == pytest.approx(expected, abs=2e-8 * len(trace.spans)), stage
    whole = [span.ended - span.began for span in trace.named("step")][:-1]  # the last one is still going on
    assert 0 < sum(whole) / 1e6 <= after.loop_s - before.loop_s + 1e-6  # `loop_s` has one more, older step
    tracks = list(trace.tracks.values())
    assert tracks[-1] == "training loop"
    expected = {
        "a worker": {"feedline-place"}, "a stream": {"feedline-place"}, "prefetch 0": {"MainThread"},
    }.get(kind)  # fmt: skip
    assert {span.track for span in trace.named("place")} <= (expected or set(tracks[:-1]))
    if kind == "a worker":
        assert all(span.track.startswith("worker ") for span in trace.named("read"))
    assert {begin["name"] for begin, _ in trace.apart} <= {"read ahead", "ready", "transfer"}
    assert trace.process == "feedline, process 0"


def test_the_events_of_one_batch():
    parts = [
        PartTimes("feedline-read-10", 100.0, 1.0, 0.5, 0.25), PartTimes("feedline-read-2", 100.5, 1.0, 0.0, 0.0),
    ]  # fmt: skip
    placed = PlaceTimes("feedline-read-10", 102.0, 0.5, 0.1)
    records = [BatchRecord(102.0, 103.0, parts, placed, 7, (1, 20), 60), 105.0]
    events = Events(records, 110.0, 3, {102.0: 0.75}, lambda record: {"position": record.before[1] + 4})
    assert events.origin == 100.0
    made = list(events)
    names = [e["args"]["name"] for e in made if e["name"] == "thread_name"]
    assert names == ["feedline-read-10", "feedline-read-2", "training loop"]
    spans = [(e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in made if e["ph"] == "X"]
    assert sorted(spans) == [
        (30001, "place", 2.0, 0.5),
        (30001, "read", 0.0, 1.0), (30001, "stage", 1.5, 0.25), (30001, "transform", 1.0, 0.5),
        (30002, "read", 0.5, 1.0),
        (30003, "step", 3.0, 2.0), (30003, "wait", 2.0, 1.0),
    ]  # fmt: skip
    apart = [(e["ph"], e["name"], e["ts"] / 1e6) for e in made if e["ph"] in "be"]
    assert apart == [
        ("b", "read ahead", 1.75), ("e", "read ahead", 2.0), ("b", "transfer", 2.0), ("e", "transfer", 2.75),
        ("b", "ready", 2.5), ("e", "ready", 3.0),
    ]  # fmt: skip
    assert [(e["ts"] / 1e6, e["args"]) for e in made if e["ph"] == "C"] == [
        (2.5, {"batches": 1}), (3.0, {"batches": 0}),
    ]  # fmt: skip
    assert {e["pid"] for e in made} == {3}
    step = next(e for e in made if e["name"] == "step")
    assert step["args"] == {"step": 7, "position": 24}


def test_batches_of_each_size_have_their_own_place_and_bytes(tmp_path, sharding):
    feed = Feed({"x": np.zeros(100, np.float32)}, [(0, 64), (2, 32)], sharding)
    with feed, feed.trace(tmp_path / "trace.json") as path:
        [next(feed) for _ in range(3)]
    args = [event["args"] for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "step"]
    assert [[each[name] for name in ("epoch", "position", "bytes")] for each in args] == [
        [0, 0, 256], [1, 0, 256], [1, 64, 128],
    ]  # fmt: skip


def test_a_break_ends_a_step_and_times_have_an_origin(tmp_path):
    with feed_of("one thread", tmp_path) as feed, feed.trace(tmp_path / "trace.json") as path:
        began, began_unix = time.perf_counter(), time.time()
        next(feed), next(feed)
        feed.seek(0, 128)
        broke = time.perf_counter()
        time.sleep(0.1)
        next(feed)
        time.sleep(0.05)
    trace = Trace(path)
    steps, facts = trace.named("step"), trace.file["otherData"]
    assert (facts["process"], facts["processes"]) == (0, 1)
    origin, first = facts["origin_monotonic_s"], trace.named("wait")[0].began / 1e6
    assert began - 1e-3 < origin + first < broke
    assert facts["origin_unix_s"] + first == pytest.approx(began_unix, abs=60)  # the clock may be set meanwhile
    assert [span.args["position"] for span in steps] == [0, 64, 128]
    assert [origin + span.ended / 1e6 < broke + 1e-3 for span in steps] == [True, True, False]
    assert steps[2].ended - steps[2].began > 0.05e6


def test_the_origin_is_right_though_the_thread_stood_still_between_two_clocks(monkeypatch):
    now = itertools.chain([0.0, 100.0], itertools.count(100.001, 0.001))
    monkeypatch.setattr(
        traces, "time", SimpleNamespace(perf_counter=lambda: next(now), time=lambda: 5000 + next(now))
    )
    assert traces._unix_offset_s() == pytest.approx(5000, abs=0.01)


def test_a_diagnosis_is_no_step(tmp_path):
    with feed_of("one thread", tmp_path) as feed, feed.trace(tmp_path / "trace.json") as path:
        next(feed)
        with feed.diagnose(steps=40):
            began = time.perf_counter()
            for _ in feed:
                pass
        next(feed)
    trace = Trace(path)
    steps = trace.named("step")
    assert [step.args["step"] for step in steps] == [1, 2]
    assert trace.file["otherData"]["origin_monotonic_s"] + steps[0].ended / 1e6 < began + 1e-3


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace"])
def test_an_empty_block_and_any_name(name, tmp_path):
    with feed_of("one thread", tmp_path) as feed, feed.trace(tmp_path / name) as path:
        pass
    assert Trace(path).spans == []
    assert sorted(os.listdir(tmp_path)) == sorted([name, "x.npy"])


def test_only_the_latest_batches_are_kept_also_of_the_next_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_BATCHES", 16)
    with feed_of("one thread", tmp_path) as feed, feed.trace(tmp_path / "trace.json") as path:
        assert len([*feed, *feed]) == 20
    trace = Trace(path)
    # 16 records: 14 batches and the ends of two passes
    assert [span.args["epoch"] for span in trace.named("step")] == [0] * 4 + [1] * 10
    counts = [event["args"]["batches"] for event in trace.of("C", "ready")]
    assert min(counts) == counts[-1] == 0
    assert max(counts) <= 2  # prefetch
