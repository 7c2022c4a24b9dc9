"""The state of a source's files: it changes with each file, and is unknown where rows lie elsewhere, too."""

import functools
import importlib
import os
from pathlib import Path

import h5py
import jax
import numpy as np
import pyarrow as pa
import pytest
from array_record.python import array_record_module
from counted import Counted
from pyarrow import parquet

import feedline
from feedline._src.tools.convert.manifest import state_of_files

SPEC = {"length": jax.ShapeDtypeStruct((), np.int64)}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def length(record, out, row):
    out["length"][...] = len(record)


def npy():
    np.save("rows.npy", np.arange(9))
    return "rows.npy", Path("rows.npy")


def parquet_of_numbers():
    parquet.write_table(pa.table({"x": np.arange(9)}), "rows.parquet")
    return "rows.parquet", Path("rows.parquet")


def parquet_of_text():
    parquet.write_table(pa.table({"x": ["a", "b"]}), "rows.parquet")
    return "rows.parquet", Path("rows.parquet")


def array_record():
    writer = array_record_module.ArrayRecordWriter("rows.array_record", "group_size:1")
    writer.write(b"abc")
    writer.close()
    return "rows.array_record", Path("rows.array_record")


def hdf5():
    with h5py.File("rows.h5", "w") as file:
        file["x"] = np.arange(9)
    return "rows.h5", Path("rows.h5")


def zarr():
    feedline.convert(np.arange(1000), "out", format="zarr")
    (chunk,) = Path("out").rglob("c/0")
    return "out/*.zarr", chunk


def folder():
    Path("folder/cat").mkdir(parents=True)
    Path("folder/cat/0.txt").write_text("x")
    Path("folder/cat/1.txt").write_text("y")
    return "folder", Path("folder/cat/1.txt")


def files():
    return "folder/*/*.txt", folder()[1]


MADE = [npy, parquet_of_numbers, parquet_of_text, array_record, hdf5, zarr, folder, files]


@pytest.mark.parametrize("made", MADE, ids=[each.__name__ for each in MADE])
def test_each_file_counts_even_if_size_and_time_are_restored(made):
    path, changed = made()
    before = state_of_files(feedline.open_source(path))
    assert before is not None
    assert state_of_files(feedline.open_source(path)) == before
    found = changed.stat()
    changed.write_bytes(changed.read_bytes())
    os.utime(changed, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert state_of_files(feedline.open_source(path)) != before


def test_a_decoder_counts_with_its_arguments_and_its_module():
    path, _ = folder()
    found = state_of_files(feedline.decoded(path, length_of_file, SPEC))
    assert found is not None
    assert found != state_of_files(feedline.open_source(path))
    partial = functools.partial(length_of_file)
    assert len({found, *(state_of_files(feedline.decoded(path, other, SPEC)) for other in (partial, also))}) == 3


def length_of_file(record, out, row):
    length(record["file"], out, row)


def also(record, out, row):
    length(record["file"], out, row)


def test_a_decoder_counts_with_the_file_that_defines_it(monkeypatch):
    Path("mine.py").write_text("def decode(record, out, row):\n    out['length'][...] = 1\n")
    monkeypatch.syspath_prepend(".")
    decode = importlib.import_module("mine").decode
    source = feedline.decoded(folder()[0], decode, SPEC)
    before = state_of_files(source)
    Path("mine.py").touch()
    assert state_of_files(source) != before


def replaced():
    source = feedline.open_source(npy()[0])
    Path("rows.npy").unlink()
    npy()
    return source


UNKNOWN = {
    "a source of the user": Counted,
    "arrays in memory": lambda: feedline.open_source(npy()[0])[0],
    "a decoder that does not pickle": lambda: feedline.decoded(
        folder()[0], lambda record, out, row: length_of_file(record, out, row), SPEC
    ),
    "records that a function decodes": lambda: feedline.open_source(
        array_record()[0], decode=lambda records: {"x": np.array([len(record) for record in records])}
    ),
    "a file that was replaced since it was opened": replaced,
}


@pytest.mark.parametrize("made", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_state_that_is_unknown(made):
    assert state_of_files(made()) is None


@pytest.mark.slow
def test_the_state_of_a_dataset_of_hugging_face_is_unknown():
    import datasets

    assert state_of_files(feedline.open_source(datasets.Dataset.from_dict({"x": [1, 2]}))) is None
