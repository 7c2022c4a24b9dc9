"""Zarr arrays and groups of versions 2 and 3, which TensorStore wrote, against NumPy."""

import json

import numpy as np
import pytest
import tensorstore as ts

import feedline
from feedline._src.rows.shards import EvenLengths

DRIVERS = {2: "zarr", 3: "zarr3"}


def _write(path, array, version, chunks, metadata=None):
    store = ts.open(
        {
            "driver": DRIVERS[version],
            "kvstore": {"driver": "file", "path": str(path)},
            "metadata": metadata or {},
        },
        create=True,
        dtype=array.dtype,
        shape=array.shape,
        chunk_layout=ts.ChunkLayout(chunk_shape=chunks),
    ).result()
    store.write(array).result()


def _group(path, version):
    path.mkdir(parents=True, exist_ok=True)
    if version == 3:
        (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))
    else:
        (path / ".zgroup").write_text(json.dumps({"zarr_format": 2}))


def _rows(count=100):
    random = np.random.default_rng(0)
    return {"image": random.integers(1, 255, (count, 6, 5), np.uint8), "label": random.integers(1, 9, count)}


@pytest.mark.slow
@pytest.mark.parametrize("version", DRIVERS)
@pytest.mark.parametrize("chunks", [(100, 6, 5), (7, 4, 5), (1, 1, 1), (1000, 6, 5)])
def test_an_array_is_read_chunk_by_chunk(tmp_path, is_source_of, version, chunks):
    rows = _rows(40)["image"]
    _write(tmp_path / "x.zarr", rows, version, chunks)
    is_source_of(feedline.open_source(tmp_path / "x.zarr"), rows)
    is_source_of(feedline.open_source(tmp_path / "x.zarr", columns=["image"], cache_bytes=0), {"image": rows})


@pytest.mark.parametrize("version", DRIVERS)
def test_a_group_is_a_dict_and_groups_follow_each_other(tmp_path, is_source_of, version):
    whole = _rows()
    for name, part in (("a.zarr", slice(0, 37)), ("b.zarr", slice(37, 100))):
        _group(tmp_path / name, version)
        _write(tmp_path / name / "image", whole["image"][part], version, (10, 6, 5))
        _write(tmp_path / name / "label", whole["label"][part], version, (16,))
    is_source_of(feedline.open_source(tmp_path / "*.zarr"), whole)
    is_source_of(feedline.open_source(tmp_path / "*.zarr", columns=["label"]), {"label": whole["label"]})


def test_a_group_in_a_group_is_a_dict_in_a_dict_and_needs_no_suffix(tmp_path, is_source_of):
    whole = _rows()
    _group(tmp_path / "data", 3)
    _group(tmp_path / "data" / "inner", 3)
    _write(tmp_path / "data" / "inner" / "image", whole["image"], 3, (10, 6, 5))
    _write(tmp_path / "data" / "label", whole["label"], 3, (16,))
    expected = {"inner": {"image": whole["image"]}, "label": whole["label"]}
    is_source_of(feedline.open_source(tmp_path / "data"), expected)


def test_a_sharded_array_is_read_by_its_inner_chunks(tmp_path, is_source_of):
    rows = _rows(64)["image"]
    inner = {"chunk_shape": [4, 6, 5], "codecs": [{"name": "bytes"}, {"name": "zstd"}]}
    shards = {"name": "regular", "configuration": {"chunk_shape": [32, 6, 5]}}
    store = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": str(tmp_path / "x.zarr")},
            "metadata": {
                "shape": [64, 6, 5],
                "data_type": "uint8",
                "chunk_grid": shards,
                "codecs": [{"name": "sharding_indexed", "configuration": inner}],
            },
        },
        create=True,
    ).result()
    store.write(rows).result()
    source = feedline.open_source(tmp_path / "x.zarr")
    is_source_of(source, rows)
    assert source._tables[0].lengths == [EvenLengths(64, 4)]


@pytest.mark.parametrize("version", DRIVERS)
def test_what_cannot_be_rows_is_refused(tmp_path, version):
    _write(tmp_path / "scalar.zarr", np.array(1.0), version, ())
    with pytest.raises(ValueError, match=r"scalar\.zarr: an array needs a first axis"):
        feedline.open_source(tmp_path / "scalar.zarr")
    _group(tmp_path / "none.zarr", version)
    with pytest.raises(ValueError, match=r"must have at least one array with rows, .*none\.zarr has none"):
        feedline.open_source(tmp_path / "none.zarr")
    _write(tmp_path / "empty.zarr", np.zeros((0, 3)), version, (1, 3))
    with pytest.raises(ValueError, match="at least one row"):
        feedline.open_source(tmp_path / "empty.zarr")
    _group(tmp_path / "uneven.zarr", version)
    for name, count in (("x", 3), ("y", 4)):
        _write(tmp_path / "uneven.zarr" / name, np.zeros(count), version, (2,))
    with pytest.raises(ValueError, match=r"uneven\.zarr has x: 3 rows; y: 4 rows; .* columns=\['y'\]"):
        feedline.open_source(tmp_path / "uneven.zarr")
    with pytest.raises(FileNotFoundError, match=r"gone\.zarr is no Zarr array or group"):
        feedline.open_source(tmp_path / "gone.zarr")


@pytest.mark.parametrize("version", DRIVERS)
def test_broken_metadata_and_chunks_are_named(tmp_path, version):
    rows = _rows(100)["image"]
    _write(
        tmp_path / "x.zarr", rows, version, (10, 6, 5), None if version == 2 else {"codecs": [{"name": "zstd"}]}
    )
    chunk = tmp_path / "x.zarr" / ("3.0.0" if version == 2 else "c/3/0/0")
    chunk.write_bytes(chunk.read_bytes()[:10])
    source = feedline.open_source(tmp_path / "x.zarr")
    source.read(np.array([0, 99]), np.empty((2, 6, 5), np.uint8))
    with pytest.raises(feedline.RowError, match="could not be read") as error:
        source.read(np.array([35]), np.empty((1, 6, 5), np.uint8))
    assert (error.value.row, error.value.file) == (30, str(tmp_path / "x.zarr"))
    mark = tmp_path / "x.zarr" / (".zarray" if version == 2 else "zarr.json")
    mark.write_text("{")
    with pytest.raises(ValueError, match=r"x\.zarr.* cannot be read as .*Zarr"):
        feedline.open_source(tmp_path / "x.zarr")


@pytest.mark.parametrize("version", DRIVERS)
def test_identity_follows_the_data_and_not_the_path(tmp_path, version):
    rows = _rows()["image"]
    changed = rows.copy()
    changed[-1] += 1
    for name, data in (("a", rows), ("b", rows), ("c", changed)):
        _write(tmp_path / name, data, version, (10, 6, 5))
    a, b, c = (feedline.open_source(tmp_path / name).identity for name in "abc")
    assert a == b != c
    assert str(tmp_path) not in str(a)
