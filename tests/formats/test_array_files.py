"""`.npy`, `.npz` and `.bin` files with headers that cannot be true, that are damaged, or change while in use."""

import os
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from rows_read import read_rows

import feedline
from feedline._src.errors import FeedError

ROWS = np.arange(600, dtype=np.int32).reshape(200, 3)


def npy(header, version=(1, 0), data=bytes(48), length=None):
    """The bytes of a `.npy` file with this header."""
    text = header.encode("latin1")
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text) if length is None else length)
    return b"\x93NUMPY" + bytes(version) + size + text + data


def described(descr="'<i4'", shape="(3, 4)", fortran="False"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


HEADERS = {
    "its shape must be a tuple of lengths": [
        described("'|S0'", "(-1,)"), described(shape="(3, -4)"), described(shape="(3, True)"),
    ],
    "its elements must be numbers, and no Python objects": [
        described("'|V0'", "(3,)"), described("[]", "(3,)"), described("{}"), described("'|O'"),
    ],
    r"its header promises \d+ bytes": [described(shape=f"({2**64}, 4)"), described(shape=f"({2**40}, {2**40})")],
    "maximum supported dimension": [described(shape=f"({'1, ' * 100})")],
    r"NumPy cannot read its header \(": [
        described(shape="(2**3,)"), described("'<i99'"), described("[[[]]]"), described("('<i4', 2**70)"),
        described("f'{1}'"), "[1, 2", "(" * 5000, "\0", "1" * 9000,
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("match", "header"), [(match, header) for match, headers in HEADERS.items() for header in headers], ids=repr
)
def test_invalid_headers_are_refused_with_the_name_of_the_file(tmp_path, header, match):
    (tmp_path / "bad.npy").write_bytes(npy(header))
    with pytest.raises(ValueError, match=rf"bad\.npy cannot be read as a \.npy file of numbers: .*{match}"):
        feedline.open_source(tmp_path / "bad.npy")
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("x.npy", npy(header))
    with pytest.raises(ValueError, match=rf"bad\.npz .* its member 'x': .*{match}"):
        feedline.open_source(tmp_path / "bad.npz")


@pytest.mark.parametrize("version", [(0, 0), (1, 1), (255, 255)])
def test_versions_that_no_numpy_writes_are_refused(tmp_path, version):
    (tmp_path / "x.npy").write_bytes(npy(described(), version))
    with pytest.raises(ValueError, match=r"x\.npy .* of version 1\.0, 2\.0 or 3\.0"):
        feedline.open_source(tmp_path / "x.npy")


def test_a_header_longer_than_its_file_or_too_long_is_refused(tmp_path):
    for content in (npy(described(), (2, 0), length=2**32 - 1), npy(described() + " " * 20_000), npy("")[:9]):
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npy cannot be read .* its header"):
            feedline.open_source(tmp_path / "x.npy")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_all_versions_are_read_as_numpy_reads_them(tmp_path, is_source_of, version):
    rows = np.arange(12, dtype=np.int32).reshape(3, 4)
    for fortran in ("False", "True"):
        data = rows.T.tobytes() if fortran == "True" else rows.tobytes()
        (tmp_path / "x.npy").write_bytes(npy(described(fortran=fortran), version, data))
        is_source_of(feedline.open_source(tmp_path / "x.npy"), rows)


def test_names_of_fields_are_not_garbled(tmp_path, is_source_of):
    records = np.zeros(3, [("größe", np.float32), ("重さ", np.int32, (2,)), ("plain", np.int8)])
    records["größe"], records["plain"] = [1, 2, 3], [4, 5, 6]
    with pytest.warns(UserWarning, match=r"NumPy >= 1\.17"):
        np.save(tmp_path / "x.npy", records)
    is_source_of(feedline.open_source(tmp_path / "x.npy"), {name: records[name] for name in records.dtype.names})


@pytest.mark.parametrize("shape", [(4, 3), (4,)])
def test_a_dtype_that_numpy_save_loses_gets_the_line_that_works(tmp_path, is_source_of, shape):
    rows, line = np.arange(np.prod(shape)).reshape(shape).astype(ml_dtypes.bfloat16), str(shape[1:])
    np.save(tmp_path / "x.npy", rows)
    np.savez(tmp_path / "x.npz", y=rows)
    for name, leaf in (("x.npy", "x.npy"), ("x.npz", "x.npz: y")):
        with pytest.raises(TypeError, match=r"elements of dtype .* have lost their dtype: numpy\.save") as error:
            feedline.open_source(tmp_path / name)
        assert leaf in str(error.value)
        assert f"dtype=np.dtype((ml_dtypes.bfloat16, {line})))" in str(error.value)
    rows.tofile(tmp_path / "x.bin")
    is_source_of(feedline.open_source(tmp_path / "x.bin", dtype=np.dtype((rows.dtype, shape[1:]))), rows)


# --- .npz ---


def test_members_that_are_not_chosen_are_not_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", x=ROWS, about=np.array({"a": 1}, object))
    assert len(feedline.open_source(tmp_path / "x.npz", columns=["x"])) == len(ROWS)
    with pytest.raises(
        ValueError, match=r"'about': .* no Python objects, .*; columns=\[\.\.\.\] can leave it out"
    ):
        feedline.open_source(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=r"some of x, about in .*, got y"):
        feedline.open_source(tmp_path / "x.npz", columns=["y"])


def compressed(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members:
            archive.writestr(name, data)


def flipped(path, save, place, value):
    """Write an archive, in which `value` replaces the bytes from `place(data)` on."""
    save(path, x=ROWS, y=ROWS)
    data = bytearray(path.read_bytes())
    at = place(data)
    data[at : at + len(value)] = value
    path.write_bytes(data)


BAD_ARCHIVES = {
    "a damaged member": (
        lambda path: flipped(path, np.savez_compressed, lambda data: data.index(b"y.npy") + 60, b"damage"),
        "its member 'y': ",
    ),
    "a damaged header": (lambda path: flipped(path, np.savez, lambda _: 0, b"damage"), "'x': Bad magic number"),
    "too few elements": (
        lambda path: compressed(path, [("x.npy", npy(described(shape="(1000, 4)")))]),
        r"its member 'x': its header promises \d+ bytes",
    ),
    "one name twice": (
        lambda path: compressed(path, [("x.npy", npy(described()))] * 2),
        "must have different names, and two are called 'x'",
    ),
}


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", BAD_ARCHIVES)
def test_bad_members_are_named_in_few_words(tmp_path, name):
    write, match = BAD_ARCHIVES[name]
    write(tmp_path / "x.npz")
    with pytest.raises(ValueError, match=rf"x\.npz cannot be read as a \.npz file of numbers: .*{match}") as error:
        feedline.open_source(tmp_path / "x.npz")
    assert len(str(error.value)) < 1000


# --- files that change ---


def test_a_file_that_is_replaced_or_deleted_stays_readable(tmp_path):
    path, new = tmp_path / "x.npy", tmp_path / "new.npy"
    np.save(path, ROWS)
    np.save(new, ROWS + 1)
    source = feedline.open_source(path)
    os.replace(new, path)
    np.testing.assert_array_equal(read_rows(source), ROWS)
    path.unlink()
    np.testing.assert_array_equal(read_rows(source), ROWS)


def test_many_files_are_checked_in_turn(tmp_path):
    for i in range(20):
        np.save(tmp_path / f"{i:02}.npy", ROWS)
    source = feedline.open_source(tmp_path / "*.npy")
    np.save(tmp_path / "07.npy", ROWS + 1)
    os.utime(tmp_path / "07.npy", ns=(1, 1))  # another time, however coarse the clock is
    with pytest.raises(FeedError, match=r"it was written to .*07\.npy"):
        [read_rows(source, [3]) for _ in range(5)]


@pytest.mark.parametrize(
    ("arrays", "error", "match"),
    [
        ({"x": ROWS, "y": ROWS[1:]}, ValueError, r"source\['x'\] has 200, source\['y'\] has 199 in .*x\.npz"),
        ({"x": ROWS, "y": np.array(1)}, ValueError, r"source\['y'\] of .*x\.npz: an array needs a first axis"),
        ({"x": ROWS, "y": np.array(["a"] * 200)}, TypeError, r"source\['y'\] of .*x\.npz: .* got dtype <U1"),
        ({"x": ROWS[:0]}, ValueError, r"at least one row, got none in .*x\.npz"),
    ],
)
def test_arrays_of_a_file_that_cannot_be_rows_are_refused_with_its_name(tmp_path, arrays, error, match):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(error, match=match):
        feedline.open_source(tmp_path / "x.npz")


def test_files_that_do_not_fit_together_are_named(tmp_path):
    np.save(tmp_path / "0.npy", ROWS)
    np.save(tmp_path / "1.npy", ROWS.astype(np.float32))
    with pytest.raises(ValueError, match=r"1\.npy has float32\[3\], .*0\.npy has int32\[3\]"):
        feedline.open_source(tmp_path / "?.npy")
