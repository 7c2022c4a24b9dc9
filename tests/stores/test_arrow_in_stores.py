"""Arrow files in a store: the same rows and identities as of local files, by requests for ranges of bytes."""

import io
import pickle
import random

import jax
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

import feedline
from feedline._src.sources.remote.arrow import _blocks

COUNT = 20_000
X = np.random.default_rng(5).normal(size=(COUNT, 32)).astype(np.float32)  # 2.6 MB
NUMBERS = {"n": np.arange(COUNT), "x": pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 32)}
NULLS = pa.array([None if i % 7 == 0 else i for i in range(COUNT)], pa.int64())
TEXT = [f"document {i} " + "x" * (i % 50) for i in range(COUNT)]


def arrow(table, compression=None, write=pa.ipc.new_file):
    file, table = io.BytesIO(), pa.table(table)
    with write(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=3000)
    return file.getvalue()


KINDS = ["mapped", "tensors", "bits", "compressed", "nulls", "text", "compressed text"]


@pytest.mark.parametrize("kind", [*KINDS, "stream", "stream nulls", "stream text", "stream bits"])
def test_rows_and_identity_are_those_of_the_local_file(kind, store, options, tmp_path):
    table = dict(NUMBERS)
    if "bits" in kind:
        table["even"] = pa.array(np.arange(COUNT) % 2 == 0)
    elif kind == "tensors":
        tensors = pa.fixed_shape_tensor(pa.float32(), [4, 8])
        table["x"] = pa.ExtensionArray.from_storage(tensors, table["x"])
    elif "nulls" in kind:
        table["m"] = NULLS
    elif "text" in kind:
        table["text"] = TEXT
    write = pa.ipc.new_stream if "stream" in kind else pa.ipc.new_file
    data = arrow(table, "zstd" if "compressed" in kind else None, write)
    (tmp_path / "x.arrow").write_bytes(data)
    store.objects["/x.arrow"] = data
    local = feedline.open_source(tmp_path / "x.arrow")
    remote = feedline.open_source(f"{store.url}/x.arrow", store=options)
    assert (type(remote), len(remote), remote.identity) == (type(local), COUNT, local.identity)
    rows = np.random.default_rng(6).integers(0, COUNT, 200)
    if "nulls" in kind:
        rows = rows[rows % 7 > 0]
    for source in (remote, pickle.loads(pickle.dumps(remote))):
        assert "bits" in kind or source.will_read(rows, 0)  # bits were unpacked, and with them all blocks fetched
        if "text" in kind:
            jax.tree.map(np.testing.assert_array_equal, source.records(rows), local.records(rows))
            continue
        out = [{n: np.empty((len(rows), *s.shape), s.dtype) for n, s in local.spec.items()} for _ in range(2)]
        source.read(rows, out[0])
        local.read(rows, out[1])
        jax.tree.map(np.testing.assert_array_equal, *out)
    if "nulls" in kind:
        with pytest.raises(feedline.RowError, match="is null in this row"):
            remote[7]


def test_only_metadata_are_fetched_to_open_a_file_and_at_once(store, options):
    store.objects["/x.arrow"] = arrow(NUMBERS)
    feedline.open_source(f"{store.url}/x.arrow", store=options)
    assert sum(stop - start for start, stop in store.gets()) < 200_000
    assert len(store.gets()) <= 12  # the ends, and 7 record batches


def test_what_is_no_arrow_file(store, options):
    good, stream = arrow(NUMBERS), arrow(NUMBERS, write=pa.ipc.new_stream)
    rows = (3000).to_bytes(8, "little")
    footer = good[-10 - int.from_bytes(good[-10:-6], "little") : -10]
    overlapping = good
    for block in _blocks(footer, len(good)):
        wide = block.copy()
        wide["offset"], wide["metadata"], wide["body"] = 8, len(good) // 2, 0
        overlapping = overlapping.replace(block.tobytes(), wide.tobytes())
    store.objects |= {
        "/page.arrow": b"<html>" * 100,
        "/cut.arrow": good[:-100],
        "/empty.arrow": b"",
        "/stream.arrow": stream[:-100],
        "/garbled.arrow": stream[:9000] + bytes(2_000_000) + stream[2_009_000:],
        "/negative.arrow": good.replace(rows, (-5).to_bytes(8, "little", signed=True)),
        "/endless.arrow": good.replace(rows, (1 << 60).to_bytes(8, "little")),
        "/overlapping.arrow": overlapping,
        "/compressed.arrow": arrow(NUMBERS, "zstd", pa.ipc.new_stream),
    }
    for name, found in [
        ("page", "it does not begin"),
        ("cut", "it does not end"),
        ("empty", "it does not begin"),
        ("stream", "a stream must end with the mark of its end"),
        ("garbled", "no message begins at byte"),
        ("overlapping", "its footer names bytes outside of it, or some twice"),
        ("negative", "its record batches promise -5 to 2000 rows"),
        ("endless", "its record batches promise 2000 to 1152921504606846976 rows"),
        ("compressed", "it is a compressed stream"),
    ]:
        with pytest.raises(ValueError, match=rf"{name}.arrow cannot be read as an Arrow file: {found}"):
            feedline.open_source(f"{store.url}/{name}.arrow", store=options)


def test_the_index_of_a_stream_is_made_once(store, options, tmp_path):
    path = tmp_path / "x.arrow"
    path.write_bytes(arrow({"n": list(range(5000)), "text": TEXT[:5000]}, write=pa.ipc.new_stream))
    store.objects["/x.arrow"] = path.read_bytes()
    source = feedline.open_source(f"{store.url}/x.arrow", store=options)
    assert source.identity == feedline.open_source(path).identity
    size = len(store.objects["/x.arrow"])
    (block,) = [each for each in options.cache.rglob("*") if each.is_file() and each.stat().st_size >= size]
    block.unlink()
    store.requests.clear()
    again = feedline.open_source(f"{store.url}/x.arrow", store=options)
    assert not store.gets()
    assert again[4999] == {"n": 4999, "text": TEXT[4999].encode()}
    assert store.gets() == [(0, size)]


@pytest.mark.slow
def test_damaged_metadata_are_an_error_or_other_rows(store, tmp_path):
    """Whatever bytes of the footer and of the batches' metadata are changed, no memory outside is read."""
    table = {"n": np.arange(100), "s": ["a"] * 100}
    good, stream = arrow(table), arrow(table, write=pa.ipc.new_stream)
    random_ = random.Random(3)
    opened = 0
    for number in range(100):
        data = bytearray(stream if number % 3 == 0 else good)
        for _ in range(random_.choice([1, 1, 3])):
            at = random_.randrange(8, len(data)) if number % 2 else random_.randrange(len(data) - 400, len(data))
            data[at] = random_.randrange(256)
        store.objects["/x.arrow"] = bytes(data)
        for columns in (["n"], None):
            try:
                source = feedline.open_source(
                    f"{store.url}/x.arrow", columns=columns, store=feedline.Store(cache=tmp_path, patience_s=0.1)
                )
                opened += 1
                source[len(source) - 1]
            except (ValueError, TypeError, KeyError, OverflowError, feedline.FeedError):
                pass
    assert opened > 15
