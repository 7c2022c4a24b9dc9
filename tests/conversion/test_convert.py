"""`feedline.convert`: the rows of the files, what is refused, and runs that stop half way."""

import errno
import fcntl
import io
import itertools
import json
import os
import shutil
import tarfile
from pathlib import Path

import h5py
import jax
import ml_dtypes
import numpy as np
import pytest
from counted import ROWS, Counted, expected

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
    """[stage, rows] of each step of a conversion into files of 100 rows, as the command runs it."""
    opened = open_any(source)
    plan = Conversion.of(opened, destination, None, 100)
    return [[step.stage, step.rows] for step in plan.run(opened, **options)]


def read(source, rows):
    out = jax.tree.map(lambda leaf: np.empty((len(rows), *leaf.shape), leaf.dtype), source.spec)
    source.read(np.asarray(rows), out)
    return out


def same(found, wanted):
    assert found.dtype == wanted.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, wanted)


def files_of(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "conversion.jsonl"}


# --- the rows ---


@pytest.mark.parametrize("form", FORMATS)
def test_rows_shapes_and_dtypes_are_those_of_the_source(form):
    rows = numbers(11)
    source = feedline.convert(rows, "out[1]", format=form, rows_per_shard=4)
    assert len(source) == 11
    order = np.random.default_rng(1).permutation(11)
    found = read(source, order)
    assert found.keys() == rows.keys()
    for name, wanted in rows.items():
        same(found[name], wanted[order])
    names = sorted(path.name for path in Path("out[1]").iterdir())
    assert names == ["conversion.jsonl", *(f"rows-0000{i}-of-00003.{form}" for i in range(3))]
    assert not Path("out[1].partial").exists()


@pytest.mark.parametrize(
    ("form", "array"),
    [
        ("array_record", np.arange(10) << 40),
        ("npy", np.arange(30.0).reshape(5, 2, 3)),
        ("zarr", np.arange(30).reshape(5, 2, 3)),
        ("zarr", np.arange(10.0)),
    ],
)
def test_one_array_without_a_name(form, array):
    source = feedline.convert(array, "out", format=form, rows_per_shard=3)
    same(read(source, range(len(array))), array)


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
    jax.tree.map(same, read(source, range(7)), read(wanted, range(7)))


def test_a_name_with_a_slash_is_no_dict():
    rows = {"a/b": np.arange(3), "a": {"b": np.arange(3) * 2}}
    assert feedline.convert(rows, "out")[2] == {"a/b": 2, "a": {"b": 4}}


@pytest.mark.parametrize("form", [None, "zarr"])
def test_dtypes_that_numpy_does_not_have(form):
    rows = np.arange(12).reshape(6, 2).astype(ml_dtypes.bfloat16)
    same(read(feedline.convert({"x": rows}, "out", format=form), range(6))["x"], rows)
    (name,) = files_of("out") if form is None else ["rows.zarr"]
    assert name.endswith("zarr" if form else "array_record")


def records(kind):
    random = np.random.default_rng(2)
    data = [random.bytes(length) for length in (0, 5, 300, 7, 1)]
    if kind == "tar":
        with tarfile.open("rows.tar", "w") as tar:
            for i, each in enumerate(data):
                for suffix, value in (("jpg", each), ("txt", b"%d" % i)):
                    member = tarfile.TarInfo(f"{i:03}.{suffix}")
                    member.size = len(value)
                    tar.addfile(member, io.BytesIO(value))
        return "rows.tar"
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


@pytest.mark.parametrize(
    ("rows", "per_shard", "files"), [(1, None, 1), (1, 5, 1), (5, 1, 5), (5, 9, 1), (6, 3, 2)]
)
def test_sizes(rows, per_shard, files):
    source = feedline.convert(Counted(rows), "out", rows_per_shard=per_shard)
    same(read(source, range(rows))["x"], expected(rows)["x"])
    assert len(files_of("out")) == files


def test_bytes_take_a_byte_in_parquet():
    image = np.random.default_rng(0).integers(0, 256, (100, 16, 16, 3)).astype(np.uint8)
    feedline.convert({"image": image}, "out", format="parquet")
    assert len(files_of("out")["rows-00000-of-00001.parquet"]) < 1.1 * image.nbytes


