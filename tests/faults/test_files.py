"""Files change or cannot be read: an error names them, or the policy for bad rows applies; no row is wrong."""

import json
import re
import shutil
import signal
import sys

import numpy as np
import programs
import pytest

from feedline._src.native.library import library

pytestmark = pytest.mark.slow
compiled = pytest.mark.skipif(library() is None, reason="the C library was not built")

FEEDS = """
import gc, json, os, resource, sys, time

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jax.sharding import SingleDeviceSharding

import feedline

ROWS, COLUMNS, BATCH, NOBODY = 4096, 512, 64, 65534
VALUES = np.arange(ROWS * COLUMNS, dtype=np.int32).reshape(ROWS, COLUMNS)
FILES = resource.getrlimit(resource.RLIMIT_NOFILE)


def saved(path):
    if path.endswith(".npy"):
        np.save(path, VALUES)
    elif path.endswith(".parquet"):
        pq.write_table(pa.table({"x": VALUES[:, 0]}), path, row_group_size=64)
    else:
        os.mkdir(path)
        for row in range(256):
            VALUES[row, :1].tofile(f"{path}/{row:03}")
    return path


def decode(record, out, row):
    out[:] = np.frombuffer(record, np.int32)


def feed_of(path, **reading):
    source = feedline.open_source(path)
    if os.path.isdir(path):
        source = feedline.decoded(source, decode, jax.ShapeDtypeStruct((1,), np.int32))
    one = SingleDeviceSharding(jax.devices()[0])
    return feedline.Feed(source, BATCH, one, epochs=1, reading=feedline.Reading(**reading))


def meet(fault, feed, happen=lambda: None):
    # `happen` once a batch is there. Prints what the feed then says, and whether each row is one of the file.
    told, right, met, began = None, True, False, time.monotonic()
    try:
        for batch in feed:
            x = np.asarray(jax.tree.leaves(batch)[0]).reshape(BATCH, -1)
            right &= bool((x[:, 0] % COLUMNS == 0).all() and (x == x[:, :1] + np.arange(x.shape[1])).all())
            if not met:
                met, began = True, time.monotonic()
                happen()
    except (feedline.FeedError, OSError) as error:
        told = f"{type(error).__name__}: {error}"
    found = {"told": told, "seconds": time.monotonic() - began, "right": right, "bad": feed.statistics().bad_rows}
    print(json.dumps({"fault": fault, **found}), flush=True)
    feed.close()
"""

CHANGES = (
    FEEDS
    + """
def few_files():
    gc.collect()  # closes the files above that are in cycles with an error
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), FILES[1]))


meet("truncated", feed_of(saved("truncated.npy")), lambda: os.truncate("truncated.npy", 200_000))
meet("grown", feed_of(saved("grown.npy")), lambda: os.truncate("grown.npy", 8392832))  # a write grows it in steps
for fault, path in [("groups", saved("groups.parquet")), ("descriptors", saved("files"))]:
    feed = feed_of(path)
    few_files()
    meet(fault, feed)
    resource.setrlimit(resource.RLIMIT_NOFILE, FILES)
BATCH = 16  # so that not all files have been read ahead
os.chmod(".", 0o755)
os.chmod("files", 0o700)
os.chmod("grown.npy", 0o600)
def forbid():
    if os.geteuid() == 0:  # which may read anything
        os.seteuid(NOBODY)
    else:
        os.chmod("files", 0)
        os.chmod("grown.npy", 0)

meet("forbidden", feed_of("files"), forbid)
try:
    feedline.open_source("grown.npy")
except PermissionError as error:
    print(json.dumps({"fault": "opened", "told": str(error), "seconds": 0, "right": True}))
"""
)

FAILING_DISK = (
    FEEDS
    + """
paths = [saved("disk/mapped.npy"), saved("disk/replaced.npy"), saved("disk/groups.parquet"), saved("disk/files")]
paths += [f"disk/files/{row:03}" for row in range(256)]
mapped, groups, files = map(feed_of, [paths[0], *paths[2:4]])
replaced = feed_of(paths[1], bad_rows="substitute", bad_rows_budget=0.99)
kept = np.load(paths[1], mmap_mode="r")[: ROWS * 7 // 8]
kept.sum()  # pages that are mapped stay in memory, so most rows can still be read
for path in filter(os.path.isfile, paths):
    with open(path, "rb") as file:  # of the others nothing does
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
os.truncate(sys.argv[1], 1 << 20)
for fault in ("mapped", "replaced", "groups", "files"):
    meet(fault, globals()[fault])
"""
)


