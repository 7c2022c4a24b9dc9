"""`Feed.diagnose`: what it reports, that it leaves the feed where it was, and what it refuses."""

import collections
import functools
import itertools
import json

import jax
import numpy as np
import pytest
from planted import ROWS, Sleeping
from trace_file import ONE, stream_of

import feedline
from feedline._src.listen.diagnosis import PHASES, Diagnosis

X = {"x": np.arange(4000, dtype=np.float32).reshape(1000, 4)}


KINDS = {
    "rows": lambda **options: feedline.Feed(X, 8, ONE, **options),
    "without prefetch": lambda **options: feedline.Feed(X, 8, ONE, prefetch=0, **options),
    "two steps a call": lambda **options: feedline.Feed(X, 8, ONE, steps_per_call=2, **options),
    "one batch": lambda **options: feedline.Feed({"x": X["x"][:8]}, 8, ONE, **options),
    "stream": lambda **options: feedline.Feed(stream_of(1000), 8, ONE, **options),
    "workers": lambda **options: feedline.Feed(
        {"x": "x.npy"}, 8, ONE, reading=feedline.Reading(workers=1), **options
    ),
}
SLOW = [pytest.param(kind, marks=pytest.mark.slow) if kind == "workers" else kind for kind in KINDS]


@pytest.fixture
def feed():
    with feedline.Feed({"x": np.ones((64, 4), np.float32)}, 8, ONE) as feed:
        yield feed


@pytest.mark.parametrize("epochs", [None, 2])
@pytest.mark.parametrize("kind", SLOW)
def test_the_feed_is_left_where_it_was(kind, epochs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X["x"])
    make = functools.partial(KINDS[kind], epochs=epochs)
    taken = 0 if kind == "one batch" else 1
    with make() as feed:
        expected = [np.asarray(batch["x"]) for batch in itertools.islice(feed, 2)]
    with make() as feed:
        got = [np.asarray(next(feed)["x"]) for _ in range(taken)]
        state, before = feed.get_state(), feed.statistics()
        with feed.diagnose(steps=48) as diagnosis:
            assert sum(1 for _ in feed) == 48
        assert set(diagnosis.steps_s) == set(PHASES)
        assert feed.get_state() == state
        after = feed.statistics()
        assert (after.batches, after.rows, after.wait_s) == (before.batches, before.rows, before.wait_s)
        got += [np.asarray(next(feed)["x"]) for _ in range(2 - taken)]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["rows", "without prefetch", "stream"])
def test_an_exhausted_feed_stays_exhausted_and_its_next_pass_is_whole(kind):
    with KINDS[kind](epochs=1) as feed:
        whole = sum(1 for _ in feed)
        with feed.diagnose(steps=48):
            assert sum(1 for _ in feed) == 48
        assert feed.get_state()["step"] == whole
        with pytest.raises(StopIteration):
            next(feed)
        assert sum(1 for _ in feed) == whole


def test_the_diagnosis_is_printed_and_is_json(capsys):
    with KINDS["without prefetch"]() as feed, feed.diagnose(steps=48) as diagnosis:
        collections.deque(feed, maxlen=0)
    shown = capsys.readouterr().out
    assert shown == f"{diagnosis}\n"
    assert shown.startswith("a step takes ")
    assert json.loads(json.dumps(diagnosis.to_dict()))["au"] == diagnosis.au
    assert diagnosis.first_batch_s > 0


def test_further_loops_in_the_context_get_no_batch_and_do_not_hang(feed):
    with feed.diagnose(steps=48):
        assert [sum(1 for _ in feed) for _ in range(3)] == [48, 0, 0]
        with pytest.raises(ValueError, match="the diagnosis is over"):
            collections.deque(iter(lambda: list(feed), None), maxlen=0)  # until the error