def test_a_conversion_reads_chunks_of_which_files_have_whole_numbers():
    source = Counted(1 << 20)  # 32 MiB
    feedline.convert(source, "out")
    assert max(map(len, source.reads)) * 32 == 8 << 20
    for rows, shards in ((1 << 30, 128), (1 << 40, 512)):
        plan = Conversion.of(Counted(rows), "out", "parquet", None)
        assert (plan.rows_per_shard % plan.rows_per_chunk, plan.shards) == (0, shards)


# --- what is refused ---


class Empty(Counted):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    ("source", "form", "message"),
    [
        (Empty(), None, "at least one row, got an empty Empty"),
        (np.arange(3), "parquet", "parquet cannot hold these rows: .*, name an array with columns=\\['x'\\]"),
        ({"x": np.zeros(3, ml_dtypes.bfloat16)}, "npy", "first row: elements of 2 bytes have lost .*; npy and"),
        ({"x": np.zeros(3, complex)}, "parquet", "parquet cannot hold these rows: Unsupported numpy type"),
        ({"a/b": np.zeros(3)}, "zarr", "zarr cannot hold these rows: .* choose another one"),
        ({"x": {"y": np.zeros(3)}}, "parquet", "'x' is a dict in a row; .*array_record holds arrays"),
        ({"x": {"y": np.zeros(3)}}, "zarr", "'x' is a dict in a row"),
        ({"x": (np.zeros(3),)}, None, "row\\['x'\\] is a tuple; give each leaf a name"),
        ((np.zeros(3),), None, "row is a tuple; give each leaf a name"),
        (Counted(3), "csv", "format must be one of array_record, npy, parquet, zarr, got 'csv'"),
        (feedline.Mixture({"a": {"x": np.zeros(3)}}, {"a": 1}), None, "got a Mixture; convert each source"),
        (feedline.Ragged({"t": (np.arange(3), np.array([0, 1, 3]))}, pad_to=(4,)), None, "shape, got a Ragged"),
        ("files", "npy", "npy cannot hold these rows: they have bytes of any length; .* array_record holds"),
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
        ({"destination": "s3://bucket/out"}, "a folder on a disk"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        feedline.convert({"x": np.zeros(3)}, **{"destination": "out", **options})


def test_destinations_that_hold_something_else():
    feedline.convert(Counted(), "out", rows_per_shard=100)
    with pytest.raises(ValueError, match=r"rows_per_shard is 100 there and 50 here. Delete it, or choose"):
        feedline.convert(Counted(), "out", rows_per_shard=50)
    with pytest.raises(ValueError, match="rows is 400 there and 500 here; the data of the source differ"):
        feedline.convert(Counted(500), "out", rows_per_shard=100)
    other = Counted()
    other.read = lambda rows, out: jax.tree.map(lambda leaf: leaf.fill(1), out)
    with pytest.raises(ValueError, match="other values for its first, middle or last row"):
        feedline.convert(other, "out", rows_per_shard=100)
    Path("taken").mkdir()
    Path("taken", "notes.txt").touch()
    with pytest.raises(ValueError, match=r"must be a new folder or .*, and taken exists"):
        feedline.convert(Counted(), "taken")
    assert files_of("taken").keys() == {"notes.txt"}


def test_a_foreign_file_among_the_results_is_refused():
    with pytest.raises(ZeroDivisionError):
        converted(Counted(), map=stopped_after(1))
    shutil.copy("out.partial/rows-00000-of-00004.npy", "out.partial/foreign.npy")
    with pytest.raises(feedline.FeedError, match=r"must hold 400 rows .*, and hold 500"):
        converted(Counted())


def test_one_process_at_a_time():
    def convert_too(rows):
        with pytest.raises(ValueError, match="only one process at a time"):
            feedline.convert(Counted(), "out", rows_per_shard=100)
        source.before_read = lambda rows: None

    source = Counted()
    source.before_read = lambda rows: convert_too(rows) if len(rows) == 100 else None
    feedline.convert(source, "out", rows_per_shard=100)


@pytest.mark.parametrize("when", ["before the folder is made", "before the lock"])
def test_a_run_during_which_another_one_finishes(when, monkeypatch):
    def finish_another(*_):
        source.before_read = lambda rows: None
        monkeypatch.setattr(fcntl, "flock", flock)
        converted(Counted())
        finished.update({path.name: (path.stat().st_ino, path.read_bytes()) for path in Path("out").iterdir()})

    def lock_late(*arguments):
        finish_another()
        flock(*arguments)

    flock, finished, source = fcntl.flock, {}, Counted()
    plan = Conversion.of(source, "out", None, 100)
    if when == "before the lock":
        monkeypatch.setattr(fcntl, "flock", lock_late)
    else:
        source.before_read = finish_another  # when rows are sampled
    with pytest.raises(ValueError, match=r"another process has just finished .* into out, .* run this one again"):
        list(plan.run(source))
    assert len(finished) == 5
    assert {path.name: (path.stat().st_ino, path.read_bytes()) for path in Path("out").iterdir()} == finished
    assert not Path("out.partial").exists()


def test_no_file_lands_in_a_destination_made_during_the_run():
    source = Counted(before_read=lambda rows: Path("out").mkdir() if 150 in rows else None)
    same(read(feedline.convert(source, "out", rows_per_shard=100), range(ROWS))["x"], expected()["x"])
    assert len(files_of("out")) == 4
    assert not Path("out.partial").exists()


# --- a source that has changed ---


def stopped_after(shards):
    """A `map` that ends a conversion after some files."""

    def run(function, items):
        yield from itertools.islice(map(function, items), shards)
        raise ZeroDivisionError

    return run


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "stopped"])
def test_a_corrected_row_is_noticed(finished):
    np.save("rows.npy", np.arange(400))
    if finished:
        converted("rows.npy")
    else:
        with pytest.raises(ZeroDivisionError):
            converted("rows.npy", map=stopped_after(2))
    folder = "out" if finished else "out.partial"
    corrected = np.where(np.arange(400) == 150, -1, np.arange(400))  # not one of the sampled rows
    np.save("rows.npy", corrected)
    remedy = folder if finished else f"this file, or to convert all rows again {folder}"
    message = f"rows 100 to 199 of the source differ .*rows-00001.*; delete {remedy}, and run"
    with pytest.raises(ValueError, match=message):
        converted("rows.npy")
    if finished:
        Path("out").rename("out.partial")
    Path("out.partial", "rows-00001-of-00004.npy").unlink()
    same(read(feedline.convert("rows.npy", "out", rows_per_shard=100), range(400)), corrected)


