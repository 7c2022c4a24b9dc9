"""`feedline.convert`: the rows of the files, what is refused, and runs that stop half way."""

import errno
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
from array_record.python import array_record_module
from counted import ROWS, Counted, expected

import feedline
from feedline._src.tools.convert import writers
from feedline._src.tools.convert.convert import converting, open_any
from feedline._src.tools.convert.plan import Plan

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


def steps_of(source, destination, **options):
    """The steps of a conversion, as the command runs it."""
    opened = open_any(source)
    plan = Plan.of(opened, destination, None, options.get("rows_per_shard"))
    yield from converting(plan, opened)


def read(source, rows):
    out = jax.tree.map(lambda leaf: np.empty((len(rows), *leaf.shape), leaf.dtype), source.spec)
    source.read(np.asarray(rows), out)
    return out


def delete(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


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


@pytest.mark.parametrize("form", ["array_record", "npy", "zarr"])
@pytest.mark.parametrize(
    "array", [np.arange(10) << 40, np.arange(30.0).reshape(5, 2, 3)], ids=["numbers", "arrays"]
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
    source = feedline.convert({"a/b": np.arange(3)}, "out")
    assert source[2] == {"a/b": 2}


@pytest.mark.parametrize("form", ["array_record", "zarr"])
def test_dtypes_that_numpy_does_not_have(form):
    rows = np.arange(12).reshape(6, 2).astype(ml_dtypes.bfloat16)
    same(read(feedline.convert({"x": rows}, "out", format=form), range(6))["x"], rows)


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


def test_decoded_rows_are_arrays():
    def decode(record, out, row):
        out["length"][...] = len(record)

    spec = {"length": jax.ShapeDtypeStruct((), np.int64)}
    source = feedline.convert(feedline.decoded(records("files"), decode, spec), "out")
    assert read(source, range(5))["length"].tolist() == [0, 5, 300, 7, 1]


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


def test_a_conversion_reads_a_chunk_at_a_time():
    source = Counted(1 << 20)  # 32 MiB
    feedline.convert(source, "out")
    assert max(map(len, source.reads)) * 32 == 8 << 20


def test_files_have_whole_groups():
    plan = Plan.of(Counted(1 << 30), "out", "parquet", None)
    assert (plan.rows_per_shard % plan.rows_per_chunk, plan.shards) == (0, 128)
    plan = Plan.of(Counted(1 << 40), "out", "parquet", None)
    assert (plan.rows_per_shard % plan.rows_per_chunk, plan.shards) == (0, 512)


# --- what is refused ---


class Empty(Counted):
    def __len__(self):
        return 0


@pytest.mark.parametrize(
    ("source", "form", "message"),
    [
        (Empty(), None, "at least one row, got an empty Empty"),
        (np.arange(3), "parquet", "one array without a name.*columns=\\['x'\\]"),
        ({"x": np.zeros(3, ml_dtypes.bfloat16)}, "npy", "bfloat16, whose name.*choose zarr"),
        ({"x": np.zeros(3, complex)}, "parquet", "complex128, and 'x'"),
        ({"a/b": np.zeros(3)}, "zarr", "'a/b'"),
        ({"x": {"y": np.zeros(3)}}, "parquet", "dicts in a row, and 'x/y' lies in one; choose npy or array_rec"),
        ({"x": {"y": np.zeros(3)}}, "zarr", "dicts in a row, and 'x/y' lies in one; choose npy or array_record"),
        ({"x": {"y": np.zeros(3)}, "x/y": np.zeros(3)}, None, "got \\['x/y', 'x/y'\\]; rename one"),
        ({"x": {"y/z": np.zeros(3)}}, None, "got the leaf row\\['x'\\]\\['y/z'\\]"),
        ({"x": (np.zeros(3),)}, None, "got the leaf row\\['x'\\]\\[0\\]"),
        ((np.zeros(3),), None, "got the leaf row\\[0\\]"),
        (Counted(3), "csv", "format must be one of array_record, npy, parquet, zarr, got 'csv'"),
        (feedline.Mixture({"a": {"x": np.zeros(3)}}, {"a": 1}), None, "convert each of its sources"),
        (feedline.Ragged({"t": (np.arange(3), np.array([0, 1, 3]))}, pad_to=(4,)), None, "different lengths"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_converted(source, form, message):
    with pytest.raises((ValueError, TypeError), match=message):
        feedline.convert(source, "out", format=form)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "form", "message"),
    [
        (
            "files",
            "npy",
            "npy cannot hold bytes of any length, and rows are bytes; choose array_record or parquet",
        ),
        ("classes", "zarr", "'file' holds bytes.*feedline.decoded"),
        ("classes", "array_record", "several fields, and these have file, label; choose parquet"),
    ],
)
def test_formats_that_cannot_hold_bytes(kind, form, message):
    with pytest.raises(TypeError, match=message):
        feedline.convert(records(kind), "out", format=form)


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


def test_a_finished_conversion_is_not_done_again():
    np.save("rows.npy", np.arange(400))
    before = (feedline.convert("rows.npy", "out"), files_of("out"))[1]
    stages = [step.stage for step in steps_of("rows.npy", "out")]
    assert stages == ["keep"]
    assert files_of("out") == before


def test_a_finished_conversion_is_compared_with_rows_that_have_no_files():
    before = (feedline.convert(Counted(), "out", rows_per_shard=100), files_of("out"))[1]
    again = Counted()
    feedline.convert(again, "out", rows_per_shard=100)
    assert sorted(rows[0] for rows in again.reads if len(rows) > 1) == [0, 100, 200, 300]
    assert files_of("out") == before


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_corrected_row_is_noticed_after_the_conversion(workers):
    np.save("rows.npy", np.arange(400))
    feedline.convert("rows.npy", "out", rows_per_shard=100)
    np.save("rows.npy", np.where(np.arange(400) == 150, -1, np.arange(400)))  # not one of the sampled rows
    with pytest.raises(ValueError, match=r"rows 100 to 199 of the source .*; delete out, or choose"):
        feedline.convert("rows.npy", "out", rows_per_shard=100, workers=workers)


def test_a_source_that_was_only_written_again_is_compared():
    np.save("rows.npy", np.arange(400))
    feedline.convert("rows.npy", "out", rows_per_shard=100)
    np.save("rows.npy", np.arange(400))
    steps = list(steps_of("rows.npy", "out", rows_per_shard=100))
    assert steps[-1] == ("compare", 400, 400)


def test_a_file_of_the_result_that_is_gone_is_noticed():
    feedline.convert(Counted(), "out", rows_per_shard=100)
    Path("out", "rows-00003-of-00004.npy").unlink()
    with pytest.raises(feedline.FeedError, match=r"must hold 400 rows .* and there are 300 .*delete out"):
        feedline.convert(Counted(), "out", rows_per_shard=100)
    lines = Path("out", "conversion.jsonl").read_text().splitlines(keepends=True)
    Path("out", "conversion.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match=r"lists 3 of 4 files.*delete out"):
        feedline.convert(Counted(), "out", rows_per_shard=100)


def test_one_process_at_a_time():
    def convert_too(rows):
        with pytest.raises(ValueError, match="only one process at a time"):
            feedline.convert(Counted(), "out", rows_per_shard=100)
        source.before_read = lambda rows: None

    source = Counted()
    source.before_read = lambda rows: convert_too(rows) if len(rows) == 100 else None
    feedline.convert(source, "out", rows_per_shard=100)


# --- runs that stop half way ---


def failing_at(row, error):
    def before_read(rows):
        if row in rows and len(rows) > 1:  # and not where single rows are sampled
            raise error

    return Counted(before_read=before_read)


def test_a_map_that_loses_results():
    for name, kept in (("convert_shard", 300), ("check_shard", 300)):

        def lossy(function, shards, name=name):
            results = list(map(function, shards))
            return results[1:] if function.func.__name__ == name else results

        with pytest.raises(ValueError, match=f"got results for {kept} of 400 rows; mend the function"):
            feedline.convert(Counted(), name, rows_per_shard=100, map=lossy)
        assert not Path(name).exists()


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


def stopped_after(shards):
    """A `map` that ends a conversion after some files."""

    def run(function, items):
        yield from itertools.islice(map(function, items), shards)
        raise ZeroDivisionError

    return run


def test_rows_that_were_corrected_after_their_file_was_finished():
    np.save("rows.npy", np.arange(400))
    with pytest.raises(ZeroDivisionError):
        feedline.convert("rows.npy", "out", rows_per_shard=100, map=stopped_after(2))
    corrected = np.where(np.arange(400) == 150, -1, np.arange(400))  # not one of the sampled rows
    np.save("rows.npy", corrected)
    with pytest.raises(
        ValueError, match=r"rows 100 to 199 of the source differ .*rows-00001.*; delete this file, or out.partial"
    ) as caught:
        feedline.convert("rows.npy", "out", rows_per_shard=100)
    assert Path("out.partial", "rows-00001-of-00004.npy").exists(), caught.value
    Path("out.partial", "rows-00001-of-00004.npy").unlink()
    same(read(feedline.convert("rows.npy", "out", rows_per_shard=100), range(400)), corrected)


def test_finished_files_are_kept_unread_while_the_files_of_the_source_are_the_same():
    np.save("rows.npy", np.arange(400))
    with pytest.raises(ZeroDivisionError):
        feedline.convert("rows.npy", "out", rows_per_shard=100, map=stopped_after(2))
    steps = list(steps_of("rows.npy", "out", rows_per_shard=100))
    assert steps[:2] == [("keep", 200, 400), ("convert", 200, 400)]


def test_a_comparison_is_noted_for_the_next_run():
    np.save("rows.npy", np.arange(400))
    with pytest.raises(ZeroDivisionError):
        feedline.convert("rows.npy", "out", rows_per_shard=100, map=stopped_after(2))
    np.save("rows.npy", np.arange(400))  # the same rows in another file
    for compared in (True, False):
        steps = steps_of("rows.npy", "out", rows_per_shard=100)
        found = [next(steps) for _ in range(3)]
        steps.close()
        assert [step.stage for step in found] == (
            ["keep", "compare", "compare"] if compared else ["keep", "convert", "convert"]
        )


def test_half_a_line_at_the_end_of_the_manifest():
    with pytest.raises(feedline.RowError):
        feedline.convert(failing_at(250, OSError()), "out", rows_per_shard=100)
    manifest = Path("out.partial", "conversion.jsonl")
    manifest.write_bytes(manifest.read_bytes()[:-20])  # as if the machine had stopped while it was written
    again = Counted()
    feedline.convert(again, "out", rows_per_shard=100)
    lines = Path("out", "conversion.jsonl").read_text().splitlines()
    assert [json.loads(line)["shard"] for line in lines[1:]] == [0, 1, 2, 3]


def test_a_source_that_has_changed_is_refused():
    np.save("rows.npy", np.arange(400))
    with pytest.raises(ZeroDivisionError):
        feedline.convert("rows.npy", "out", rows_per_shard=100, map=lambda function, shards: 1 / 0)
    np.save("rows.npy", np.arange(400) * 2)
    with pytest.raises(
        ValueError, match=r"out.partial holds another conversion, or .*: the data of the source differ"
    ):
        feedline.convert("rows.npy", "out", rows_per_shard=100)


def convert_without_check(source, destination, form):
    def checks_fail(function, shards):
        return map(function, shards) if function.func.__name__ == "convert_shard" else 1 / 0

    with pytest.raises(ZeroDivisionError):
        feedline.convert(source, destination, format=form, rows_per_shard=100, map=checks_fail)
    return Path(f"{destination}.partial", f"rows-00002-of-00004.{form}")


@pytest.mark.parametrize("form", FORMATS)
def test_a_wrong_row_is_named(form):
    flawed = Counted()
    flawed.read = lambda rows, out: (Counted().read(rows, out), out["y"].__setitem__(rows == 222, -1))
    path = convert_without_check(Counted(), "out", form)
    delete(path)
    convert_without_check(flawed, "flawed", form).rename(path)
    with pytest.raises(feedline.FeedError, match="'y' differs in this one; delete this file") as caught:
        feedline.convert(Counted(), "out", format=form, rows_per_shard=100)
    assert (caught.value.row, caught.value.file) == (222, str(path))
    delete(path)
    source = feedline.convert(Counted(), "out", format=form, rows_per_shard=100)
    same(read(source, range(ROWS))["y"], expected()["y"])


def test_a_wrong_record_is_named():
    path = records("files")
    convert_without_check(path, "out", "array_record")
    (file,) = Path("out.partial").glob("rows-*")
    wrong = [
        b"" if i == 3 else record for i, record in enumerate(feedline.open_source(file).records(np.arange(5)))
    ]
    writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1")
    for record in wrong:
        writer.write(record)
    writer.close()
    with pytest.raises(feedline.FeedError, match="a row differs in this one") as caught:
        feedline.convert(path, "out", rows_per_shard=100)
    assert caught.value.row == 3


def test_files_that_are_no_longer_whole():
    path = convert_without_check(Counted(), "out", "npy")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(feedline.FeedError, match=r"a converted file cannot be read: .*delete this file") as caught:
        feedline.convert(Counted(), "out", format="npy", rows_per_shard=100)
    assert caught.value.file == str(path)
    np.save(path, np.zeros(7))
    with pytest.raises(feedline.FeedError, match="must have 100 rows of"):
        feedline.convert(Counted(), "out", format="npy", rows_per_shard=100)
    path.unlink()
    Path("out.partial", "foreign.npy").write_bytes(Path("out.partial", "rows-00000-of-00004.npy").read_bytes())
    with pytest.raises(
        feedline.FeedError, match=r"must hold 400 rows of .* take foreign files out of out.partial"
    ):
        feedline.convert(Counted(), "out", format="npy", rows_per_shard=100)


@pytest.mark.parametrize(
    "error",  # as the libraries raise it
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        ValueError('RESOURCE_EXHAUSTED: Error writing local file "x": No space left on device [os_error_code=28]'),
        RuntimeError("write() failed: No space left on device; writing x.array_record; at byte 2097152"),
    ],
)
def test_a_full_disk(monkeypatch, error):
    real = writers.WRITERS["npy"]

    def full(path, *arguments):
        if "00002" in path.name:
            raise error
        return real(path, *arguments)

    monkeypatch.setitem(writers.WRITERS, "npy", full)
    with pytest.raises(OSError, match=r"No space left.* about 0.0 MB; finished files are kept, so free") as caught:
        feedline.convert(Counted(), "out", rows_per_shard=100)
    assert caught.value.errno == errno.ENOSPC
    assert sorted(path.name[:10] for path in Path("out.partial").iterdir()) == [
        "conversion",
        "rows-00000",
        "rows-00001",
    ]
    monkeypatch.setitem(writers.WRITERS, "npy", real)
    assert len(feedline.convert(Counted(), "out", rows_per_shard=100)) == ROWS
