"""Zarr folders with chunks that are missing, that change while they are read, or whose metadata cannot be true."""

import json
import os
import pickle
import shutil
import sys

import numpy as np
import programs
import pytest
import tensorstore as ts

import feedline
from feedline._src.errors import FeedError, RowError

ROWS = np.arange(1, 161, dtype=np.int32).reshape(40, 4)
CHUNKS = {2: "{}.0", 3: "c/{}/0"}
METADATA = {2: ".zarray", 3: "zarr.json"}


def write(path, version, rows=ROWS, **metadata):
    spec = {"driver": {2: "zarr", 3: "zarr3"}[version], "kvstore": {"driver": "file", "path": str(path)}}
    spec["metadata"] = metadata
    chunks = None if "chunk_grid" in metadata else ts.ChunkLayout(chunk_shape=[10, *rows.shape[1:]][: rows.ndim])
    ts.open(spec, create=True, dtype=rows.dtype, shape=rows.shape, chunk_layout=chunks).result().write(
        rows
    ).result()
    return path


def group(path, version, **arrays):
    path.mkdir()
    mark = {2: (".zgroup", {"zarr_format": 2}), 3: ("zarr.json", {"zarr_format": 3, "node_type": "group"})}
    name, content = mark[version]
    (path / name).write_text(json.dumps(content))
    for child, rows in arrays.items():
        write(path / child, version, rows)
    return path


def edit(path, version, **changes):
    file = path / METADATA[version]
    metadata = json.loads(file.read_text())
    if version == 3 and "chunks" in changes:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = changes.pop("chunks")
    file.write_text(json.dumps(metadata | changes))
    return path


def read(source, *rows):
    out = np.zeros((len(rows), *source.spec.shape), source.spec.dtype)
    source.read(np.array(rows), out)
    return out


@pytest.mark.parametrize("version", METADATA)
def test_a_missing_chunk_is_an_error_that_names_it(tmp_path, version):
    path = write(tmp_path / "x.zarr", version)
    (path / CHUNKS[version].format(2)).unlink()
    source = feedline.open_source(path)
    np.testing.assert_array_equal(read(source, 19, 30), ROWS[[19, 30]])
    with pytest.raises(
        RowError, match=r'every chunk must be there, .* missing\. .*missing_chunks="fill"'
    ) as error:
        read(source, 5, 25)
    assert (error.value.row, error.value.file) == (20, str(path))
    with pytest.raises(RowError, match="every chunk must be there") as error:
        _ = source.identity
    assert (error.value.row, error.value.file) == (20, str(path))


@pytest.mark.parametrize("version", METADATA)
def test_rows_of_a_missing_chunk_are_bad_rows_also_where_the_fingerprint_samples_them(tmp_path, version, sharding):
    path = write(tmp_path / "x.zarr", version)
    (path / CHUNKS[version].format(2)).unlink()
    source = feedline.open_source(path)
    reading = feedline.Reading(bad_rows="substitute", bad_rows_budget=100)
    with feedline.Feed(source, 8, sharding, epochs=1, reading=reading) as feed:
        seen = np.concatenate(list(feed))
        assert feed.statistics().bad_rows == 10
    good = np.delete(ROWS, np.s_[20:30], 0)
    assert {*seen[:, 0].tolist()} <= {*good[:, 0].tolist()}
    np.testing.assert_array_equal(read(pickle.loads(pickle.dumps(source)), 19, 30), ROWS[[19, 30]])
    with pytest.raises(RowError, match="every chunk must be there"):
        feedline.Feed(source, 8, sharding)


@pytest.mark.parametrize("version", METADATA)
def test_missing_chunks_have_the_fill_value_if_requested(tmp_path, version):
    path = edit(write(tmp_path / "x.zarr", version), version, fill_value=-7)
    (path / CHUNKS[version].format(2)).unlink()
    source = feedline.open_source(path, missing_chunks="fill")
    assert (read(source, 20, 29) == -7).all()
    np.testing.assert_array_equal(read(source, 19, 30), ROWS[[19, 30]])
    assert (read(pickle.loads(pickle.dumps(source)), 20) == -7).all()


