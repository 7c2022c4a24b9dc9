"""Comparing a layout with the layout on one device: equal rows pass, and the first difference is named."""

import dataclasses

import numpy as np
import pytest

from feedline._src.tools.audit.layouts import Layout
from feedline._src.tools.audit.observed import Observed, Refused, Settings, ShardDigests
from feedline._src.tools.audit.verdict import Reference, judge

ROWS, SIZE, BATCHES = 20, 4, 8  # five batches an epoch
CONTENT = np.random.default_rng(0).integers(1 << 63, size=(2, ROWS, 2), dtype=np.uint64)
"""[epoch, position, leaf]: a digest for each row."""
LAYOUT = Layout("data", 1, 4, (4, 1))


def run(size=SIZE, batches=BATCHES, first=0, content=CONTENT, transformed=False):
    """What one process observes from batch `first` of SIZE rows on."""
    starts = [divmod(first * SIZE + k * size, ROWS) for k in range(batches)]
    parts = [content[epoch, position : position + size] for epoch, position in starts]
    states = [
        {"step": first + k + 1, "epoch": epoch, "position": position + size}
        for k, (epoch, position) in enumerate(starts)
    ]
    return Observed(
        settings=Settings(ROWS, size, "drop", None, transformed),
        names=["batch['x']", "batch['y']"],
        row_specs=[((), np.dtype(np.int32))] * 2,
        batches=[[[ShardDigests(0, (), part[:, leaf])] for leaf in range(2)] for part in parts],
        states=states,
        first_batch=first,
        seconds=0.0,
    )


def verdict(observed, layout=LAYOUT, reference=None):
    return judge(layout, [observed], Reference.of([reference or run()]))


def test_equal_rows_pass():
    found = verdict(run())
    assert (found.difference, found.rows, found.batches) == (None, 32, 8)
    assert found.digest == found.on_one_device
    assert Reference.of([run()]).different_rows == 32


def test_resumed_in_batches_of_twice_the_size():
    twice = dataclasses.replace(LAYOUT, times=2)
    found = verdict(run(size=8, batches=1, first=5), twice)
    assert (found.difference, found.rows, found.batch_size) == (None, 8, 8)
    other = CONTENT.copy()
    other[1, 5] += np.uint64(1)
    found = verdict(run(size=8, batches=1, first=5, content=other), twice)
    assert (found.difference.where["row"], found.rows) == (5, 8)


def test_a_swapped_row_is_named_and_located_on_one_device():
    content = CONTENT.copy()
    content[1, [5, 6]] = content[1, [6, 5]]
    found = verdict(run(content=content)).difference
    assert found.where == {"batch": 6, "row": 1, "leaf": "batch['x']"}
    assert "at epoch 1, position 5 is another row" in str(found)
    assert str(found).endswith("one device holds that row at batch 6, row 2")


def test_a_changed_value_of_a_transformed_row_explains_the_rule():
    content = CONTENT.copy()
    content[0, 0, 1] += np.uint64(1)
    found = verdict(run(content=content, transformed=True), reference=run(transformed=True)).difference
    assert found.where == {"batch": 0, "row": 0, "leaf": "batch['y']"}
    assert "row i of its result must depend on row i alone" in str(found)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"settings": Settings(ROWS, 8, "drop", None, False)}, "has batch_size 8, on one device batch_size 4"),
        ({"names": ["batch['x']", "batch['z']"]}, "has the leaves"),
        ({"states": [{"step": 2, "epoch": 0, "position": 8}] * BATCHES}, "its state is {'step': 2"),
    ],
)
def test_feeds_with_other_options_leaves_or_states_differ(changed, text):
    assert text in str(verdict(dataclasses.replace(run(), **changed)).difference)


def test_rows_padded_to_another_length_differ():
    padded = run()
    padded.batches[2][1] = [ShardDigests(*padded.batches[2][1][0][:3], shape=(1,))]
    found = verdict(padded).difference
    assert found.where == {"batch": 2, "leaf": "batch['y']"}
    assert str(found) == "its rows have shape [1], on one device []"


def test_a_layout_without_compared_rows_is_not_reported_as_the_same():
    assert verdict(Refused("no")).refused == "no"
    late = run(batches=1, first=0)
    assert "met no row that one device met" in verdict(dataclasses.replace(late, first_batch=9)).refused
