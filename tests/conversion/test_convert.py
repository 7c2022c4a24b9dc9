"""`feedline.convert`: the rows of the files, what is refused, and runs that stop half way."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import h5py
import jax
import ml_dtypes
import numpy as np
import pytest
from counted import ROWS, Counted, expected, files_of
from rows_read import read_rows
from tar_files import write_tar

import feedline
from feedline._src.tools.convert import formats
from feedline._src.tools.convert.convert import Conversion, open_any

FORMATS = ("array_record", "npy", "parquet", "zarr")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def numbers(rows):
    random = np.random.default_rng(0)
    return {
        "image": random.integers(0, 256, (rows, 4, 5, 3)).astype(np.uint8),
        "raw": random.integers(0, 256, (rows, 9)).astype(np.uint8),
        "label": random.integers(-(1 << 62), 1 << 62, rows),
        "float64": random.normal(size=rows) * 1e300,
        "half": random.normal(size=(rows, 2)).astype(np.float16),
        "masks": random.random((rows, 7)) < 0.5,
        "flag": random.random(rows) < 0.5,
        "unsigned": np.full(rows, (1 << 64) - 1, np.uint64),
        "größe_€": np.arange(rows, dtype=">i2"),
    }


def converted(source, destination="out", **options):
    """How many files are finished after each step of a conversion into files of 100 rows."""
    return list(Conversion.of(open_any(source), destination, None, 100).run(**options))


def same(found, wanted):
    assert found.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, wanted)


# --- the rows ---


@pytest.mark.parametrize("form", FORMATS)
def test_rows_shapes_and_dtypes_are_those_of_the_source(form):
    rows = numbers(11)
    source = feedline.convert(rows, "out[1]", format=form, rows_per_shard=4)
    assert len(source) == 11
    order = np.random.default_rng(1).permutation(11)
    found = read_rows(source, order)
    assert found.keys() == rows.keys()
    for name, wanted in rows.items():
        same(found[name], wanted[order])
    names = sorted(path.name for path in Path("out[1]").iterdir())
    assert names == ["conversion.json", *(f"rows-0000{i}-of-00003.{form}" for i in range(3))]
    assert not Path("out[1].partial").exists()


@pytest.mark.parametrize("form", ["array_record", "npy", "zarr"])
@pytest.mark.parametrize("array", [np.arange(10) << 40, np.arange(30.0).reshape(5, 2, 3)], ids=["1", "3"])
def test_one_array_without_a_name(form, array):
    source = feedline.convert(array, "out", format=form, rows_per_shard=3)
    same(read_rows(source, range(len(array))), array)


@pytest.mark.parametrize("form", ["array_record", "npy"])
def test_groups_of_hdf5_stay_dicts(form):
    rows = numbers(7)
    with h5py.File("rows.h5", "w") as file:
        for name in ("image", "label", "masks"):
            file[f"train/{name}"] = rows[name]
        file["train/more/half"], file["flag"], file["a/x"], file["trai"] = (rows["half"],) * 4
    wanted = feedline.open_source("rows.h5")
    source = feedline.convert("rows.h5", "out", format=form, rows_per_shard=3)
    assert source.spec == wanted.spec
    assert source.spec["train"].keys() == {"image", "label", "masks", "more"}
    jax.tree.map(same, read_rows(source, range(7)), read_rows(wanted, range(7)))


@pytest.mark.parametrize("form", [None, "zarr"])
def test_dtypes_that_numpy_does_not_have(form):
    rows = np.arange(12).reshape(6, 2).astype(ml_dtypes.bfloat16)
    same(read_rows(feedline.convert({"x": rows}, "out", format=form), range(6))["x"], rows)
    (name,) = files_of("out") if form is None else ["rows.zarr"]
    assert name.endswith("zarr" if form else "array_record")


def records(kind):
    if kind == "csv":
        Path("rows.csv").write_text(",name\n0,a\n1,b\n")  # as pandas writes its index, without a name
        return "rows.csv"
    random = np.random.default_rng(2)
    data = [random.bytes(length) for length in (0, 5, 300, 7, 1)]
    if kind == "tar":
        members = []
        for i, each in enumerate(data):
            members += [(f"{i:03}.jpg", each), (f"{i:03}.txt", b"%d" % i)]
        return write_tar("rows.tar", members)
    for i, each in enumerate(data):
        path = Path("rows", f"{'dog' if i > 2 else 'cat'}/" if kind == "classes" else "", f"{i}.bin")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(each)
    return "rows"


@pytest.mark.parametrize(
    ("kind", "form", "chosen"),
    [
        ("files", None, "array_record"),
        ("files", "parquet", "parquet"),
        ("classes", None, "parquet"),
        ("tar", None, "parquet"),
    ],
)
def test_encoded_rows(kind, form, chosen):
    path = records(kind)
    wanted = feedline.open_source(path)
    source = feedline.convert(path, "out", format=form, rows_per_shard=2)
    assert [source[i] for i in range(len(source))] == [wanted[i] for i in range(len(wanted))]
    assert set(files_of("out")) == {f"rows-0000{i}-of-00003.{chosen}" for i in range(3)}


# --- what is refused ---


class Empty(Counted):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    ("source", "form", "message"),
    [
        (Empty(), None, "at least one row, got a source without any"),
        (np.arange(3), "parquet", "rows: they are arrays without a name; .*, name an array with columns="),
        ({"x": np.zeros(3, ml_dtypes.bfloat16)}, "npy", "first row: elements of .* have lost .*; npy and"),
        ({"x": np.zeros(3, complex)}, "parquet", "parquet cannot hold these rows: Unsupported numpy type"),
        ({"a/b": np.zeros(3)}, "zarr", "zarr cannot hold these rows: .* choose another format"),
        ({"x": {"y": np.zeros(3)}}, "zarr", "'x' is a dict in a row"),
        ({"x": (np.zeros(3),)}, None, "row\\['x'\\] is a tuple; give each leaf a name"),
        (Counted(3), "csv", "format must be one of array_record, npy, parquet, zarr, got 'csv'"),
        (feedline.Mixture({"a": {"x": np.zeros(3)}}, {"a": 1}), None, "got a Mixture; convert each source"),
        (feedline.Ragged({"t": (np.arange(3), np.array([0, 1, 3]))}, pad_to=(4,)), None, "shape, got a Ragged"),
        (feedline.Lanes(lambda lane, count: None, 1), None, "a stream has no rows with random access, got Lanes"),
        ("files", "npy", "npy cannot hold these rows: they have bytes of any length; .* array_record holds"),
        ("csv", None, "each column needs a name, and one has none"),
        ("classes", "zarr", "they have bytes of any length; .* with feedline.decoded"),
        ("classes", "array_record", "they are records of several fields; .* parquet holds columns with names"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_converted(source, form, message):
    with pytest.raises((ValueError, TypeError), match=message):
        feedline.convert(records(source) if isinstance(source, str) else source, "out", format=form)
    assert not list(Path().glob("out*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows_per_shard": 0}, "rows_per_shard must be"),
        ({"workers": -1}, "workers must be"),
        ({"workers": 1, "map": map}, "in place of worker processes"),
        ({"workers": 1}, "cannot read arrays in the memory"),
        ({"destination": "s3://bucket/out"}, "a new folder on a disk, got 's3:"),
        ({"destination": "."}, "a new folder on a disk, got '.'"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        feedline.convert({"x": np.zeros(3)}, **{"destination": "out", **options})


def test_destinations_that_hold_something_else():
    np.save("rows.npy", np.arange(400))
    converted("rows.npy")
    with pytest.raises(ValueError, match=r"rows_per_shard was 100 and is now 50. Choose another"):
        feedline.convert("rows.npy", "out", rows_per_shard=50)
    with pytest.raises(ValueError, match="rows was 400 and is now 500; the data of the source differ"):
        converted(np.arange(500))
    with pytest.raises(ValueError, match="other values for its first, middle or last row"):
        converted(np.arange(400) * 2)
    os.utime("rows.npy", ns=(1, 1))  # another time, whatever the clock's resolution
    with pytest.raises(ValueError, match="a file of the source has another size or time"):
        converted("rows.npy")
    Path("taken").mkdir()
    Path("taken", "notes.txt").touch()
    with pytest.raises(ValueError, match=r"taken must be a new folder, or .*cannot be read.*, or delete this"):
        converted("rows.npy", "taken")
    assert files_of("taken").keys() == {"notes.txt"}


def test_one_process_at_a_time():
    def convert_too(rows):
        with pytest.raises(ValueError, match="only one process at a time"):
            converted(Counted())
        source.before_read = lambda rows: None

    source = Counted()
    source.before_read = lambda rows: convert_too(rows) if len(rows) == 100 else None
    converted(source)


def test_a_run_that_waited_for_another_one_writes_nothing(monkeypatch):
    def lock_late(*arguments):
        monkeypatch.setattr(fcntl, "flock", flock)
        converted(Counted())
        flock(*arguments)

    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lock_late)
    with pytest.raises(ValueError, match=r"another process has just finished .* into out; convert again to open"):
        converted(Counted())
    same(read_rows(feedline.open_source("out/*.npy"), range(ROWS))["x"], expected()["x"])


# --- runs that stop half way ---


def failing_at(row, error):
    def before_read(rows):
        if row in rows and len(rows) > 1:  # reads that sample single rows succeed
            raise error

    return Counted(before_read=before_read)


@pytest.mark.parametrize("form", FORMATS)
def test_the_next_run_continues_after_the_finished_files(form):
    with pytest.raises(feedline.RowError, match="rows 200 to 299 could not be read: OSError: no such disk"):
        feedline.convert(failing_at(250, OSError("no such disk")), "out", format=form, rows_per_shard=100)
    assert not Path("out").exists()
    assert {path.name[:10] for path in Path("out.partial").iterdir()} == {"conversion", "rows-00000", "rows-00001"}
    Path("out.partial", ".unfinished-x").mkdir()  # as a killed run leaves it
    again = Counted()
    source = feedline.convert(again, "out", format=form, rows_per_shard=100)
    assert [rows[0] for rows in again.reads if len(rows) > 1] == [200, 300]
    for name, wanted in expected().items():
        same(read_rows(source, range(ROWS))[name], wanted)


@pytest.mark.parametrize("manifest", ["", "half", "[]", "[" * 100_000, '{"version": 3}'])
def test_a_damaged_manifest_is_refused(manifest):
    with pytest.raises(feedline.RowError):
        converted(failing_at(250, OSError()))
    Path("out.partial", "conversion.json").write_text(manifest)
    with pytest.raises(ValueError, match=r"out.partial must be .* Choose another destination, or"):
        converted(Counted())


def test_a_finished_result_is_only_read():
    assert converted(Counted()) == [0, 1, 2, 3, 4]
    before = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    source = Counted()
    assert converted(source) == [4]
    assert max(map(len, source.reads)) == 1
    assert {path: path.stat().st_mtime_ns for path in Path("out").iterdir()} == before


@pytest.mark.parametrize("change", ["missing", "foreign"])
def test_a_result_with_another_number_of_files_is_refused(change):
    converted(Counted())
    path = Path("out", "rows-00003-of-00004.npy")
    path.unlink() if change == "missing" else shutil.copy(path, "out/foreign.npy")
    with pytest.raises(feedline.FeedError, match=r"must hold 400 rows .* but hold (300|500).* was added, or was"):
        converted(Counted())


def test_a_map_that_leaves_out_files():
    with pytest.raises(feedline.FeedError, match=r"must hold 400 rows .* was skipped by the given `map`"):
        converted(Counted(), map=lambda function, shards: list(map(function, shards[1:])))
    assert not Path("out").exists()


def test_a_shard_that_another_process_has_written_is_never_removed(monkeypatch):
    """A kill while the chunks of a Zarr array are removed would leave an array with rows of zeros."""

    def remove(path, *arguments, **options):
        assert not Path(path).name.startswith("rows-")
        rmtree(path, *arguments, **options)

    conversion = Conversion.of(open_any(Counted()), "out", "zarr", 100)
    conversion.folder.mkdir()
    conversion.convert_shard(2)
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert conversion.convert_shard(2) == {"rows": 100}
    assert [path.name for path in conversion.folder.iterdir()] == ["rows-00002-of-00004.zarr"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_holds_other_rows_than_were_written(form, monkeypatch):
    """A file that the disk damaged never gets its final name."""
    real = formats._WRITERS[form]

    def damaged(path, row, chunks, *sizes):
        def flawed():
            for chunk in chunks:
                chunk["y"][chunk["y"] == 222 / 3] = -1
                yield chunk

        real(path, row, flawed(), *sizes)

    monkeypatch.setitem(formats._WRITERS, form, damaged)
    with pytest.raises(feedline.FeedError, match="read back as they were written, and rows 200 to 299 differ"):
        feedline.convert(Counted(), "out", format=form, rows_per_shard=100)
    assert len(list(Path("out.partial").glob("rows-*"))) == 2


@pytest.mark.parametrize(
    "error",  # as the libraries raise it
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError('RESOURCE_EXHAUSTED: Error writing local file "x": No space left on device [os_error_code=28]'),
        RuntimeError("write() failed: No space left on device; writing x.array_record; at byte 2097152"),
    ],
)
def test_a_full_disk(monkeypatch, error):
    real = formats._WRITERS["npy"]

    def full(path, *arguments):
        if "00002" in path.name:
            raise error
        return real(path, *arguments)

    monkeypatch.setitem(formats._WRITERS, "npy", full)
    with pytest.raises(OSError, match=r"No space left.* about 0.0 MB; finished files are kept, so free") as caught:
        converted(Counted())
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.setitem(formats._WRITERS, "npy", real)
    assert converted(Counted()) == [2, 3, 4]