NAMES = {
    "truncated": "a mapped file (`.npy`, `.npz`, `.bin`, Arrow, HDF5) is truncated or grows while a feed reads it",
    "grown": "a mapped file (`.npy`, `.npz`, `.bin`, Arrow, HDF5) is truncated or grows while a feed reads it",
    "descriptors": "too many open files",
    "forbidden": "the permission to read a file is removed",
    "mapped": "the disk fails under a mapped file (EIO)",
    "files": "the disk fails under a file that is not mapped (Parquet, files of a folder)",
}
"""{name of a fault in the scripts: its name in docs/faults.md}"""


def met(ended, measured):
    """{fault: what the program printed about it}; notes how long each fault took."""
    assert ended.returncode == 0, ended.stderr
    assert not ended.left
    found = {each["fault"]: each for each in map(json.loads, ended.stdout.splitlines())}
    for fault, each in found.items():
        assert each["right"]
        if fault in NAMES:
            measured(NAMES[fault], each["seconds"])
    return found


def test_files_that_change_or_cannot_be_opened(start, measured):
    found = met(start(CHANGES).end(), measured)
    told = {fault: each["told"] for fault, each in found.items()}
    assert found.keys() == {"truncated", "grown", "groups", "descriptors", "forbidden", "opened"}
    changed = "FeedError: a file must not change while a feed reads it, and its size changed from 8388736 to "
    assert told["truncated"].startswith(f"{changed}200000 bytes since the source was opened.")
    assert told["grown"].startswith(f"{changed}8392832 bytes since the source was opened.")
    assert told["truncated"].endswith("/truncated.npy]")
    for fault in ("descriptors", "groups"):
        assert told[fault].startswith(
            "FeedError: files are opened when they are read, and no more can be opened ("
        )
    assert re.match(
        r"RowError: the bytes of a row .* Permission denied: .*, row \d+, .*file /.*/files/\d+\]$",
        told["forbidden"],
    )
    assert told["opened"] == "[Errno 13] Permission denied: 'grown.npy'"


@pytest.fixture
def failing_disk(tmp_path):
    """A file system in a file, mounted as `disk`. Truncating the file makes reads of the cut part fail."""
    if shutil.which("mkfs.ext2") is None:
        pytest.skip("mkfs.ext2 is missing (Debian: e2fsprogs)")
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(40 << 20)
    made = programs.run(["mkfs.ext2", "-q", "-F", image], check=False).returncode
    if made or programs.run(["mount", "-o", "loop", image, folder], check=False).returncode:
        pytest.skip("no permission to mount a file system")
    yield image
    programs.run(["umount", "--lazy", folder], check=True)


@compiled
def test_a_disk_that_fails(start, measured, failing_disk):
    found = met(start(FAILING_DISK, str(failing_disk)).end(), measured)
    told = {fault: each["told"] for fault, each in found.items()}
    begins = {
        "mapped": "a row could not be read from its mapped file (SIGBUS): the file was truncated, or its disk ",
        "groups": "rows that are stored together could not be read: [Errno 5] ",
        "files": "the bytes of a row must be readable, and reading them failed: [Errno 5] Input/output error; ",
    }
    for fault, begin in begins.items():
        if fault == "files" and told[fault] is None:  # small files may still lie in memory
            continue
        assert told[fault].startswith(f"RowError: {begin}")
        assert re.search(
            rf"\[stage read, row \d+, epoch 0, position \d+, file .*disk/{fault}[^ ]*\]$", told[fault]
        )
    assert told["replaced"] is None
    assert found["replaced"]["bad"] > 0


UNGUARDED = """
import sys
import numpy as np
from feedline._src.native.library import library

library()
rows = np.load("rows.npy", mmap_mode="r")
open("rows.npy", "r+b").truncate(4096)
print(rows.sum())
"""


@compiled
def test_a_read_by_other_code_ends_the_process_and_the_file_is_named(tmp_path):
    np.save(tmp_path / "rows.npy", np.ones(100_000))
    ended = programs.run(
        [sys.executable, "-c", UNGUARDED], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == -signal.SIGBUS
    told = (
        f"feedline: SIGBUS, and the process ends: {tmp_path}/rows.npy is mapped, and was truncated, or its disk "
    )
    assert ended.stderr == f"{told}failed or is full\n"
