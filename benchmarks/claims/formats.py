"""Does feedline read each format as fast as the format's own library reads the same rows in the same order?

Refuted for a format if the library's time ÷ feedline's, the median of paired passes, is below 0.8. The library
is used in the fastest way that was found, on the same files, and may use its own threads; feedline's `read`
is called from one thread. Both deliver NumPy arrays, whose values are compared before the measurement.

    python benchmarks/claims/formats.py --out formats.json      # about two minutes; --only parquet for one
"""

import collections
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import tensorstore as ts
from array_record.python import array_record_module

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

import feedline

BATCH_ROWS = GROUP_ROWS = 4096  # a group: a row group, a record batch, a chunk
GROUPS, WINDOW, WIDTH = 12, 4, 3072  # window: the groups among which a blocked order shuffles
ROWS = GROUPS * GROUP_ROWS
# Each case makes files in a folder, and returns a source, the rows of each batch, and a generator function that
# yields the same batches, read by the library.


def images():
    return np.random.default_rng(0).integers(0, 255, (ROWS, WIDTH), np.uint8)


def cut(rows):
    return [rows[i : i + BATCH_ROWS] for i in range(0, len(rows) - BATCH_ROWS + 1, BATCH_ROWS)]


def shuffled(rows):
    """The batches of a full shuffle, without the last partial one."""
    return cut(np.random.default_rng(1).permutation(rows))


def blocked():
    """For each window of shuffled groups: the groups, and their rows shuffled."""
    random = np.random.default_rng(2)
    for window in random.permutation(GROUPS).reshape(-1, WINDOW):
        rows = (window[:, None] * GROUP_ROWS + np.arange(GROUP_ROWS)).reshape(-1)
        yield window.tolist(), random.permutation(rows)


