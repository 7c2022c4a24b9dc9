"""HDF5 files, local and in a store, compared with what h5py reads from them."""

import fcntl
import os
import pickle
import re
import sys

import h5py
import numpy as np
import programs
import pytest
from rows_read import read_rows

import feedline
from feedline._src.sources.arrays import ArraySource

ROWS = 60
RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.integers(0, 255, (ROWS, 5, 3), np.uint8)
LABEL = np.arange(ROWS)
JPEGS = [RANDOM.bytes(int(length)) for length in RANDOM.integers(0, 9000, ROWS)]


def written(path, **datasets):
    """A file with these datasets: arrays, or arguments of `create_dataset`."""
    with h5py.File(path, "w") as file:
        for name, given_ in datasets.items():
            file.create_dataset(name, **(given_ if isinstance(given_, dict) else {"data": given_}))
    return path


def with_jpegs(path, **more):
    path = written(path, image={"shape": (ROWS,), "dtype": h5py.vlen_dtype(np.uint8), "chunks": (7,)}, **more)
    with h5py.File(path, "a") as file:
        for row, jpeg in enumerate(JPEGS):
            file["image"][row] = np.frombuffer(jpeg, np.uint8)
    return path


LAYOUTS = {
    "contiguous": {},
    "chunks of parts of rows": {"chunks": (7, 2, 2)},
    "gzip": {"chunks": (7, 5, 2), "compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "shuffle alone": {"shuffle": True},
    "checksums": {"chunks": (7, 5, 3), "fletcher32": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_columns_are_read_however_they_are_stored(tmp_path, is_source_of, as_local, layout):
    label = {"data": LABEL, "compression": "gzip"}
    never = {"shape": (ROWS, 2), "dtype": "f4", "fillvalue": 2.5}
    more = {"more/label": label, "more/never": never, "step": 3}
    path = written(tmp_path / "x.h5", image={"data": IMAGE, **LAYOUTS[layout]}, **more)
    source = feedline.open_source(path)
    is_source_of(source, {"image": IMAGE, "more": {"label": LABEL, "never": np.full((ROWS, 2), 2.5, "f4")}})
    as_local("remote.h5", path.read_bytes())


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("dtype", ["?", "<u2", ">i4", "<f2"])
def test_a_file_of_contiguous_datasets_is_mapped(tmp_path, as_local, libver, dtype):
    with h5py.File(tmp_path / "x.h5", "w", libver=libver, userblock_size=512) as file:
        file.create_dataset("x", data=IMAGE.astype(dtype))
        expected = file["x"][:]
    source = feedline.open_source(tmp_path / "x.h5")
    assert isinstance(source, ArraySource)
    found = read_rows(source)["x"]
    np.testing.assert_array_equal(found, expected)
    assert found.dtype == dtype
    as_local("remote.h5", (tmp_path / "x.h5").read_bytes())


def test_fields_of_compound_elements_are_leaves(tmp_path, is_source_of):
    form = np.dtype([("a", ">i4"), ("b", "f2", (2,)), ("c", [("d", "u1"), ("e", "?")])])
    array = np.zeros(ROWS, form)
    array["a"], array["b"], array["c"]["e"] = LABEL, RANDOM.random((ROWS, 2)), LABEL % 2
    expected = {"x": {"a": array["a"], "b": array["b"], "c": {"d": array["c"]["d"], "e": array["c"]["e"]}}}
    for options in ({}, {"chunks": (7,), "compression": "gzip"}, {"chunks": (7,), "fletcher32": True}):
        path = written(tmp_path / f"{len(options)}.h5", x={"data": array, **options})
        is_source_of(feedline.open_source(path), expected)
    form = np.dtype([("name", h5py.string_dtype()), ("n", "i4")])
    path = written(tmp_path / "text.h5", x=np.array([("one", 1), ("", 2)], form))
    records = [{"x/n": 1, "x/name": b"one"}, {"x/n": 2, "x/name": b""}]
    assert feedline.open_source(path).records(np.arange(2)) == records


def test_enums_are_their_numbers(tmp_path):
    colour = h5py.enum_dtype({"red": 0, "green": 7}, basetype="i2")
    path = written(tmp_path / "x.h5", colour={"data": np.array([7, 0], "i2"), "dtype": colour})
    found = read_rows(feedline.open_source(path))["colour"]
    assert (found.tolist(), found.dtype) == ([7, 0], np.int16)


@pytest.mark.parametrize("options", [{}, {"chunks": (64, 1 << 20), "compression": "gzip"}])
def test_a_header_that_promises_rows_that_no_memory_holds_is_refused(tmp_path, options):
    path = written(tmp_path / "x.h5", x={"shape": (64, 1 << 45), "dtype": "u1", **options})
    with pytest.raises(ValueError, match=r"x.h5: rows of /x that are read at once must fit into memory, and take"):
        feedline.open_source(path)


def test_a_group_that_contains_itself_is_read_once(tmp_path, is_source_of):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a/x"] = LABEL
        file["a/b"] = file["a"]
    is_source_of(feedline.open_source(tmp_path / "x.h5"), {"a": {"x": LABEL}})


def test_columns_selects_datasets_and_groups(tmp_path):
    path = written(tmp_path / "x.h5", **{"train/x": LABEL, "train/y": LABEL, "test/x": LABEL[:9]})
    assert set(feedline.open_source(path, columns=["train"]).spec["train"]) == {"x", "y"}
    assert feedline.open_source(path, columns=["train/y"]).spec.keys() == {"train"}
    assert len(feedline.open_source(path, columns=["test"])) == 9
    with pytest.raises(ValueError, match=r"has 9 rows: test/x; 60 rows: train/x, train/y; choose .*columns="):
        feedline.open_source(path)
    with pytest.raises(ValueError, match=r"columns must be some of test, train in .*, got valid"):
        feedline.open_source(path, columns=["valid"])
    with pytest.raises(ValueError, match=r"columns must be some of test, train, train/x in .*, got train/z"):
        feedline.open_source(path, columns=["train/x", "train/z"])


def test_bytes_and_text_are_encoded_rows(tmp_path, as_local):
    names = [f"photo {row} é" for row in range(ROWS)]
    path = with_jpegs(
        tmp_path / "x.h5",
        label={"data": LABEL, "chunks": (9,), "compression": "gzip"},
        name=names,
        code={"data": np.array([b"a" * (row % 5) for row in range(ROWS)])},
        raw={"data": np.array([b"ab\0"] * ROWS, "V3")},
        pair={"data": IMAGE[:, 0, :2]},
    )
    source = feedline.open_source(path)
    assert source.fields == ("code", "image", "label", "name", "pair", "raw")
    assert "image bytes, label int64[], name bytes, pair uint8[2]" in repr(source)
    rows = RANDOM.permutation(np.r_[np.arange(ROWS), 3, 3])
    for row, record in zip(rows.tolist(), pickle.loads(pickle.dumps(source)).records(rows), strict=True):
        assert record.pop("pair").tolist() == IMAGE[row, 0, :2].tolist()
        assert (record.pop("image"), record.pop("name")) == (JPEGS[row], names[row].encode())
        assert record == {"code": b"a" * (row % 5), "label": row, "raw": b"ab\0"}
    as_local("remote.h5", path.read_bytes())
    assert feedline.open_source(path, columns=["image"])[-1] == JPEGS[-1]
    assert feedline.open_source(path, columns=["label", "pair"])[7]["label"] == 7


def test_a_row_that_is_read_twice_can_be_changed_in_place(tmp_path):
    box = np.arange(2.0 * ROWS).reshape(ROWS, 2)
    source = feedline.open_source(with_jpegs(tmp_path / "x.h5", box=box))
    records = source.records(np.array([1, 3, 1]))
    for record in records:
        record["box"] *= -1
    np.testing.assert_array_equal([record["box"] for record in records], -box[[1, 3, 1]])


def test_other_threads_use_h5py_while_bytes_are_fetched(tmp_path, store, options):
    """Garbage collection on any thread may need h5py's lock, which must be free while the object is fetched."""
    path = written(tmp_path / "x.h5", x={"data": IMAGE, "chunks": (7, 2, 2)})
    store.objects["/x.h5"] = path.read_bytes()
    store.fault = lambda *request: h5py.File(path).close()  # on the server's thread
    source = feedline.open_source(f"{store.url}/x.h5", store=options)
    np.testing.assert_array_equal(source[9]["x"], IMAGE[9])


FORKS = """
import os, sys, threading, time
import numpy as np
import feedline
from feedline._src.formats import hdf5

assert "h5py" not in sys.modules  # which would register its hook of forks before feedline's
source = feedline.open_source(sys.argv[1])
reading, forking = threading.Event(), threading.Event()
os.register_at_fork(before=forking.set)

def read_from(*arguments, read_from=hdf5._read_from):
    reading.set()
    forking.wait()
    time.sleep(0.1)  # until the fork has taken the locks that it can get
    return read_from(*arguments)

def read(source):
    source.read(np.arange(4), {"x": np.empty(4, np.int64)})

hdf5._read_from = read_from
thread = threading.Thread(target=read, args=[source])
thread.start()
reading.wait()
child = os.fork()
if child == 0:
    read(source)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
thread.join()
"""


def test_a_fork_during_a_read_hangs_neither_parent_nor_child(tmp_path):
    path = written(tmp_path / "x.h5", x={"data": LABEL, "chunks": (7,)})
    programs.run([sys.executable, "-W", "ignore", "-c", FORKS, path], check=True)


# --- what is refused ---


def _linked(file, name, link):
    file["x"] = LABEL
    file[name] = link


REFUSED = {
    "dangling link": (
        lambda file: _linked(file, "y", h5py.SoftLink("/nowhere")),
        "y: links are not followed, .* leads to /nowhere .*; choose its target",
    ),
    "reference": (
        lambda file: _linked(file, "r", np.array([file.ref] * ROWS, h5py.ref_dtype)),
        "r: a row must have numbers .* and has references; encode",
    ),
    "dates": (
        lambda file: file.create_dataset("t", data=np.zeros(3, "M8[s]").astype(h5py.opaque_dtype("M8[s]"))),
        "t: .* has datetime64.*dates with array.view",
    ),
    "two values in a row": (
        lambda file: file.create_dataset("t", (3, 2), h5py.string_dtype()),
        r"t: a row must have .* one value of bytes or text, and has .*\[2\]",
    ),
    "a filter that h5py lacks": (
        lambda file: file.create_dataset("t", (9,), "i4", compression=32001, allow_unknown_filter=True),
        r"t: .* has the filters \[32001\]; .*install hdf5plugin .*or write it again: new.create_dataset",
    ),
    "a scalar alone": (lambda file: file.update(x=3), "must have at least one array with rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_rows_is_refused_with_a_change_that_works(tmp_path, name):
    write, message = REFUSED[name]
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        write(file)
    with pytest.raises(ValueError, match=message):
        feedline.open_source(path)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_file_that_is_being_written_is_refused(tmp_path, libver):
    path, killed = tmp_path / "x.h5", tmp_path / "killed.h5"
    message = r"must not be open for writing: close it .*h5clear -s"
    with h5py.File(path, "w", libver=libver) as file:
        file["x"] = LABEL
        with pytest.raises((ValueError, feedline.FeedError)) as caught:  # not all of it lies on disk
            feedline.open_source(path)
        assert re.search(f"{message}|and it was written to since", str(caught.value))
        file.flush()
        killed.write_bytes(path.read_bytes())
    if libver == "latest":
        with pytest.raises(ValueError, match=message):
            feedline.open_source(killed)
    with path.open() as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)  # as HDF5 does in another process
        with pytest.raises(ValueError, match=message):
            feedline.open_source(path)
    with h5py.File(path):  # somebody else reads it
        assert len(feedline.open_source(path)) == ROWS


def test_a_file_that_this_process_writes_under_another_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.h5").symlink_to("x.h5")
    for name in ("x.h5", "link.h5"):
        with h5py.File(name, "w") as file:
            file["x"] = LABEL
            with pytest.raises(ValueError, match="it is already open for writing in this process"):
                feedline.open_source(tmp_path / "x.h5")


def test_names_of_files_that_are_only_read_are_not_resolved_at_each_read(tmp_path, monkeypatch):
    resolved = []
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=LABEL, compression="gzip")
    source = feedline.open_source(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5"):
        monkeypatch.setattr(os.path, "realpath", resolved.append)
        assert source[3]["x"] == LABEL[3]
    assert not resolved


def test_damaged_values_are_bad_rows(tmp_path):
    path = with_jpegs(tmp_path / "x.h5")
    data = bytearray(path.read_bytes())
    at = data.index(JPEGS[5])
    data[at - 16] ^= 0xFF  # the index of the value in its collection
    path.write_bytes(data)
    source = feedline.open_source(path)
    for rows in ([5], [4, 5]):
        with pytest.raises(feedline.RowError, match="the file is damaged, write it again") as caught:
            source.records(np.array(rows))
        assert (caught.value.row, caught.value.file) == (5, str(path))
    assert source[6] == JPEGS[6]


@pytest.mark.parametrize("options", [{"compression": "gzip"}, {"fletcher32": True}])
def test_a_damaged_chunk_with_a_checksum_makes_bad_rows(tmp_path, options):
    path = written(tmp_path / "x.h5", image={"data": IMAGE, "chunks": (20, 5, 3), **options})
    with h5py.File(path) as file:
        chunk = file["image"].id.get_chunk_info(1)
    data = bytearray(path.read_bytes())
    data[chunk.byte_offset + chunk.size - 9] ^= 1
    path.write_bytes(data)
    source = feedline.open_source(path)
    np.testing.assert_array_equal(source[19]["image"], IMAGE[19])
    with pytest.raises(
        feedline.RowError, match=r"stored together could not be read: /image: .*; the file is damaged"
    ) as caught:
        source[20]
    assert (caught.value.row, caught.value.file) == (20, str(path))
