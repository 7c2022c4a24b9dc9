"""Objects for the tests of stores: an array, records, and the formats that they are written in."""

import io

import numpy as np
import tensorstore
from array_record.python.array_record_module import ArrayRecordWriter

BLOCK = 1 << 21
ROWS = np.random.default_rng(0).integers(0, 256, (5000, 3000)).astype(np.uint8)  # 7.2 blocks
LABELS = np.arange(5000, dtype=np.int32)
RANDOM = np.random.default_rng(3)
RECORDS = [RANDOM.bytes(int(length)) for length in RANDOM.integers(0, 60_000, 200)]  # 6 MB: 3 blocks


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def array_record(path, records=RECORDS):
    """An ArrayRecord file, written to a path. Of records of one size, its size does not depend on them."""
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()
    return path.read_bytes()


def zarr(store, folder, name="x.zarr", chunks=64):
    """An array of one chunk a row, with `chunks` rows."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / name)}}
    array = tensorstore.open(
        spec, create=True, dtype=np.int64, shape=(chunks, 100),
        chunk_layout=tensorstore.ChunkLayout(write_chunk_shape=(1, 100)),
    ).result()  # fmt: skip
    array.write(np.arange(chunks * 100).reshape(chunks, 100) + 1).result()
    for path in (folder / name).rglob("*"):
        if path.is_file():
            store.objects[f"/{path.relative_to(folder)}"] = path.read_bytes()
    return f"{store.url}/{name}"