def test_rows_are_read_again_only_where_files_may_have_changed():
    np.save("rows.npy", np.arange(400))
    with pytest.raises(ZeroDivisionError):
        converted("rows.npy", map=stopped_after(2))
    steps = converted("rows.npy")
    assert steps[:2] == [["keep", 200], ["convert", 0]]
    before = files_of("out")
    assert converted("rows.npy") == [["keep", 400]]
    np.save("rows.npy", np.arange(400))  # the same rows in another file
    comparison = [["keep", 0], *(["compare", rows] for rows in range(0, 500, 100))]
    assert converted("rows.npy") == comparison
    Path("out").rename("out.partial")
    assert converted("rows.npy") == comparison
    assert converted("rows.npy") == [["keep", 400]]  # the comparison was noted
    assert files_of("out") == before


def test_a_finished_result_is_only_read():
    converted(Counted())
    before = Path("out", "conversion.jsonl").read_bytes()
    others = []  # at the same time, as processes of a job do
    source = Counted(before_read=lambda rows: others.append(converted(Counted())) if 250 in rows else None)
    assert converted(source)[-1] == ["compare", 400]
    assert sorted(rows[0] for rows in source.reads if len(rows) > 1) == [0, 100, 200, 300]
    assert [steps[-1] for steps in others] == [["compare", 400]]
    assert Path("out", "conversion.jsonl").read_bytes() == before


