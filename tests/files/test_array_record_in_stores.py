"""ArrayRecord files in a store, which are fetched whole: the same rows and identities as of local files."""

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import programs
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import feedline
from feedline._src.files.files import Files

DTYPE = np.dtype([("x", np.uint8, (6000,)), ("y", np.int32)])
ROWS = np.zeros(2000, DTYPE)
ROWS["x"] = np.random.default_rng(0).integers(0, 255, (2000, 6000), np.uint8)  # 12 MB
ROWS["y"] = np.arange(2000)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    for number in range(2):
        writer = ArrayRecordWriter(str(folder / f"{number}.array_record"), "group_size:1")
        for row in ROWS[1000 * number : 1000 * number + 1000]:
            writer.write(row.tobytes())
        writer.close()
    return folder


@pytest.fixture
def url(store, files):
    for path in files.iterdir():
        store.objects[f"/{path.name}"] = path.read_bytes()
    return f"{store.url}/0.array_record"


def whole(cache):
    return sorted(cache.rglob("*.whole"))


def test_a_damaged_file_of_the_cache_is_fetched_again(store, options, url, tmp_path):
    feedline.open_source(url, store=options).close()
    (path,) = whole(tmp_path)
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    store.requests.clear()
    assert feedline.open_source(url, store=options)[3] == ROWS[3].tobytes()
    assert store.gets()


def test_a_file_of_the_cache_that_always_changes_is_an_error(store, options, url):
    file = Files([url], options)[0]

    def truncates(local):
        os.truncate(local, 1000)
        raise ValueError("a bad row")

    with pytest.raises(feedline.FeedError, match=r"of a cache must stay .*0\.array_record were changed 10 times"):
        file.with_path(truncates)
    with pytest.raises(ValueError, match="invalid literal"):  # of the file, not of the cache
        file.with_path(int)
    assert file.with_path(lambda local: Path(local).read_bytes()) == store.objects["/0.array_record"]


def test_a_file_in_use_is_not_evicted_and_others_are(store, url, files, tmp_path):
    size = len(store.objects["/0.array_record"])
    options = feedline.Store(cache=tmp_path, cache_bytes=size + size // 2, patience_s=1)
    first = feedline.open_source(url, store=options)
    with pytest.raises(feedline.FeedError, match=rf"beside the {size} in use are more than its cache_bytes"):
        feedline.open_source(url.replace("/0.", "/1."), store=options)
    assert first[0] == ROWS[0].tobytes()
    first.close()
    assert feedline.open_source(url.replace("/0.", "/1."), store=options)[0] == ROWS[1000].tobytes()
    assert len(whole(tmp_path)) == 1


def test_a_cache_that_is_too_small(url, tmp_path):
    with pytest.raises(feedline.FeedError, match=r"the cache must hold all of them.*where cache_bytes=1000000"):
        feedline.open_source(url, store=feedline.Store(cache=tmp_path, cache_bytes=1_000_000))


def test_an_object_that_is_replaced(store, options, url):
    source = feedline.open_source(url, store=options)
    sent = pickle.dumps(source)
    store.objects["/0.array_record"] = store.objects["/1.array_record"]
    assert source[3] == ROWS[3].tobytes()  # it has a file of its own
    with pytest.raises(feedline.FeedError, match="must not change"):
        pickle.loads(sent)
    assert feedline.open_source(url, store=options)[3] == ROWS[1003].tobytes()


def test_troubles(store, url, tmp_path):
    options = feedline.Store(cache=tmp_path, patience_s=0.2)
    store.fault = lambda method, path, part: 503 if part and part[0] else None
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2"):
        feedline.open_source(url, store=options)
    assert not list(tmp_path.rglob("*.tmp"))
    store.fault = lambda *request: None
    assert feedline.open_source(url, store=options)[999] == ROWS[999].tobytes()
    store.objects["/page.array_record"] = b"<html>" * 100
    with pytest.raises(ValueError, match=r"page\.array_record cannot be read as an ArrayRecord file"):
        feedline.open_source(url.replace("/0.", "/page."), store=options)


@pytest.mark.slow
def test_processes_fetch_a_file_once(store, url, files, tmp_path):
    """One of them is killed while it fetches, and another one then fetches the file."""
    script = (
        "import sys; from feedline._src.files.files import Files; from feedline import Store;"
        "file = Files([sys.argv[1]], Store(cache=sys.argv[2]))[0];"
        "print(open(file.path(), 'rb').read() == open(sys.argv[3], 'rb').read(), flush=True); sys.stdin.read()"
    )
    start = [sys.executable, "-c", script, url, str(tmp_path), str(files / "0.array_record")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    store.bytes_s = 1000.0
    with programs.started(start, **pipes) as killed:
        while len(store.gets()) < 2:  # one request each for a half
            time.sleep(0.01)
            assert killed.poll() is None
    store.bytes_s = None
    store.requests.clear()
    with programs.started(start, **pipes) as first, programs.started(start, **pipes) as second:
        assert [process.stdout.readline() for process in (first, second)] == ["True\n", "True\n"]
    assert sum(stop - start for start, stop in store.gets()) == len(store.objects["/0.array_record"])
