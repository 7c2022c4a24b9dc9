"""Does feedline read each format as fast as the format's own library reads the same rows in the same order?

Refuted for a format if the library's time ÷ feedline's, the median of paired passes, is below 0.8. The library
is used in the fastest way that was found, on the same files, and may use its own threads; feedline's `read`
is called from one thread. Both deliver NumPy arrays, whose values are compared before the measurement.

    python benchmarks/claims/formats.py --out formats.json      # about two minutes; --only parquet for one
"""

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

BATCH_ROWS = 4096
GROUP_ROWS = 4096  # a row group, a record batch, a chunk
GROUPS = 12
WINDOW = 4  # groups among which a blocked order shuffles
WIDTH = 3072


def images(rows, seed=0):
    return np.random.default_rng(seed).integers(0, 255, (rows, WIDTH), np.uint8)


def shuffled(rows):
    """The batches of a full shuffle, without the last partial one."""
    order = np.random.default_rng(1).permutation(rows)
    return [order[i : i + BATCH_ROWS] for i in range(0, rows - BATCH_ROWS + 1, BATCH_ROWS)]


def blocked():
    """For each window of shuffled groups: the groups, and their rows shuffled."""
    random = np.random.default_rng(2)
    for window in random.permutation(GROUPS).reshape(-1, WINDOW):
        rows = (window[:, None] * GROUP_ROWS + np.arange(GROUP_ROWS)).reshape(-1)
        yield window.tolist(), random.permutation(rows)


def read_batches(source, batches):
    """The rows of each batch, read by feedline into two buffers alternately."""
    buffers = [
        {k: np.empty((len(batches[0]), *s.shape), s.dtype) for k, s in source.spec.items()} for _ in range(2)
    ]
    for i, rows in enumerate(batches):
        source.read(rows, buffers[i % 2])
        yield buffers[i % 2]