def test_metadata_without_a_fill_value_fill_nothing(tmp_path):
    path = write(tmp_path / "x.zarr", 2)  # TensorStore writes null
    (path / "2.0").unlink()
    with pytest.raises(RowError, match="every chunk must be there"):
        read(feedline.open_source(path, missing_chunks="fill"), 25)
    with pytest.raises(ValueError, match=r'missing_chunks must be "error", or "fill" .*, got 0'):
        feedline.open_source(path, missing_chunks=0)
    np.save(tmp_path / "x.npy", ROWS)
    with pytest.raises(ValueError, match=r"missing_chunks is for \.zarr, got it with .*x\.npy"):
        feedline.open_source(tmp_path / "x.npy", missing_chunks="fill")


def test_a_missing_inner_chunk_of_a_shard_is_an_error(tmp_path):
    inner = {"chunk_shape": [5, 4], "codecs": [{"name": "bytes"}]}
    shards = {
        "data_type": "int32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [20, 4]}},
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
    }
    rows = ROWS.copy()
    rows[5:10] = 0  # the fill value: TensorStore leaves such chunks out
    path = write(tmp_path / "x.zarr", 3, rows, **shards)
    with pytest.raises(RowError, match=r"chunk .* is missing"):
        read(feedline.open_source(path), 7)
    source = feedline.open_source(path, missing_chunks="fill")
    np.testing.assert_array_equal(read(source, 7, 39), rows[[7, 39]])
    (path / "c/1/0").unlink()
    with pytest.raises(RowError, match=r"chunk .* is missing") as error:
        read(feedline.open_source(path), 3, 37)
    assert error.value.row == 35


@pytest.mark.parametrize("missing", ["error", "fill"])
@pytest.mark.parametrize("version", METADATA)
def test_a_folder_that_is_deleted_while_it_is_read_ends_the_feed(tmp_path, sharding, version, missing):
    path = edit(write(tmp_path / "x.zarr", version, np.ones((4000, 4), np.int32)), version, fill_value=0)
    source = feedline.open_source(path, missing_chunks=missing, cache_bytes=0)
    reading = feedline.Reading(bad_rows="substitute", bad_rows_budget=10**6, threads=1)
    with feedline.Feed(source, 8, sharding, reading=reading) as feed:
        assert np.asarray(next(feed)).all()
        if missing == "error":
            (path / METADATA[version]).unlink()  # else rows may find no substitute before it goes
            shutil.rmtree(path)
        else:  # at once: of chunks that are deleted one by one, each might as well have been left out
            path.rename(tmp_path / "elsewhere")
        with pytest.raises(FeedError, match=r"it cannot be found any more .* since the source was open") as error:
            assert all(np.asarray(batch).all() for batch in feed)
        assert not isinstance(error.value, RowError)
        assert error.value.file == str(path / METADATA[version])


@pytest.mark.parametrize("version", METADATA)
def test_metadata_that_change_are_seen_by_reads_and_by_other_processes(tmp_path, version):
    path = write(tmp_path / "x.zarr", version)
    source = feedline.open_source(path, cache_bytes=0)
    pickled = pickle.dumps(source)
    os.replace(path, tmp_path / "old.zarr")
    write(path, version, ROWS + 1)
    for use in (lambda: read(source, 3), lambda: pickle.loads(pickled)):
        with pytest.raises(FeedError, match="another file lies at its path since the source was opened") as error:
            use()
        assert not isinstance(error.value, RowError)
    (path / METADATA[version]).write_text("{")
    with pytest.raises(FeedError, match="must not change while a feed reads it"):
        pickle.loads(pickled)
    shutil.rmtree(path)
    with pytest.raises(FeedError, match="cannot be found any more"):
        pickle.loads(pickled)


@pytest.mark.parametrize("version", METADATA)
def test_other_processes_see_that_chunks_changed_where_the_identity_samples_them(tmp_path, version):
    path = write(tmp_path / "x.zarr", version)
    other = write(tmp_path / "y.zarr", version, ROWS + 1)
    source = feedline.open_source(path)
    known = source.identity
    pickled = pickle.dumps(source)
    assert pickle.loads(pickled).identity == known
    shutil.copyfile(other / CHUNKS[version].format(0), path / CHUNKS[version].format(0))
    with pytest.raises(FeedError, match=r"chunks of a Zarr array must not change .* differ now\. .*x\.zarr"):
        pickle.loads(pickled)


