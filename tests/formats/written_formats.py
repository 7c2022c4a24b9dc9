"""A file of each format with the same rows, for test_conformance.py: `case(name, rows, what writes them)`.

What writes them is a function of a path and of the slice of rows to write.
"""

import dataclasses
import json
import struct
from collections.abc import Callable
from typing import Any

import h5py
import jax
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorstore
import tfrecords
from array_record.python.array_record_module import ArrayRecordWriter
from tar_files import write_tar

from feedline._src.formats.registry import formats

COUNT = 120
FORMATS = {form.name: form for form in formats().values()}
X = np.random.default_rng(0).normal(size=(COUNT, 3)).astype(np.float32)
N = np.arange(1, COUNT + 1, dtype=np.int32)
TEXT = [f"row {i} ".encode() * (i % 5) for i in range(COUNT)]
PAIR = np.dtype([("n", np.int32), ("x", np.float32, (3,))])
NUMBERS = {"n": N, "x": X}
MIXED = {"n": list(N), "text": TEXT}  # lists: encoded rows


@dataclasses.dataclass(frozen=True)
class Case:
    """Files of a format.

    Attributes:
      format: its name.
      write: (path, slice) → writes these rows.
      rows: a tree of arrays; or for encoded rows a list of records, or a dict of lists.
      options: of `open_source`.
      has_checksums: a row that was damaged is never returned.
      suffix: of the file that is opened.
      data_suffix: of the file that has the rows, if it is another one.
    """

    format: str
    write: Callable[[Any, slice], None]
    rows: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_checksums: bool = False
    suffix: str = ""
    data_suffix: str = ""

    @property
    def takes(self):
        return FORMATS[self.format].takes

    def expected(self, rows):
        """The rows at these indices: a tree of arrays, or a list of records."""
        return _chosen(self.rows, rows)

    def row(self, row):
        """A single row."""
        found = self.expected(np.array([row]))
        return found[0] if isinstance(found, list) else jax.tree.map(lambda leaf: leaf[0], found)


def _chosen(tree, rows):
    if isinstance(tree, list):
        return [tree[row] for row in rows]
    if isinstance(tree, dict) and any(isinstance(column, list) for column in tree.values()):
        return [{name: column[row] for name, column in tree.items()} for row in rows]
    return {name: column[rows] for name, column in tree.items()} if isinstance(tree, dict) else tree[rows]


CASES: dict[str, Case] = {}


def case(name, rows, write, **arguments):
    """Register a case. The first word of its name is the format."""
    form = FORMATS[name.partition(" ")[0]]
    suffix = arguments.pop("suffix", form.suffixes[0])
    CASES[name] = Case(form.name, write, rows, suffix=suffix, **arguments)


def pairs(rows):
    found = np.zeros(len(N[rows]), PAIR)
    found["n"], found["x"] = N[rows], X[rows]
    return found


def npz(save):
    return lambda path, rows: save(path, n=N[rows], x=X[rows])


case("npy", X, lambda path, rows: np.save(path, X[rows]))
case("npy records", NUMBERS, lambda path, rows: np.save(path, pairs(rows)))
case("npy archive", NUMBERS, npz(np.savez), suffix=".npz")
case("npy compressed archive", NUMBERS, npz(np.savez_compressed), suffix=".npz", has_checksums=True)
case("raw", X, lambda path, rows: X[rows].tofile(path), options={"dtype": np.dtype((np.float32, (3,)))})


def write_records(path, records, options="group_size:1"):
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


case("array_record", TEXT, lambda path, rows: write_records(path, TEXT[rows]), has_checksums=True)
case(
    "array_record of a dtype", NUMBERS,
    lambda path, rows: write_records(path, [pair.tobytes() for pair in pairs(rows)]),
    options={"dtype": PAIR}, has_checksums=True,
)  # fmt: skip


def table(rows):
    x = pa.FixedSizeListArray.from_arrays(pa.array(X[rows].reshape(-1)), 3)
    return pa.table({"n": N[rows], "x": x})


def texts(rows):
    return pa.table({"n": N[rows], "text": pa.array(TEXT[rows], pa.binary())})


def arrow(content, compression=None, write=pa.ipc.new_file):
    def written(path, rows):
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with write(str(path), content(rows).schema, options=options) as writer:
            writer.write_table(content(rows), max_chunksize=50)

    return written


case("parquet", NUMBERS, lambda path, rows: pq.write_table(table(rows), path, row_group_size=50))
case(
    "parquet text", MIXED,
    lambda path, rows: pq.write_table(texts(rows), path, row_group_size=50, compression="zstd"),
)  # fmt: skip
case("arrow", NUMBERS, arrow(table))
case("arrow compressed", NUMBERS, arrow(table, "lz4"))
case("arrow stream", NUMBERS, arrow(table, write=pa.ipc.new_stream), suffix=".feather")
case("arrow text", MIXED, arrow(texts))
case("arrow compressed text", MIXED, arrow(texts, "zstd"))
case("arrow compressed stream", NUMBERS, arrow(table, "lz4", pa.ipc.new_stream))
case("arrow stream text", MIXED, arrow(texts, write=pa.ipc.new_stream))