# --- runs that stop half way ---


def failing_at(row, error):
    def before_read(rows):
        if row in rows and len(rows) > 1:  # and not where single rows are sampled
            raise error

    return Counted(before_read=before_read)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1, 2, 3], "lost those of 1 of 4 files"),
        ([0, 0, 2, 3], "got that of rows-00000-of-00004.npy again"),
    ],
)
def test_a_map_that_loses_or_repeats_results(returned, message):
    def run(function, shards):
        results = list(map(function, shards))
        return [results[i] for i in returned]

    with pytest.raises(ValueError, match=f"the result of each call once, and {message}; mend the function"):
        converted(Counted(), map=run)
    assert not Path("out").exists()


@pytest.mark.parametrize("form", FORMATS)
def test_the_next_run_continues_after_the_finished_files(form):
    with pytest.raises(feedline.RowError, match="rows 200 to 299 could not be read: OSError: no such disk"):
        feedline.convert(failing_at(250, OSError("no such disk")), "out", format=form, rows_per_shard=100)
    assert not Path("out").exists()
    finished = sorted(Path("out.partial").glob("rows-*"))
    assert [path.name[:10] for path in finished] == ["rows-00000", "rows-00001"]
    assert not list(Path("out.partial").glob(".*"))
    versions = [path.stat().st_ino for path in finished]
    again = Counted()
    source = feedline.convert(again, "out", format=form, rows_per_shard=100)
    compared_and_converted = [rows[0] for rows in again.reads if len(rows) > 1]
    assert compared_and_converted == [0, 100, 200, 300]
    assert [Path("out", path.name).stat().st_ino for path in finished] == versions
    for name, wanted in expected().items():
        same(read(source, range(ROWS))[name], wanted)
    feedline.convert(Counted(), "at_once", format=form, rows_per_shard=100)
    if form == "npy":
        assert files_of("out") == files_of("at_once")


@pytest.mark.parametrize("left", ["half a line", "no line", "no file", "files of a killed run"])
def test_what_a_killed_run_leaves(left):
    with pytest.raises(feedline.RowError):
        converted(failing_at(250, OSError()))
    manifest = Path("out.partial", "conversion.jsonl")
    if left == "files of a killed run":
        Path("out.partial", ".unfinished-x").mkdir()
        Path("out.partial", ".unfinished-x", "rows-00002-of-00004.npy").touch()
    elif left == "no file":
        Path("out.partial", "rows-00001-of-00004.npy").unlink()
    else:
        text = manifest.read_bytes()
        manifest.write_bytes(text[:-20] if left == "half a line" else b"")
    converted(Counted())
    lines = Path("out", "conversion.jsonl").read_text().splitlines()
    assert sorted({json.loads(line)["shard"] for line in lines[1:]}) == [0, 1, 2, 3]
    converted(Counted(), "at_once")
    assert files_of("out") == files_of("at_once")


def test_a_file_that_is_missing_from_a_result():
    converted(Counted())
    before = files_of("out")
    Path("out", "rows-00003-of-00004.npy").unlink()
    with pytest.raises(ValueError, match=r"rows-00003-of-00004.npy is missing; .* rename it to out.partial"):
        converted(Counted())
    Path("out").rename("out.partial")
    assert converted(Counted())[-1] == ["convert", 100]
    assert files_of("out") == before


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_that_holds_other_rows_than_were_written(form, monkeypatch):
    """As if the disk had damaged it: it is never given its name."""
    real = formats._WRITERS[form]

    def damaged(path, row, chunks, *sizes):
        def flawed():
            for columns in chunks:
                yield {leaf: np.where(column == 222 / 3, -1, column) for leaf, column in columns.items()}

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
        feedline.convert(Counted(), "out", rows_per_shard=100)
    assert caught.value.errno == errno.ENOSPC
    names = sorted(path.name[:10] for path in Path("out.partial").iterdir())
    assert names == ["conversion", "rows-00000", "rows-00001"]
    monkeypatch.setitem(formats._WRITERS, "npy", real)
    assert len(feedline.convert(Counted(), "out", rows_per_shard=100)) == ROWS
