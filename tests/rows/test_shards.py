"""Which shard each row lies in, against NumPy's repeat."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline._src.rows.shards import Shards

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


@given(LENGTHS, st.data())
def test_split_gives_each_offset_once_with_its_row_in_the_shard(lengths, data):
    shards = Shards(lengths)
    rows = np.array(data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=30)), np.int64)
    got, seen = np.full(len(rows), -1), []
    for shard, local, offsets in shards.split(rows):
        seen.append(shard)
        assert (local >= 0).all()
        assert (local < lengths[shard]).all()
        assert (got[offsets] == -1).all()
        got[offsets] = sum(lengths[:shard]) + local
    assert seen == sorted(set(seen))
    np.testing.assert_array_equal(got, rows)


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_not_there_is_refused(row):
    with pytest.raises(IndexError, match=f"rows are 0 to 4, got {row} to {row}"):
        Shards([2, 3]).of(np.array([row]))
