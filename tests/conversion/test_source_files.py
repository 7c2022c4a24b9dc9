"""The state of a source's files: it changes with each file, and is unknown where rows lie elsewhere, too."""

import functools
import importlib
import os
from pathlib import Path

import h5py
import jax
import numpy as np
import pytest
from counted import Counted

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
    return "rows.npy"


def hdf5():
    with h5py.File("rows.h5", "w") as file:
        file["x"] = np.arange(9)
    return "rows.h5"


def folder():
    Path("folder/cat").mkdir(parents=True)
    Path("folder/cat/0.txt").write_text("x")
    Path("folder/cat/1.txt").write_text("y")
    return "folder"


def converted(form):
    rows = folder() if form == "array_record" else {"x": np.arange(1000)}
    feedline.convert(feedline.open_source("folder/cat/*.txt") if rows == "folder" else rows, "out", format=form)
    return f"out/*.{form}"


@pytest.mark.parametrize(
    ("made", "changed"),
    [
        (npy, "rows.npy"),
        (hdf5, "rows.h5"),
        (folder, "folder/cat/1.txt"),
        (lambda: f"{folder()}/*/*.txt", "folder/cat/1.txt"),
        (lambda: converted("parquet"), "out/*.parquet"),
        (lambda: converted("array_record"), "out/*.array_record"),
        (lambda: converted("zarr"), "out/*.zarr/x/c/0"),
    ],
)
def test_each_file_counts_even_if_size_and_time_are_restored(made, changed):
    path = made()
    before = state_of_files(feedline.open_source(path))
    assert before is not None
    assert state_of_files(feedline.open_source(path)) == before
    (file,) = Path().glob(changed)
    found = file.stat()
    file.write_bytes(file.read_bytes())
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert state_of_files(feedline.open_source(path)) != before


def length_of_file(record, out, row):
    length(record["file"], out, row)


def also(record, out, row):
    length(record["file"], out, row)


def test_a_decoder_counts_with_its_arguments_and_its_module(monkeypatch):
    path = folder()
    decoders = (length_of_file, also, functools.partial(length_of_file))
    states = {state_of_files(feedline.decoded(path, decode, SPEC)) for decode in decoders}
    states.add(state_of_files(feedline.open_source(path)))
    Path("mine.py").write_text("def decode(record, out, row):\n    out['length'][...] = 1\n")
    monkeypatch.syspath_prepend(".")
    source = feedline.decoded(path, importlib.import_module("mine").decode, SPEC)
    states.add(state_of_files(source))
    Path("mine.py").touch()
    states.add(state_of_files(source))
    assert len(states - {None}) == 6


def replaced():
    source = feedline.open_source(npy())
    Path("rows.npy").unlink()
    npy()
    return source


UNKNOWN = {
    "a source of the user": Counted,
    "arrays in memory": lambda: feedline.open_source(npy())[0],
    "a decoder that does not pickle": lambda: feedline.decoded(
        folder(), lambda record, out, row: length_of_file(record, out, row), SPEC
    ),
    "records that a function decodes": lambda: feedline.open_source(
        converted("array_record"), decode=lambda records: {"x": np.array([len(record) for record in records])}
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
