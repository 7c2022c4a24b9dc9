"""An index file is made once, and again when stale or damaged; several processes may make it at the same time."""

import json
import os
import stat
import threading
import zlib
from pathlib import Path

import pytest
from background import PATIENCE_S, at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_files import write_tar
from tfrecords import encoded

import feedline
from feedline._src.formats import record_index, tfrecord

RECORDS = [b"one", b"two", b"three"]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    path = tmp_path / "data/x.tfrecord"
    path.write_bytes(encoded(RECORDS))
    return path


@pytest.fixture
def scans(monkeypatch):
    """The files whose index was made."""
    made = []
    real = tfrecord.scan

    def scan(file):
        made.append(file.name)
        return real(file)

    monkeypatch.setattr(tfrecord, "scan", scan)
    return made


def index_of(path):
    return path.with_name(f".{path.name}.feedline-index")


def read(path):
    source = feedline.open_source(path)
    return [source[i] for i in range(len(source))]


def test_an_index_is_made_once_beside_the_file(path, scans):
    os.chmod(path, 0o640)
    for _ in range(3):
        assert read(path) == RECORDS
    assert scans == [str(path)]
    assert {*os.listdir(path.parent)} == {index_of(path).name, path.name}
    assert stat.S_IMODE(index_of(path).stat().st_mode) == 0o640
    assert not (path.parent.parent / "cache").exists()
    assert len(feedline.open_source(path.parent / "*")) == 3  # a glob does not see it


def test_where_the_folder_cannot_be_written_it_is_kept_in_the_cache(path, scans, tmp_path, monkeypatch):
    index_of(path).mkdir()
    assert [read(path), read(path)] == [RECORDS] * 2
    assert scans == [str(path)]
    (cached,) = (tmp_path / "cache/index").iterdir()
    assert cached.suffix == ".feedline-index"
    monkeypatch.delenv("FEEDLINE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert read(path) == RECORDS
    assert len(list((tmp_path / "home/.cache/feedline/index").iterdir())) == 1
    monkeypatch.setenv("FEEDLINE_CACHE", str(path))
    with pytest.raises(
        OSError, match=r"beside its file or in the cache folder, .*Is a directory.*set FEEDLINE_CACHE"
    ):
        feedline.open_source(path)


@pytest.mark.parametrize("preserved", [False, True])
def test_a_stale_index_is_made_again(path, scans, preserved):
    """Also where size and time are the same, and only sampled bytes differ."""
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    read(path)
    other = [b"two", b"one", b"three"]
    path.write_bytes(encoded(other))
    if preserved:
        os.utime(path, ns=times)
    assert read(path) == other
    assert len(scans) == 2


def test_an_index_with_another_header_is_not_used(path):
    tar = write_tar(path.with_name("x.tar"), [("1.jpg", b"")])
    for file, records in ((path, RECORDS), (tar, [{"jpg": b""}])):
        assert read(file) == records
        whole = index_of(file).read_bytes()
        line, payload = whole.split(b"\n", 1)
        header = json.loads(line.partition(b" ")[2])
        fields = [{"fields": fields} for fields in ([], None, ["a", "a"], [1])] if file is tar else []
        changes = [{"index": 0}, {"of": "npy"}, {"file": []}, {"crc32": 0}, *fields]
        for other in ([1], "x", *(header | change for change in changes)):
            text = json.dumps(other).encode() + b"\n"
            index_of(file).write_bytes(b"%08x " % zlib.crc32(text) + text + payload)
            assert read(file) == records
            assert index_of(file).read_bytes() == whole


@settings(max_examples=80)
@given(st.data())
def test_a_damaged_index_is_made_again(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "x.tfrecord"
    path.write_bytes(encoded(RECORDS))
    read(path)
    content = bytearray(index_of(path).read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]
    index_of(path).write_bytes(content + data.draw(st.binary(max_size=3)))
    assert read(path) == RECORDS


def test_an_index_that_changes_in_use_is_made_again(path):
    source, index = feedline.open_source(path), index_of(path)
    for change in (
        lambda: (index.write_bytes(index.read_bytes()[:-40] + bytes(40)), os.utime(index, ns=(1, 1))),
        lambda: os.truncate(index, index.stat().st_size - 1),
        index.unlink,
    ):
        assert source[0] == b"one"
        change()
        source.close()
        assert [source[i] for i in range(3)] == RECORDS
    path.write_bytes(encoded(RECORDS[::-1]))  # it changed, so its index is not made again
    os.utime(path, ns=(1, 1))  # another time, however coarse the clock is
    index.unlink()
    source.close()
    with pytest.raises(feedline.FeedError, match="must not change"):
        source[1]


def test_whoever_makes_it_at_once_reads_right_records(path, monkeypatch):
    """Several processes that start at once find no index, and all write one."""
    real, barrier = tfrecord.scan, threading.Barrier(4)

    def scan(file):
        barrier.wait(2 * PATIENCE_S)
        return real(file)

    monkeypatch.setattr(tfrecord, "scan", scan)
    assert at_once(read, [path] * 4) == [RECORDS] * 4
    assert sorted(Path(name).suffix for name in os.listdir(path.parent)) == [".feedline-index", ".tfrecord"]


def test_an_index_that_five_other_processes_replace_is_read(path, monkeypatch):
    """Each replaces it by an equal one, after this process has opened the last one and before it reads from it."""
    source = feedline.open_source(path)
    real, left = record_index.IndexedFile._open_index, [*range(5)]

    def open_and_replace(file):
        found, index = real(file), index_of(path)
        content = index.read_bytes()
        if left:
            index.unlink()
            index.write_bytes(content)
            os.utime(index, ns=(left[-1], left.pop()))  # another time, however coarse the clock is
        return found

    monkeypatch.setattr(record_index.IndexedFile, "_open_index", open_and_replace)
    index_of(path).unlink()
    assert [source[i] for i in range(3)] == RECORDS
    assert not left


def test_an_index_that_another_process_made_meanwhile_is_left_as_it_is(path, monkeypatch):
    """Replacing it would disturb whoever reads it."""
    real, made = tfrecord.scan, []

    def scan_while_another_process_makes_it(file):
        monkeypatch.setattr(tfrecord, "scan", real)
        feedline.open_source(path).close()
        made.append(index_of(path).stat().st_ino)
        return real(file)

    monkeypatch.setattr(tfrecord, "scan", scan_while_another_process_makes_it)
    assert read(path) == RECORDS
    assert made == [index_of(path).stat().st_ino]