def within(groups, rows):
    """The offsets of `rows` in the concatenation of `groups`."""
    offset = np.empty(GROUPS, np.int64)
    offset[groups] = np.arange(len(groups))
    return offset[rows // GROUP_ROWS] * GROUP_ROWS + rows % GROUP_ROWS


def array_record(folder):
    """Globally shuffled, uncompressed records of 3 KB. The library: one `read` of a batch's records, joined."""
    path, data = folder / "x.array_record", images(GROUPS * GROUP_ROWS)
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for row in data:
        writer.write(row.tobytes())
    writer.close()
    source = feedline.open_source(path, dtype=(np.uint8, (WIDTH,)), columns=["image"])
    options = "readahead_buffer_size:0,index_storage_option:in_memory"
    reader = array_record_module.ArrayRecordReader(str(path), options=options, file_reader_buffer_size=1 << 15)
    batches = shuffled(len(data))

    def library():
        for rows in batches:
            yield {"image": np.frombuffer(b"".join(reader.read(rows.tolist())), np.uint8).reshape(-1, WIDTH)}

    return lambda: read_batches(source, batches), library


def table(rows):
    image, random = images(rows), np.random.default_rng(3)
    features = pa.array(random.random(rows * 64, np.float32))
    return pa.table(
        {
            "features": pa.FixedSizeListArray.from_arrays(features, 64),
            "image": pa.FixedSizeBinaryArray.from_buffers(pa.binary(WIDTH), rows, [None, pa.py_buffer(image)]),
            "label": random.integers(0, 1000, rows).astype(np.int32),
        }
    )


def as_numpy(taken):
    """The columns of a table as arrays, without needless copies."""
    features, image, label = (taken.column(name).combine_chunks() for name in ("features", "image", "label"))
    pixels = np.frombuffer(image.buffers()[1], np.uint8).reshape(-1, WIDTH)
    return {"features": features.flatten().to_numpy().reshape(-1, 64), "image": pixels, "label": label.to_numpy()}


def parquet(folder):
    """Blocked. The library: a window's row groups at once, with its threads; NumPy takes the rows."""
    path = folder / "x.parquet"
    pq.write_table(table(GROUPS * GROUP_ROWS), path, row_group_size=GROUP_ROWS)
    batches = [rows[i : i + BATCH_ROWS] for _, rows in blocked() for i in range(0, len(rows), BATCH_ROWS)]

    def library():
        with pq.ParquetFile(path, memory_map=True) as file:
            for groups, rows in blocked():
                whole, offsets = as_numpy(file.read_row_groups(groups, use_threads=True)), within(groups, rows)
                for i in range(0, len(rows), BATCH_ROWS):
                    yield {k: v.take(offsets[i : i + BATCH_ROWS], axis=0) for k, v in whole.items()}

    return lambda: read_batches(feedline.open_source(path), batches), library


def arrow(folder):
    """Globally shuffled, 12 record batches, mapped. The library: `Table.take`."""
    path = folder / "x.arrow"
    feather.write_feather(table(GROUPS * GROUP_ROWS), str(path), compression="uncompressed", chunksize=GROUP_ROWS)
    mapped, source = feather.read_table(str(path), memory_map=True), feedline.open_source(path)
    batches = shuffled(GROUPS * GROUP_ROWS)

    def library():
        for rows in batches:
            yield as_numpy(mapped.take(pa.array(rows)))

    return lambda: read_batches(source, batches), library


def zarr(folder):
    """Blocked, Zarr 3 with zstd. The library: a window's chunks at once, in parallel; NumPy takes the rows."""
    path = folder / "x.zarr" / "image"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    metadata = {"codecs": [{"name": "zstd", "configuration": {"level": 1}}]}
    form = {"dtype": ts.uint8, "shape": [GROUPS * GROUP_ROWS, WIDTH]}
    chunks = ts.ChunkLayout(chunk_shape=[GROUP_ROWS, WIDTH])
    store = ts.open({**spec, "metadata": metadata}, create=True, chunk_layout=chunks, **form).result()
    store.write(images(GROUPS * GROUP_ROWS) // 32).result()  # values that zstd can compress
    (path.parent / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    batches = [rows[i : i + BATCH_ROWS] for _, rows in blocked() for i in range(0, len(rows), BATCH_ROWS)]

    def library():
        opened = ts.open(spec, read=True).result()
        for groups, rows in blocked():
            parts = [opened[g * GROUP_ROWS : (g + 1) * GROUP_ROWS].read() for g in groups]
            whole, offsets = np.concatenate([part.result() for part in parts]), within(groups, rows)
            for i in range(0, len(rows), BATCH_ROWS):
                yield {"image": whole.take(offsets[i : i + BATCH_ROWS], axis=0)}

    return lambda: read_batches(feedline.open_source(path.parent), batches), library


def shards(folder, count):
    """Globally shuffled `.npy` files. In place of the library: feedline itself on one file with all rows.

    Linux maps a large file with pages of 2 MiB, but files of about that size with small pages, which is slower.
    """
    data = images(GROUPS * GROUP_ROWS)
    np.save(folder / "whole.npy", data)
    for i, part in enumerate(np.split(data, count)):
        np.save(folder / f"part-{i:05}.npy", part)
    many, one = (feedline.open_source(folder / name, columns=["x"]) for name in ("part-*.npy", "whole.npy"))
    batches = shuffled(len(data))
    return lambda: read_batches(many, batches), lambda: read_batches(one, batches)


def windows(folder):
    """Overlapping windows of 2,049 tokens, 2,048 apart. In place of the library: NumPy's view of windows."""
    tokens = np.random.default_rng(5).integers(0, 1 << 16, (1 << 25) + 1, np.uint16)
    tokens.tofile(folder / "x.bin")
    source = feedline.open_source(folder / "x.bin", dtype=np.uint16, window=2049, stride=2048, columns=["tokens"])
    mapped, batches = np.asarray(np.memmap(folder / "x.bin", np.uint16, "r")), shuffled(len(source))
    view = np.lib.stride_tricks.sliding_window_view(mapped, 2049)[::2048]

    def library():
        for rows in batches:
            yield {"tokens": view[rows]}

    return lambda: read_batches(source, batches), library


CASES = {
    "array_record": array_record,
    "parquet": parquet,
    "arrow": arrow,
    "zarr": zarr,
    "shards 8 of 18 MB": lambda folder: shards(folder, 8),
    "shards 64 of 2 MB": lambda folder: shards(folder, 64),
    "windows": windows,
}


def seconds(run):
    started = time.perf_counter()
    rows = sum(len(next(iter(batch.values()))) for batch in run())
    return time.perf_counter() - started, rows


def measure(case, passes):
    """Seconds of the passes of both, alternately, after a pass that compares their rows."""
    with tempfile.TemporaryDirectory() as folder:
        ours, library = case(Path(folder))
        for mine, theirs in zip(ours(), library(), strict=True):
            for name, values in theirs.items():
                np.testing.assert_array_equal(mine[name], values)
        pairs = [(seconds(ours), seconds(library)) for _ in range(passes)]
    rows = pairs[0][0][1]
    times = {"feedline_s": [mine[0] for mine, _ in pairs], "library_s": [theirs[0] for _, theirs in pairs]}
    ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
    return {"rows": rows, "ratio": ratio, "rows_per_s": rows / statistics.median(times["feedline_s"]), **times}


def main():
    asked = parser(__doc__)
    asked.add_argument("--passes", type=int, default=11)
    asked.add_argument("--only", default="", help="only cases whose names begin with this")
    options = asked.parse_args()
    results = {}
    for name, case in CASES.items():
        if name.startswith(options.only):
            results[name] = measure(case, options.passes)
            found = results[name]
            print(
                f"{name:26} {found['ratio']:5.2f} × the library, {found['rows_per_s']:12,.0f} rows/s", flush=True
            )
    save("formats", options, results=results)


if __name__ == "__main__":
    main()
