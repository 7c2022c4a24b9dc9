"""A trace in Perfetto itself, and the same names and steps in a profile of JAX."""

import collections
import itertools

import jax
import pytest
from perfetto import asked
from trace_file import STAGES, Trace, feed_of


@pytest.mark.slow
def test_perfetto_loads_it(tmp_path):
    with feed_of("threads share a batch", tmp_path) as feed, feed.trace(tmp_path / "trace.json") as path:
        assert len(list(feed)) == 10
    errors, spans, arrows, tracks, reached = asked(
        path,
        tmp_path / "browser",
        "select name, value from stats where severity != 'info' and value > 0",
        "select name, count(*), sum(dur) from slice group by name order by name",
        "select a.name, b.name, count(*) from flow "
        "join slice a on slice_out = a.id join slice b on slice_in = b.id group by a.name, b.name order by a.name",
        "select distinct thread.name, process.name from slice join thread_track on track_id = thread_track.id "
        "join thread using (utid) join process using (upid) order by tid",
        "select count(*) from directly_connected_flow((select min(id) from slice where name = 'step'))",
    )
    trace = Trace(path)
    assert errors == []
    assert {name for name, _, _ in spans} == {*STAGES, "read ahead", "ready", "step", "wait"}
    for name, count, ns in spans:
        if name not in ("read ahead", "ready"):
            assert count == len(trace.named(name))
            assert ns / 1e9 == pytest.approx(trace.seconds(name), abs=1e-9 * count)
    assert arrows == [["place", "step", 10], ["read", "place", 20]]
    assert [tuple(row) for row in tracks] == [(name, "feedline") for name in trace.tracks.values()]
    assert reached == [[3]]  # a step, back to its placing, and from there to both reads


NAMES = {f"feedline.{name}" for name in (*STAGES, "wait")}


@pytest.mark.filterwarnings("ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
@pytest.mark.parametrize("kind", ["threads share a batch", "a stream", "prefetch 0", "several steps a call"])
def test_a_profile_has_the_same_names_and_the_steps_of_waits(kind, tmp_path):
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    profile = jax.profiler.trace(tmp_path / "profile", profiler_options=options)
    with feed_of(kind, tmp_path) as feed, profile, feed.trace(tmp_path / "trace.json") as path:
        for step in range(4):
            with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
                next(feed)
    found = collections.defaultdict(set)
    (profile,) = (tmp_path / "profile").rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(profile)).planes:
        for event in itertools.chain(*(line.events for line in plane.lines)):
            if event.name in NAMES:
                found[event.name].add(dict(event.stats).get("step"))
            elif event.name == "train":
                found["train"].add(dict(event.stats)["step_num"])
    trace = Trace(path)
    assert found.pop("train") == {1, 2, 3, 4}
    assert found.keys() == {f"feedline.{name}" for name in (*STAGES, "wait") if trace.named(name)}
    assert found["feedline.wait"] == {span.args["step"] for span in trace.named("wait")}
