"""Which rows a batch holds, whether its few positions are looked up in a stretch of the order or computed."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline import order
from feedline.loader.batches import _STRETCH, Recipe
from feedline.options import Blocks, Order
from feedline.schedule import Cursor, Schedule


@given(data=st.data())
@settings(max_examples=100)
def test_every_position_has_the_row_that_the_order_says(data):
    rows = data.draw(st.integers(1, 3 * _STRETCH))
    remainder = data.draw(st.sampled_from(["drop", "pad", "wrap"]))
    batch_size = data.draw(st.integers(1, rows if remainder == "drop" else 3 * _STRETCH))
    schedule = Schedule(rows, batch_size, remainder, None)
    how = Order(3, data.draw(st.sampled_from([True, False, Blocks(rows=100, window=7)])))
    step = data.draw(st.integers(1, 7))  # a process that owns every so many-th row
    places = schedule.places(
        schedule.batch_at(Cursor(data.draw(st.integers(0, 3)), data.draw(st.integers(0, rows))), 0),
        np.arange(data.draw(st.integers(0, step - 1)) % batch_size, batch_size, step),
    )
    found = Recipe(None, how, schedule, None).locate(places)
    assert found.dtype == np.int64
    told = zip(places.epoch.tolist(), places.position.tolist(), strict=True)
    whole = {epoch: order.rows_at(how, rows, epoch, np.arange(rows)) for epoch in set(places.epoch.tolist())}
    assert found.tolist() == [whole[epoch][position] for epoch, position in told]