def csv(delimiter, columns):
    def write(path, rows):
        lines = [delimiter.join(map(str, row)) for row in zip(*columns(rows).values(), strict=True)]
        path.write_text("\n".join([delimiter.join(columns(rows)), *lines, ""]))

    return write


SCORES = {"n": N.astype(np.int64), "score": X[:, 0].astype(np.float64)}
case("csv", SCORES, csv(",", lambda rows: {name: column[rows] for name, column in SCORES.items()}))
case(
    "csv text", {"n": list(N.astype(np.int64)), "text": TEXT},
    csv("\t", lambda rows: {"n": N[rows], "text": [text.decode() for text in TEXT[rows]]}), suffix=".tsv",
)  # fmt: skip
case("tfrecord", TEXT, lambda path, rows: path.write_bytes(tfrecords.encoded(TEXT[rows])), has_checksums=True)


def write_archive(path, rows):
    members = []
    for n, text in zip(N[rows], TEXT[rows], strict=True):
        members += [(f"{n:04}.n.txt", b"%d" % n), (f"{n:04}.text", text)]
    write_tar(path, members)


case("tar", {"n.txt": [b"%d" % n for n in N], "text": TEXT}, write_archive)


def lines(columns):
    def write(path, rows):
        found = ({name: column[i] for name, column in columns.items()} for i in range(COUNT)[rows])
        path.write_text("".join(json.dumps(line) + "\n" for line in found))

    return write


case("jsonl", NUMBERS, lines({"n": N.tolist(), "x": X.tolist()}))
case("jsonl text", MIXED, lines({"n": N.tolist(), "text": [text.decode() for text in TEXT]}), suffix=".ndjson")


def write_hdf5(path, rows):
    with h5py.File(path, "w") as file:
        file["n"], file["x"] = N[rows], X[rows]


def write_hdf5_chunks(path, rows):
    with h5py.File(path, "w") as file:
        for name, leaf in (("n", N[rows]), ("x", X[rows])):
            file.create_dataset(name, data=leaf, chunks=(min(16, len(leaf)), *leaf.shape[1:]), compression="gzip")


def write_hdf5_text(path, rows):
    with h5py.File(path, "w") as file:
        file["n"] = N[rows]
        text = file.create_dataset("text", (len(N[rows]),), h5py.vlen_dtype(np.uint8))
        for i, data in enumerate(TEXT[rows]):
            text[i] = np.frombuffer(data, np.uint8)


case("hdf5", NUMBERS, write_hdf5)
case("hdf5 chunks", NUMBERS, write_hdf5_chunks, suffix=".hdf5")
case("hdf5 text", MIXED, write_hdf5_text)


def write_lmdb(path, rows):
    path.unlink(missing_ok=True)
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20) as env, env.begin(write=True) as entries:
        for n, text in zip(N[rows], TEXT[rows], strict=True):
            entries.put(b"%04d" % n, text)


case("lmdb", {"key": [b"%04d" % n for n in N], "value": TEXT}, write_lmdb)


ZARR_DRIVERS = {2: "zarr", 3: "zarr3"}


def write_zarr(path, rows, version=3, chunks=None, metadata=None, only=..., fill=None):
    """Write an array, or only the rows of it that `only` selects. `metadata`: what the rows do not determine."""
    chunks = [10, *rows.shape[1:]][: rows.ndim] if chunks is None else chunks
    kvstore = {"driver": "file", "path": str(path)}
    store = tensorstore.open(
        {"driver": ZARR_DRIVERS[version], "kvstore": kvstore, "metadata": metadata or {}},
        create=True, dtype=rows.dtype, shape=rows.shape, fill_value=fill,
        chunk_layout=tensorstore.ChunkLayout(write_chunk_shape=chunks),
    ).result()  # fmt: skip
    store[only].write(rows[only]).result()
    return path


def write_zarr_group(path, rows):
    for name, leaf in NUMBERS.items():
        write_zarr(path / name, leaf[rows])
    (path / "zarr.json").write_text(json.dumps({"zarr_format": 3, "node_type": "group"}))


case("zarr", X, lambda path, rows: write_zarr(path, X[rows]))
case("zarr version 2", X, lambda path, rows: write_zarr(path, X[rows], 2))
case("zarr group", NUMBERS, write_zarr_group)
TOKENS = np.random.default_rng(1).integers(0, 1 << 15, (COUNT, 4)).astype(np.uint16)


def write_tokens(path, rows):
    tokens = TOKENS[rows].reshape(-1)
    ends = np.unique([*np.random.default_rng(2).integers(0, len(tokens), 30), len(tokens)])  # of documents
    starts = np.concatenate([[0], ends[:-1]])
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, len(ends), len(ends) + 1)
    parts = (ends - starts).astype("<i4"), (2 * starts).astype("<i8"), np.arange(len(ends) + 1, dtype="<i8")
    path.write_bytes(head + b"".join(part.tobytes() for part in parts))
    tokens.tofile(path.with_suffix(".bin"))


case("megatron", TOKENS, write_tokens, options={"window": 4}, data_suffix=".bin")