UNDER_A_LIMIT = """
import resource, sys
import tensorstore
import feedline
used = resource.getpagesize() * int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30), resource.RLIM_INFINITY))
feedline.open_source(sys.argv[1])
"""


@pytest.mark.slow
def test_a_chunk_must_fit_into_what_is_left_of_a_limit(tmp_path):
    """Else TensorStore would abort the process when it reads it."""
    path = edit(write(tmp_path / "x.zarr", 2), 2, chunks=[(3 << 26) + 1, 4])
    done = programs.run([sys.executable, "-c", UNDER_A_LIMIT, path], capture_output=True, text=True)
    assert "one of its chunks must fit into memory, and takes 3221225488 bytes of" in done.stderr


@pytest.mark.parametrize("version", METADATA)
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"shape": [40, 2**40]}, r"a row of its chunks must fit into memory, and takes \d+ bytes"),
        ({"chunks": [10, 2**40]}, r"one of its chunks must fit into memory, and takes \d+ bytes"),
        ({"chunks": [2**40, 4]}, r"one of its chunks must fit into memory, and takes \d+ bytes"),
        ({"chunks": [10, 2**58]}, r"x\.zarr"),
        ({"shape": [40, 2**60]}, r"x\.zarr"),
        ({"shape": [-3, 4]}, r"x\.zarr cannot be read as a Zarr array"),
        ({"shape": [40, 4.5]}, r"x\.zarr cannot be read as a Zarr array"),
        ({"shape": "x"}, r"x\.zarr cannot be read as a Zarr array"),
        ({"chunks": [0, 4]}, r"x\.zarr cannot be read as a Zarr array"),
        ({"chunks": [10]}, r"x\.zarr cannot be read as a Zarr array"),
    ],
)
def test_invalid_metadata_are_refused(tmp_path, version, changes, match):
    path = edit(write(tmp_path / "x.zarr", version), version, **changes)
    with pytest.raises(ValueError, match=match):
        feedline.open_source(path)


@pytest.mark.parametrize("version", METADATA)
def test_an_array_of_very_many_chunks_is_opened_at_once(tmp_path, version):
    path = edit(write(tmp_path / "x.zarr", version), version, shape=[2**40, 4])
    source = feedline.open_source(path)
    assert len(source) == 2**40
    np.testing.assert_array_equal(read(source, 39, 0), ROWS[[39, 0]])
    with pytest.raises(RowError, match="every chunk must be there") as error:
        read(source, 2**40 - 1)
    assert error.value.row == (2**40 - 1) // 10 * 10


def test_metadata_that_are_no_object_or_of_an_unknown_kind_are_named(tmp_path):
    for text in ("[]", "{", "[" * 100_000, '{"node_type": 3}'):
        path = tmp_path / "x.zarr"
        path.mkdir(exist_ok=True)
        (path / "zarr.json").write_text(text)
        with pytest.raises(ValueError, match=r"x\.zarr/zarr\.json"):
            feedline.open_source(path)


@pytest.mark.parametrize("version", METADATA)
def test_a_group_with_coordinates_names_its_arrays_and_those_that_belong_together(tmp_path, is_source_of, version):
    arrays = {"lat": np.ones(5), "lon": np.ones(6), "time": np.arange(1.0, 41), "wind": np.ones((40, 5, 6))}
    path = group(tmp_path / "weather.zarr", version, **arrays, crs=np.array(1))
    with pytest.raises(
        ValueError,
        match=r"crs: .*scalar; lat: 5 rows; lon: 6 rows; time: 40 rows; wind: 40 rows; choose "
        r".*columns=\['time', 'wind'\]",
    ):
        feedline.open_source(path)
    chosen = {name: arrays[name] for name in ("time", "wind")}
    is_source_of(feedline.open_source(path, columns=["time", "wind"]), chosen)
