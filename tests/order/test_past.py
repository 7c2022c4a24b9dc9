"""Two fingerprints may differ in what concerns only rows that were not delivered yet."""

import json

import pytest

from feedline._src import state as states
from feedline._src.order.schedule import Cursor


def fingerprint(phases, rows=2**63 - 1, end="endless", **more):
    names = sorted({name for _, counts in phases for name in counts})
    order = {"seed": 0, "end": end, "orders": {name: {"seed": 1, "shuffle": True} for name in names}}
    return {
        "rows": rows, "spec": {}, "data": "d", "format": "mixture",
        "order": {**order, "phases": [list(phase) for phase in phases], **more},
    }  # fmt: skip


A, B, C = {"web": 7, "code": 3}, {"web": 1, "code": 1}, {"web": 1, "code": 1, "books": 1}
SAVED = fingerprint([(0, A), (1000, B)])


def check(own, position, epoch=0, step=0, saved=SAVED, allow=()):
    state = json.loads(json.dumps(states.make(step, Cursor(epoch, position), saved, None)))
    return states.check(state, own, allow)


@pytest.mark.parametrize(
    ("phases", "last"),
    [
        ([(0, A), (1000, B)], 5000),
        ([(0, A), (1000, A)], 1000),
        ([(0, A), (600, B)], 600),
        ([(0, A)], 1000),
        ([(0, A), (1000, B), (1500, A)], 1500),
        ([(0, A), (1000, C)], 1000),
        ([(0, B)], 0),
    ],
)
def test_weights_may_change_from_the_position_of_a_state_on(phases, last):
    own = fingerprint(phases, rows=5000, end="first_exhausted")
    assert check(own, last) == (0, Cursor(0, last))
    if last < 5000:
        with pytest.raises(
            ValueError,
            match=r"over other data: its 'order' is \{.*'phases': .* this feed's is \{.* must stay as they were; "
            rf".* as a phase, Mixture\(sources, weights=\[\(0, old weights\), \({last + 1}, new weights\)\]\)",
        ):
            check(own, last + 1)
        assert check(own, last + 1, allow=("order",))[1].position == last + 1


def test_other_sources_and_seeds_are_no_future():
    other_weights = {**SAVED["order"], "phases": [[0, B]]}
    for own in ({"data": "e"}, {"order": {**SAVED["order"], "seed": 1}}, {"order": {**other_weights, "seed": 1}}):
        with pytest.raises(ValueError, match=r"over other data.*Give the feed the same source"):
            check({**SAVED, **own}, 5)


@pytest.mark.parametrize("step", [0, 3, 4, 5])
def test_batch_sizes_may_change_from_the_step_of_a_state_on(step):
    saved = fingerprint([(0, A)], batch_sizes=[[0, 8], [4, 16]])
    for sizes, last in (([[0, 8], [4, 16]], 9), ([[0, 8], [5, 16]], 4), ([[0, 8]], 4), ([[0, 16]], 0)):
        own = fingerprint([(0, A)], batch_sizes=sizes)
        if step <= last:
            assert check(own, 50, step=step, saved=saved)[0] == step
        else:
            with pytest.raises(ValueError, match="'batch_sizes'"):
                check(own, 50, step=step, saved=saved)
    for one, two in ((saved, SAVED), (SAVED, saved)):  # a constant size is not compared
        assert check(
            {**one, "order": {**one["order"], "phases": two["order"]["phases"]}}, 50, step=step, saved=two
        )
