"""A null in a Parquet or Arrow file is a bad row by itself."""

import jax
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

import feedline


def _stream(table, path):
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=64)


KINDS = {
    "parquet": lambda table, path: pq.write_table(table, path, row_group_size=64),
    "arrow": lambda table, path: feather.write_feather(table, str(path), compression="uncompressed", chunksize=64),
    "feather": lambda table, path: feather.write_feather(table, str(path), compression="lz4", chunksize=64),
    "stream.arrow": _stream,
}
NULL = [3, 63, 64, 65, 130, 299]


def _table():
    """Rows 0 … 299 whose `label` is null at NULL. `fine` and `pair` have no nulls."""
    label = [None if i in NULL else i for i in range(300)]
    pair = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(600)), 2)
    return pa.table({"fine": np.arange(300), "label": pa.array(label, pa.int32()), "pair": pair})


def _room(source, count):
    return {name: np.empty((count, *row.shape), row.dtype) for name, row in source.spec.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_only_reads_that_ask_for_a_null_fail_and_name_the_first_one(tmp_path, kind):
    KINDS[kind](_table(), tmp_path / f"x.{kind}")
    source = feedline.open_source(tmp_path / f"x.{kind}")
    good = np.setdiff1d(np.arange(300), NULL)[::-1]
    out = _room(source, len(good))
    source.read(good, out)
    np.testing.assert_array_equal(out["label"], good)
    np.testing.assert_array_equal(out["pair"][:, 1], 2 * good + 1)
    asked = np.array([7, 130, 64, 3, 130])
    with pytest.raises(
        feedline.RowError,
        match=r"'label' is null in this row; fill nulls .*columns=.*bad_rows='substitute'",
    ) as error:
        source.read(asked, _room(source, 5))
    assert (error.value.row, error.value.file) == (130, str(tmp_path / f"x.{kind}"))
    some = feedline.open_source(tmp_path / f"x.{kind}", columns=["fine"])
    some.read(asked, _room(some, 5))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cache_bytes", [0, 1 << 30])
def test_each_null_is_replaced_by_itself(tmp_path, sharding, delivered, kind, cache_bytes):
    KINDS[kind](_table(), tmp_path / f"x.{kind}")
    source = feedline.open_source(tmp_path / f"x.{kind}", cache_bytes=cache_bytes)
    reading = feedline.Reading(threads=1, bad_rows="mask", bad_rows_budget=0.5)
    order = feedline.Order(shuffle=False)
    feed = feedline.Feed(source, 16, sharding, order=order, epochs=1, reading=reading, remainder="pad")
    batches = delivered(feed)
    fine, label, valid = (
        np.concatenate([batch[name] for batch in batches])[:300] for name in ("fine", "label", "valid")
    )
    assert np.flatnonzero(~valid).tolist() == NULL
    np.testing.assert_array_equal(fine, label)
    np.testing.assert_array_equal(fine[valid], np.flatnonzero(valid))


@pytest.mark.parametrize("name", ["x.feather", "x.parquet"])
def test_raise_names_the_first_null_of_a_batch(tmp_path, sharding, name):
    if name == "x.parquet":
        pq.write_table(_table(), tmp_path / name, write_statistics=False)
    else:
        KINDS["feather"](_table(), tmp_path / name)
    feed = feedline.Feed(tmp_path / name, 16, sharding, order=feedline.Order(shuffle=False))
    with feed, pytest.raises(feedline.RowError, match=r"is null in this row.*row 3, epoch 0, position 3"):
        next(feed)


KNOWN = r"'label' has 6 nulls.*; fill nulls .*columns=.*bad_rows='substitute'.*x\.{}"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_nulls_that_metadata_count_are_refused_when_a_feed_is_built(tmp_path, sharding, kind):
    path = tmp_path / f"x.{kind}"
    KINDS[kind](_table(), path)
    with pytest.raises(feedline.RowError, match=KNOWN.format(kind)) as error:
        feedline.Feed(path, 16, sharding)
    assert (error.value.row, error.value.file) == (None, str(path))
    feedline.Feed(feedline.open_source(path, columns=["fine", "pair"]), 16, sharding).close()
    for mode in ("substitute", "mask"):
        reading = feedline.Reading(bad_rows=mode, bad_rows_budget=0.5)
        with feedline.Feed(path, 16, sharding, reading=reading) as feed:
            next(feed)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_known_nulls_are_refused_behind_a_decoder_and_in_a_mixture(tmp_path, sharding, kind):
    KINDS[kind](_table().append_column("text", [["x"] * 300]), tmp_path / f"x.{kind}")

    def decode(record, out, row):
        out["fine"][...] = record["fine"]

    decoded = feedline.decoded(tmp_path / f"x.{kind}", decode, {"fine": jax.ShapeDtypeStruct((), np.int64)})
    fine = feedline.open_source(tmp_path / f"x.{kind}", columns=["fine"])
    for source in (decoded, feedline.Mixture({"a": fine, "b": decoded}, weights={"a": 1, "b": 1})):
        with pytest.raises(feedline.RowError, match=KNOWN.format(kind)):
            feedline.Feed(source, 16, sharding)
        reading = feedline.Reading(bad_rows="substitute", bad_rows_budget=0.5)
        feedline.Feed(source, 16, sharding, reading=reading).close()


def test_known_nulls_of_several_files_are_counted_together(tmp_path, sharding):
    for i, values in enumerate(([*range(8)], [None, 3], [None, None])):
        pq.write_table(pa.table({"x": pa.array(values, pa.int32())}), tmp_path / f"{i}.parquet")
    with pytest.raises(feedline.RowError, match=r"'x' has 3 nulls in 2 of the 3 files; .*1\.parquet"):
        feedline.Feed(feedline.open_source(tmp_path / "*.parquet"), 8, sharding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("column", "null"),
    [
        (pa.array([[1.0, 2.0], [1.0, None], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)), [1, 2]),
        (pa.array([[[1, 2]], [None], [[1, None]], [[5, 6]]], pa.list_(pa.list_(pa.int8(), 2), 1)), [1, 2]),
        (pa.array([b"abc", None, None, b"def"], pa.binary(3)), [1, 2]),
        (pa.array([True, None, None, False]), [1, 2]),
    ],
    ids=["list", "nested", "bytes", "flag"],
)
def test_nulls_of_all_kinds(tmp_path, kind, column, null):
    KINDS[kind](pa.table({"x": column}), tmp_path / f"x.{kind}")
    source = feedline.open_source(tmp_path / f"x.{kind}")
    for row in range(4):
        out = _room(source, 1)
        if row in null:
            with pytest.raises(feedline.RowError, match="is null in this row"):
                source.read(np.array([row]), out)
        else:
            source.read(np.array([row]), out)
            expected = column[row].as_py()
            expected = list(expected) if isinstance(expected, bytes) else expected
            assert out["x"][0].tolist() == expected
