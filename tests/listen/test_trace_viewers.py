"""A profile of JAX has the names and steps of a trace."""

import collections
import itertools

import jax
import pytest
from trace_file import STAGES, Trace, feed_of

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
