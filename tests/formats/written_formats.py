"""A file of each format with the same rows, for test_conformance.py: a small function that writes each.

Every function is given a path, and which of the rows to write.
"""

import dataclasses
import io
import json
import struct
import tarfile
from collections.abc import Callable
from typing import Any

import h5py
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorstore
import tfrecords
from array_record.python.array_record_module import ArrayRecordWriter

from feedline._src.formats.registry import format_named

COUNT = 120
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
      data_suffix: of another one that has the rows, if there is one.
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
        return format_named(self.format).takes

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


def case(name, rows, **arguments):
    """Register a function as the case of this name, the first word of which is the format."""

    def register(write):
        form = format_named(name.partition(" ")[0])
        suffix = arguments.pop("suffix", form.suffixes[0])
        CASES[name] = Case(form.name, write, rows, suffix=suffix, **arguments)
        return write

    return register


@case("npy", X)
def _npy(path, rows):
    np.save(path, X[rows])


@case("npy records", NUMBERS)
def _npy_records(path, rows):
    np.save(path, pairs(rows))


@case("npy archive", NUMBERS, suffix=".npz")
def _npz(path, rows):
    np.savez(path, n=N[rows], x=X[rows])


@case("npy compressed archive", NUMBERS, suffix=".npz", has_checksums=True)
def _npz_compressed(path, rows):
    np.savez_compressed(path, n=N[rows], x=X[rows])


@case("raw", X, options={"dtype": np.dtype((np.float32, (3,)))})
def _raw(path, rows):
    X[rows].tofile(path)


def pairs(rows):
    found = np.zeros(len(N[rows]), PAIR)
    found["n"], found["x"] = N[rows], X[rows]
    return found