def by_windows(read):
    """The batches of `blocked`: `read(groups)` reads the columns of a window at once, and NumPy takes the rows."""
    for groups, rows in blocked():
        whole, offset = read(groups), np.empty(GROUPS, np.int64)
        offset[groups] = np.arange(len(groups))
        for batch in cut(offset[rows // GROUP_ROWS] * GROUP_ROWS + rows % GROUP_ROWS):
            yield {name: values.take(batch, axis=0) for name, values in whole.items()}


def array_record(folder):
    """Globally shuffled, uncompressed records of 3 KB. The library reads a batch's records in one call."""
    path, data = folder / "x.array_record", images()
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for row in data:
        writer.write(row.tobytes())
    writer.close()
    source = feedline.open_source(path, dtype=(np.uint8, (WIDTH,)), columns=["image"])
    options = "readahead_buffer_size:0,index_storage_option:in_memory"
    reader = array_record_module.ArrayRecordReader(str(path), options=options, file_reader_buffer_size=1 << 15)

    def library():
        for rows in shuffled(ROWS):
            yield {"image": np.frombuffer(b"".join(reader.read(rows.tolist())), np.uint8).reshape(-1, WIDTH)}

    return source, shuffled(ROWS), library


def table():
    random = np.random.default_rng(3)
    features = pa.array(random.random(ROWS * 64, np.float32))
    return pa.table(
        {
            "features": pa.FixedSizeListArray.from_arrays(features, 64),
            "image": pa.FixedSizeBinaryArray.from_buffers(pa.binary(WIDTH), ROWS, [None, pa.py_buffer(images())]),
            "label": random.integers(0, 1000, ROWS).astype(np.int32),
        }
    )


def as_numpy(taken):
    """The columns of a table as arrays, without needless copies."""
    features, image, label = (taken.column(name).combine_chunks() for name in ("features", "image", "label"))
    pixels = np.frombuffer(image.buffers()[1], np.uint8).reshape(-1, WIDTH)
    return {"features": features.flatten().to_numpy().reshape(-1, 64), "image": pixels, "label": label.to_numpy()}


def parquet(folder):
    """A blocked order. The library reads a window's row groups in one call, with its threads."""
    pq.write_table(table(), folder / "x.parquet", row_group_size=GROUP_ROWS)

    def library():
        with pq.ParquetFile(folder / "x.parquet", memory_map=True) as file:
            yield from by_windows(lambda groups: as_numpy(file.read_row_groups(groups, use_threads=True)))

    batches = [batch for _, rows in blocked() for batch in cut(rows)]
    return lambda: feedline.open_source(folder / "x.parquet"), batches, library


def arrow(folder):
    """Globally shuffled rows of 12 mapped record batches. The library reads them with `Table.take`."""
    path = str(folder / "x.arrow")
    feather.write_feather(table(), path, compression="uncompressed", chunksize=GROUP_ROWS)
    mapped = feather.read_table(path, memory_map=True)

    def library():
        for rows in shuffled(ROWS):
            yield as_numpy(mapped.take(pa.array(rows)))

    return feedline.open_source(path), shuffled(ROWS), library


def zarr(folder):
    """A blocked order; Zarr 3 with zstd. The library reads a window's chunks in parallel."""
    path = folder / "x.zarr" / "image"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    metadata = {"codecs": [{"name": "zstd", "configuration": {"level": 1}}]}
    form = {"dtype": ts.uint8, "shape": [ROWS, WIDTH]}
    chunks = ts.ChunkLayout(chunk_shape=[GROUP_ROWS, WIDTH])
    store = ts.open({**spec, "metadata": metadata}, create=True, chunk_layout=chunks, **form).result()
    store.write(images() // 32).result()  # values that zstd can compress
    (path.parent / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')

    def library():
        opened = ts.open(spec, read=True).result()

        def read(groups):
            parts = [opened[g * GROUP_ROWS : (g + 1) * GROUP_ROWS].read() for g in groups]
            return {"image": np.concatenate([part.result() for part in parts])}

        yield from by_windows(read)

    batches = [batch for _, rows in blocked() for batch in cut(rows)]
    return lambda: feedline.open_source(path.parent), batches, library


def shards(folder, count):
    """Globally shuffled `.npy` files. The library's place is taken by feedline, with one file of all rows.

    Linux maps a large file with pages of 2 MiB, but files of about that size with small pages, which is slower.
    """
    np.save(folder / "whole.npy", images())
    for i, part in enumerate(np.split(images(), count)):
        np.save(folder / f"part-{i:05}.npy", part)
    many, one = (feedline.open_source(folder / name, columns=["x"]) for name in ("part-*.npy", "whole.npy"))
    return many, shuffled(ROWS), lambda: read_batches(one, shuffled(ROWS))


CASES = {
    "array_record": array_record,
    "parquet": parquet,
    "arrow": arrow,
    "zarr": zarr,
    "shards 8 of 18 MB": lambda folder: shards(folder, 8),
    "shards 64 of 2 MB": lambda folder: shards(folder, 64),
}


def read_batches(source, batches):
    """Yield each batch, read by feedline into two buffers in turn. `source` may be a function that opens it."""
    source = source() if callable(source) else source
    buffers = [
        {k: np.empty((len(batches[0]), *s.shape), s.dtype) for k, s in source.spec.items()} for _ in range(2)
    ]
    for i, rows in enumerate(batches):
        source.read(rows, buffers[i % 2])
        yield buffers[i % 2]


def seconds(batches):
    """How long all batches take. They are dropped at once."""
    began = time.perf_counter()
    collections.deque(batches, maxlen=0)
    return time.perf_counter() - began


def measure(case, passes):
    """Compare the rows of feedline and the library in one pass, then time further passes of both, alternately."""
    with tempfile.TemporaryDirectory() as folder:
        source, batches, library = case(Path(folder))
        for mine, theirs in zip(read_batches(source, batches), library(), strict=True):
            for name, values in theirs.items():
                np.testing.assert_array_equal(mine[name], values)
        pairs = [(seconds(read_batches(source, batches)), seconds(library())) for _ in range(passes)]
    ours, theirs = map(list, zip(*pairs, strict=True))
    rows, ratio = sum(map(len, batches)), statistics.median(b / a for a, b in pairs)
    rate = rows / statistics.median(ours)
    return {"rows": rows, "ratio": ratio, "rows_per_s": rate, "feedline_s": ours, "library_s": theirs}


def main():
    asked = parser(__doc__)
    asked.add_argument("--passes", type=int, default=11)
    asked.add_argument("--only", default="", help="only cases whose names begin with this")
    options = asked.parse_args()
    results = {}
    for name, case in CASES.items():
        if name.startswith(options.only):
            results[name] = found = measure(case, options.passes)
            rate = f"{found['rows_per_s']:12,.0f} rows/s"
            print(f"{name:26} {found['ratio']:5.2f} × the library, {rate}", flush=True)
    save("formats", options, results=results)


if __name__ == "__main__":
    main()
