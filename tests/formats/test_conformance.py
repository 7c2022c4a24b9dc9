"""Every format, on a local disk and in a store, through the same cases.

A format adds a function to `written_formats.py` that writes rows; a declared format without one fails here.
"""

import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from rows_read import read_rows, reads_as, same
from written_formats import CASES, COUNT

import feedline
from feedline._src.files.client import clients
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.registry import formats

GIVEN = {"dtype": np.int8, "window": 2, "columns": ["x"], "cache_bytes": 1, "missing_chunks": "fill"}


def files_of(path):
    """The files of this stem, such as .bin and .idx; if one of them is a folder, the files in it."""
    found = [file for one in sorted(path.parent.glob(f"{path.stem}.*")) for file in (one, *one.rglob("*"))]
    return [file for file in found if file.is_file()]


class Local:
    """Files where they were written."""

    def __init__(self, options):
        self.options, self.variables = {}, {}

    def address(self, path):
        return str(path)

    def put(self, path):
        """Does nothing: the files already lie where they are opened."""

    def remove(self, path):
        for file in files_of(path):
            file.unlink()
        if path.is_dir():
            shutil.rmtree(path)


class InStore:
    """Copies of the files in a bucket."""

    def __init__(self, bucket, options):
        self.bucket, self.options, self.variables = bucket, {"store": options}, bucket.variables()

    def key(self, path):
        return f"/corpus/{'/'.join(path.parts[path.parts.index('data') :])}"

    def address(self, path):
        return f"s3:/{self.key(path)}"

    def put(self, path):
        for file in files_of(path):
            self.bucket.objects[self.key(file)] = file.read_bytes()

    def remove(self, path):
        for key in [key for key in self.bucket.objects if key.startswith(f"{self.key(path.with_suffix(''))}.")]:
            del self.bucket.objects[key]


@pytest.fixture(params=["local", "store"])
def place(request):
    options = request.getfixturevalue("options")
    return Local(options) if request.param == "local" else InStore(request.getfixturevalue("bucket"), options)


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    (tmp_path / "data").mkdir()
    return CASES[request.param]


@pytest.fixture(scope="module")
def worker():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def opened(case, place, path, **options):
    return feedline.open_source(place.address(path), **case.options, **place.options, **options)


def put(case, place, path, rows=slice(None)):
    case.write(path, rows)
    place.put(path)
    return path


def read_elsewhere(variables, sent, rows):
    """Read rows of a pickled source in another process; `variables` say where the store is."""
    os.environ |= variables
    clients.clear()
    return read_rows(pickle.loads(sent), rows)


def is_file_of(error, place, path):
    assert place.address(path.with_suffix("")) in str(error), error


# --- every format has a case ---


def test_every_declared_format_is_here():
    assert {case.format for case in CASES.values()} == {form.name for form in formats().values()}


@pytest.mark.parametrize("form", list(dict.fromkeys(formats().values())), ids=lambda form: form.name)
def test_options_of_other_formats_are_refused(form, tmp_path):
    assert GIVEN.keys() == OpenOptions(**GIVEN).given()
    for option in GIVEN.keys() - form.takes:
        with pytest.raises(ValueError, match=f"^{option} is for .*, got it with .*; leave it out"):
            feedline.open_source(tmp_path / f"x{form.suffixes[0]}", **{option: GIVEN[option]})


# --- rows ---


def test_any_rows_in_any_order(case, place, tmp_path):
    source = opened(case, place, put(case, place, tmp_path / "data" / f"x{case.suffix}"))
    assert len(source) == COUNT
    reads_as(source, case.expected)
    source.close()
    rows = np.random.default_rng(0).permutation(COUNT)
    same(read_rows(source, rows), case.expected(rows))  # a closed source serves the next feed


def test_another_process_reads_the_same(case, place, tmp_path, worker):
    source = opened(case, place, put(case, place, tmp_path / "data" / f"x{case.suffix}"))
    rows = np.arange(COUNT)[::-7]
    found = worker.submit(read_elsewhere, place.variables, pickle.dumps(source), rows).result()
    same(found, case.expected(rows))


def test_a_relative_path_leads_where_it_was_opened(case, tmp_path, worker, monkeypatch):
    case.write(tmp_path / "data" / f"x{case.suffix}", slice(None))
    monkeypatch.chdir(tmp_path)
    source = feedline.open_source(f"data/x{case.suffix}", **case.options)
    monkeypatch.chdir("/")
    rows = np.arange(COUNT)[::-7]
    same(read_rows(source, rows), case.expected(rows))
    assert source.identity == feedline.open_source(tmp_path / f"data/x{case.suffix}", **case.options).identity
    same(worker.submit(read_elsewhere, {}, pickle.dumps(source), rows).result(), case.expected(rows))


def test_rows_of_several_files_follow_each_other(case, place, tmp_path):
    for name, part in (("a", slice(0, 60)), ("b", slice(60, 61)), ("c", slice(61, None))):
        put(case, place, tmp_path / "data" / f"{name}{case.suffix}", part)
    source = opened(case, place, tmp_path / "data" / f"*{case.suffix}")
    rows = np.random.default_rng(1).permutation(COUNT)
    assert getattr(source, "will_read", None) is None or source.will_read(rows, 0)
    same(read_rows(source, rows), case.expected(rows))
    assert source.file_of(60) == place.address(tmp_path / "data" / f"b{case.data_suffix or case.suffix}")