def write_records(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


@case("array_record", TEXT, has_checksums=True)
def _array_record(path, rows):
    write_records(path, TEXT[rows])


@case("array_record of a dtype", NUMBERS, options={"dtype": PAIR}, has_checksums=True)
def _array_record_of_a_dtype(path, rows):
    write_records(path, [pair.tobytes() for pair in pairs(rows)])


def table(rows):
    x = pa.FixedSizeListArray.from_arrays(pa.array(X[rows].reshape(-1)), 3)
    return pa.table({"n": N[rows], "x": x})


def texts(rows):
    return pa.table({"n": N[rows], "text": pa.array(TEXT[rows], pa.binary())})


@case("parquet", NUMBERS)
def _parquet(path, rows):
    pq.write_table(table(rows), path, row_group_size=50)


@case("parquet text", MIXED)
def _parquet_text(path, rows):
    pq.write_table(texts(rows), path, row_group_size=50, compression="zstd")


def write_arrow(path, content, compression=None, write=pa.ipc.new_file):
    with write(str(path), content.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(content, max_chunksize=50)


@case("arrow", NUMBERS)
def _arrow(path, rows):
    write_arrow(path, table(rows))


@case("arrow compressed", NUMBERS)
def _arrow_compressed(path, rows):
    write_arrow(path, table(rows), "lz4")


@case("arrow stream", NUMBERS, suffix=".feather")
def _arrow_stream(path, rows):
    write_arrow(path, table(rows), write=pa.ipc.new_stream)


@case("arrow text", MIXED)
def _arrow_text(path, rows):
    write_arrow(path, texts(rows))


@case("arrow compressed text", MIXED)
def _arrow_compressed_text(path, rows):
    write_arrow(path, texts(rows), "zstd")


@case("arrow compressed stream", NUMBERS)
def _arrow_compressed_stream(path, rows):
    write_arrow(path, table(rows), "lz4", pa.ipc.new_stream)


@case("arrow stream text", MIXED)
def _arrow_stream_text(path, rows):
    write_arrow(path, texts(rows), write=pa.ipc.new_stream)


def write_csv(path, columns, delimiter):
    lines = [delimiter.join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    path.write_text("\n".join([delimiter.join(columns), *lines, ""]))


SCORES = {"n": N.astype(np.int64), "score": X[:, 0].astype(np.float64)}


@case("csv", SCORES)
def _csv(path, rows):
    write_csv(path, {name: column[rows] for name, column in SCORES.items()}, ",")


@case("csv text", {"n": list(N.astype(np.int64)), "text": TEXT}, suffix=".tsv")
def _csv_text(path, rows):
    write_csv(path, {"n": N[rows], "text": [text.decode() for text in TEXT[rows]]}, "\t")


@case("tfrecord", TEXT, has_checksums=True)
def _tfrecord(path, rows):
    path.write_bytes(tfrecords.encoded(TEXT[rows]))


@case("tar", {"n.txt": [b"%d" % n for n in N], "text": TEXT})
def _tar(path, rows):
    with tarfile.open(path, "w") as archive:
        for n, text in zip(N[rows], TEXT[rows], strict=True):
            for name, data in ((f"{n:04}.n.txt", b"%d" % n), (f"{n:04}.text", text)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def write_lines(path, rows, columns):
    lines = ({name: column[i] for name, column in columns.items()} for i in range(COUNT)[rows])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@case("jsonl", NUMBERS)
def _jsonl(path, rows):
    write_lines(path, rows, {"n": N.tolist(), "x": X.tolist()})


@case("jsonl text", MIXED, suffix=".ndjson")
def _jsonl_text(path, rows):
    write_lines(path, rows, {"n": N.tolist(), "text": [text.decode() for text in TEXT]})


@case("hdf5", NUMBERS)
def _hdf5(path, rows):
    with h5py.File(path, "w") as file:
        file["n"], file["x"] = N[rows], X[rows]


@case("hdf5 chunks", NUMBERS, suffix=".hdf5")
def _hdf5_chunks(path, rows):
    with h5py.File(path, "w") as file:
        for name, leaf in (("n", N[rows]), ("x", X[rows])):
            file.create_dataset(name, data=leaf, chunks=(min(16, len(leaf)), *leaf.shape[1:]), compression="gzip")


@case("hdf5 text", MIXED)
def _hdf5_text(path, rows):
    with h5py.File(path, "w") as file:
        file["n"] = N[rows]
        text = file.create_dataset("text", (len(N[rows]),), h5py.vlen_dtype(np.uint8))
        for i, data in enumerate(TEXT[rows]):
            text[i] = np.frombuffer(data, np.uint8)


@case("lmdb", {"key": [b"%04d" % n for n in N], "value": TEXT})
def _lmdb(path, rows):
    lmdb = pytest.importorskip("lmdb")
    path.unlink(missing_ok=True)
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20) as env, env.begin(write=True) as entries:
        for n, text in zip(N[rows], TEXT[rows], strict=True):
            entries.put(b"%04d" % n, text)


def write_zarr(path, leaf, driver, metadata=None):
    array = tensorstore.open(
        {"driver": driver, "kvstore": {"driver": "file", "path": str(path)}, "metadata": metadata or {}},
        create=True,
        dtype=leaf.dtype,
        shape=leaf.shape,
        chunk_layout=tensorstore.ChunkLayout(write_chunk_shape=(16, *leaf.shape[1:])),
    ).result()
    array.write(leaf).result()


@case("zarr", X)
def _zarr(path, rows):
    write_zarr(path, X[rows], "zarr3")


@case("zarr version 2", X)
def _zarr_version_2(path, rows):
    write_zarr(path, X[rows], "zarr")


@case("zarr group", NUMBERS)
def _zarr_group(path, rows):
    for name, leaf in NUMBERS.items():
        write_zarr(path / name, leaf[rows], "zarr3")
    members = {name: json.loads((path / name / "zarr.json").read_text()) for name in NUMBERS}
    group = {"zarr_format": 3, "node_type": "group", "consolidated_metadata": {"metadata": members}}
    (path / "zarr.json").write_text(json.dumps(group))


TOKENS = np.random.default_rng(1).integers(0, 1 << 15, (COUNT, 4)).astype(np.uint16)


@case("megatron", TOKENS, options={"window": 4}, data_suffix=".bin")
def _megatron(path, rows):
    tokens = TOKENS[rows].reshape(-1)
    ends = np.unique([*np.random.default_rng(2).integers(0, len(tokens), 30), len(tokens)])  # of documents
    starts = np.concatenate([[0], ends[:-1]])
    head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, len(ends), len(ends) + 1)
    parts = (ends - starts).astype("<i4"), (2 * starts).astype("<i8"), np.arange(len(ends) + 1, dtype="<i8")
    path.write_bytes(head + b"".join(part.tobytes() for part in parts))
    tokens.tofile(path.with_suffix(".bin"))
