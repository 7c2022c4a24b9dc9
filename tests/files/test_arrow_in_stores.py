"""Arrow files in a store: the same rows and identities as of local files, since they are fetched whole."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

import feedline

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
KINDS += [f"stream {kind}" for kind in ("mapped", "nulls", "text", "bits", "compressed")]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_identity_are_those_of_the_local_file(kind, as_local):
    table, rows = dict(NUMBERS), np.random.default_rng(6).integers(0, COUNT, 200)
    if "bits" in kind:
        table["even"] = pa.array(np.arange(COUNT) % 2 == 0)
    elif kind == "tensors":
        tensors = pa.fixed_shape_tensor(pa.float32(), [4, 8])
        table["x"] = pa.ExtensionArray.from_storage(tensors, table["x"])
    elif "nulls" in kind:
        table["m"], rows = NULLS, rows[rows % 7 > 0]
    elif "text" in kind:
        table["text"] = TEXT
    write = pa.ipc.new_stream if "stream" in kind else pa.ipc.new_file
    remote = as_local("x.arrow", arrow(table, "zstd" if "compressed" in kind else None, write), rows)
    if "nulls" in kind:
        with pytest.raises(feedline.RowError, match="is null in this row"):
            remote[7]


def test_what_is_no_arrow_file_is_named_by_its_address(store, options):
    good, stream = arrow(NUMBERS), arrow(NUMBERS, write=pa.ipc.new_stream)
    store.objects |= {
        "/page.arrow": b"<html>" * 100,
        "/cut.arrow": good[:-100],
        "/stream.arrow": stream[:-100],
    }
    for name in ("page", "cut", "stream"):
        with pytest.raises(ValueError, match=rf"^{store.url}/{name}.arrow cannot be read as"):
            feedline.open_source(f"{store.url}/{name}.arrow", store=options)


def test_a_stream_is_fetched_once(store, options, tmp_path):
    path = tmp_path / "x.arrow"
    path.write_bytes(arrow({"n": list(range(5000)), "text": TEXT[:5000]}, write=pa.ipc.new_stream))
    store.objects["/x.arrow"] = path.read_bytes()
    source = feedline.open_source(f"{store.url}/x.arrow", store=options)
    assert source.identity == feedline.open_source(path).identity
    store.requests.clear()
    again = feedline.open_source(f"{store.url}/x.arrow", store=options)
    assert again[4999] == {"n": 4999, "text": TEXT[4999].encode()}
    assert not store.gets()