def test_an_interrupt_while_the_context_is_left_loses_nothing(feed, monkeypatch):
    next(feed)
    state = feed.get_state()

    def interrupted(*arguments, **options):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), feed.diagnose(steps=48):
        monkeypatch.setattr(feed, "_stop", next(feed) and interrupted)
    assert (feed.get_state(), feed._run) == (state, None)
    with feed.diagnose(steps=48):
        next(feed)
    next(feed)


def test_a_step_that_donates_its_batch(feed):
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    with feed.diagnose(steps=40) as diagnosis:
        results = [float(step(batch["x"]).sum()) for batch in feed]
    assert results == [64.0] * 40
    assert set(diagnosis.steps_s) == set(PHASES)


def test_arrays_that_another_thread_deletes_meanwhile_are_not_waited_for(feed, monkeypatch):
    def live_arrays():
        for deleted_before in (False, True):
            array = jax.numpy.ones(1)
            if deleted_before:
                array.delete()
            yield array
            array.delete()

    monkeypatch.setattr(jax, "live_arrays", live_arrays)
    with feed.diagnose(steps=40) as diagnosis:
        assert len(list(feed)) == 40
    assert set(diagnosis.steps_s) == set(PHASES)


@pytest.mark.parametrize("steps", [0, 3, 12, 40])
def test_a_loop_that_ends_early_tells_what_it_saw(feed, steps):
    state = feed.get_state()
    with feed.diagnose(steps=40) as diagnosis:
        for _ in zip(range(steps), feed, strict=False):
            pass
    assert len(diagnosis.steps_s) == steps // 10
    assert feed.get_state() == state
    assert ("not measured" in str(diagnosis)) == (0 < steps // 10 < 4)
    next(feed)


def test_an_exception_in_the_loop_or_of_the_source_passes_and_the_feed_is_where_it_was(feed, capsys):
    next(feed)
    state = feed.get_state()
    with pytest.raises(KeyError, match="mine"), feed.diagnose(steps=40):
        {}[next(feed) and "mine"]
    assert feed.get_state() == state
    assert capsys.readouterr().out == ""
    next(feed)

    class Failing(Sleeping):
        def read(self, rows, out):
            raise feedline.RowError("broken", stage="read")

    with feedline.Feed(Failing(), ROWS, ONE) as failing:
        with failing.diagnose(steps=40):
            with pytest.raises(feedline.RowError, match="broken"):
                next(failing)
            assert list(failing) == []
        assert failing.position == 0


def test_wrong_use_is_an_error_with_a_fix():
    feed = feedline.Feed(X, [(0, 8), (1, 16)], ONE)
    next(feed)
    few = r"needs 4 phases of 10 steps, where the first 6 drain the buffers, got steps=39; use steps=200"
    with pytest.raises(ValueError, match=few), feed.diagnose(steps=39):
        pass
    assert len(next(feed)["x"]) == 16
    with feed.diagnose(steps=40):
        next(feed)
        for refused in (lambda: feed.seek(1), lambda: feed.set_state(feed.get_state()), feed.diagnose().__enter__):
            with pytest.raises(ValueError, match="while it is diagnosed; leave the context of diagnose first"):
                refused()
        feed.close()
        with pytest.raises(ValueError, match="the feed is closed"):
            next(feed)
    with pytest.raises(ValueError, match="the feed is closed"), feed.diagnose():
        pass


def test_phases_that_were_left_out():
    diagnosis = Diagnosis()
    assert (str(diagnosis), diagnosis.au, diagnosis.stalls_s) == ("diagnosis: no step was measured", None, {})
    diagnosis.steps_s.update({"as it is": 0.4, "read again": 0.1})
    assert (diagnosis.stalls_s, diagnosis.au) == ({"fetch": pytest.approx(0.3)}, None)
    diagnosis.steps_s.update({"placed again": 0.2, "resident": 0.05})
    assert diagnosis.stalls_s == pytest.approx({"fetch": 0.2, "preparation": 0.0, "transfer": 0.15})
    assert diagnosis.au == pytest.approx(0.125)
