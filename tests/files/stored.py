"""Objects for the tests of stores: an array and records."""

import io

import numpy as np
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
    """Write an ArrayRecord file, whose size depends only on the lengths of its records. Returns its bytes."""
    writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()
    return path.read_bytes()