def test_columns_are_chosen_and_named(case, place, tmp_path):
    if "columns" not in case.takes or isinstance(case.rows, list):
        return
    path, rows = put(case, place, tmp_path / "data" / f"x{case.suffix}"), np.array([5, 2])
    whole = case.rows if isinstance(case.rows, dict) else {"named": case.rows}
    for name, column in whole.items():
        found = read_rows(opened(case, place, path, columns=[name]), rows)
        if isinstance(found, list):  # each record is bytes, or a dict of bytes
            found = {name: [record[name] if isinstance(record, dict) else record for record in found]}
        assert found.keys() == {name}
        np.testing.assert_array_equal(found[name], [column[row] for row in rows])
    if isinstance(case.rows, dict):
        for columns, missing in (([], "none"), (["nothing"], "nothing")):
            with pytest.raises(ValueError, match=f"columns must be some of .*, got {missing};") as caught:
                opened(case, place, path, columns=columns)
            is_file_of(caught.value, place, path)


def test_the_identity_is_that_of_the_rows(case, place, tmp_path):
    """A local copy has the identity of its original, on a disk or in a store; other rows have another identity."""
    path = put(case, place, tmp_path / "data" / f"x{case.suffix}")
    source = opened(case, place, path)
    assert str(tmp_path) not in str(source.identity)
    copy = tmp_path / "data" / "elsewhere" / f"y{case.suffix}"
    for file in files_of(path):
        to = copy / file.relative_to(path) if path.is_dir() else copy.with_suffix(file.suffix)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to)
    assert opened(case, Local(None), copy).identity == source.identity
    other = put(case, place, tmp_path / "data" / f"z{case.suffix}", slice(None, None, -1))
    assert opened(case, place, other).identity != source.identity


# --- files that are missing, change, or are damaged ---


def test_a_missing_file(case, place, tmp_path):
    path = tmp_path / "data" / f"x{case.suffix}"
    with pytest.raises(FileNotFoundError) as caught:
        opened(case, place, path)
    is_file_of(caught.value, place, path)
    with pytest.raises(FileNotFoundError, match=r"no (file|object) matches"):
        opened(case, place, path.with_name(f"*{case.suffix}"))


def _rewritten(case, place, path):
    if path.is_dir():
        shutil.rmtree(path)
    put(case, place, path, slice(None, None, -1))
    if path.is_file():
        os.utime(path, ns=(1, 1))  # another time, however coarse the clock is


def _replaced(case, place, path):
    place.remove(path)
    _rewritten(case, place, path)


def _truncated(case, place, path):
    for file in files_of(path):
        os.truncate(file, file.stat().st_size // 2)
    place.put(path)


def _deleted(case, place, path):
    place.remove(path)


CHANGES = {"rewritten": _rewritten, "replaced": _replaced, "truncated": _truncated, "deleted": _deleted}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_is_no_bad_row(case, place, tmp_path, change):
    """A read returns the old rows, or raises an error of the file. Another process always raises that error."""
    path = put(case, place, tmp_path / "data" / f"x{case.suffix}")
    source = opened(case, place, path)
    same(source[3], case.row(3))
    assert source.identity  # a feed asks for it, too
    sent = pickle.dumps(source)
    CHANGES[change](case, place, path)
    rows, failure = np.arange(COUNT), None
    with pytest.raises(feedline.FeedError, match="while a feed reads it") as caught:
        read_rows(pickle.loads(sent), rows)
    is_file_of(caught.value, place, path)
    try:
        found = read_rows(source, rows)
    except feedline.FeedError as error:
        failure = error
    else:
        if not path.is_dir():  # chunks of Zarr that changed are not noticed
            same(found, case.expected(rows))
    if failure is not None:
        assert type(failure) is feedline.FeedError  # another row could be substituted for one with a RowError
        assert "while a feed reads it" in str(failure)


def _noise(seed):
    def damage(data):
        random = np.random.default_rng(seed)
        start, length = int(random.integers(0, len(data))), int(random.integers(1, 9))
        part = data[start : start + length]
        return data[:start] + random.bytes(len(part)) + data[start + length :]

    return damage


TRUNCATED = {"a byte less": lambda data: data[:-1], "half": lambda data: data[: len(data) // 2 | 1]}
OTHERS = {"empty": b"", "text": b"no rows, but a line of text\n" * 301, "zeros": bytes(1537)}
DAMAGE = {
    **TRUNCATED,
    **{name: lambda data, other=other: other for name, other in OTHERS.items()},
    "noise": _noise(0),
    "other noise": _noise(1),
}
DAMAGED = [*(("local", damage) for damage in DAMAGE), ("store", "half"), ("store", "other noise")]


@pytest.mark.parametrize(("place", "damage"), DAMAGED, indirect=["place"])
def test_a_damaged_file_is_an_error_with_its_name(case, place, tmp_path, damage):
    """The error comes at opening or at a read. A file that was cut, or has checksums, gives no wrong row."""
    path = tmp_path / "data" / f"x{case.suffix}"
    case.write(path, slice(None))
    for file in files_of(path):
        file.write_bytes(DAMAGE[damage](file.read_bytes()))
    place.put(path)
    try:
        source = opened(case, place, path)
    except (ValueError, TypeError, feedline.FeedError) as error:
        is_file_of(error, place, path)
        return
    assert damage not in OTHERS or case.format == "csv"
    for row in range(0, len(source), 7):
        try:
            found = source[row]
        except feedline.FeedError as error:
            is_file_of(error, place, path)
        else:
            if damage in TRUNCATED or case.has_checksums:
                same(found, case.row(row))
