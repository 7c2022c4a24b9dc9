"""The inputs of `fuzz.py`: small valid files of every format."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 64


def rows() -> dict[str, Any]:
    """The rows of every file."""
    random_ = np.random.default_rng(0)
    return {
        "x": random_.integers(1, 1 << 30, (ROWS, 3), np.int32),
        "y": random_.random(ROWS, np.float32) + np.float32(1),
    }


RECORD = np.dtype([("x", np.int32, (3,)), ("y", np.float32)])


def records() -> Any:
    """The rows as records."""
    found = np.empty(ROWS, RECORD)
    for name, values in rows().items():
        found[name] = values
    return found


def write_array_record(path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records():
        writer.write(record.tobytes())
    writer.close()


def write_lines(path: Path) -> None:
    columns = [values.tolist() for values in rows().values()]
    path.write_text("".join(json.dumps({"x": x, "y": y}) + "\n" for x, y in zip(*columns, strict=True)))


def write_table(path: Path, **options: Any) -> None:
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    columns = rows()
    x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(columns["x"].reshape(-1)), 3)
    table = pyarrow.table({"x": x, "y": columns["y"]})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=16, **options)
    else:
        pyarrow.feather.write_feather(table, path, chunksize=16, **options)


def write_zarr(path: Path, version: int, **metadata: Any) -> None:
    import tensorstore

    path.mkdir()
    group = {2: (".zgroup", {"zarr_format": 2}), 3: ("zarr.json", {"zarr_format": 3, "node_type": "group"})}[
        version
    ]
    (path / group[0]).write_text(json.dumps(group[1]))
    for name, values in rows().items():
        spec = {
            "driver": {2: "zarr", 3: "zarr3"}[version],
            "kvstore": {"driver": "file", "path": str(path / name)},
            **({"metadata": metadata} if metadata else {}),
        }
        layout: Any = {"chunk_layout": tensorstore.ChunkLayout(write_chunk_shape=[16, *values.shape[1:]])}
        if metadata.get("codecs", [{}])[0].get("name") == "sharding_indexed":
            metadata["codecs"][0]["configuration"]["chunk_shape"] = [4, *values.shape[1:]]
        store = tensorstore.open(spec, create=True, dtype=values.dtype, shape=values.shape, **layout)
        store.result().write(values).result()


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def _sharding() -> dict[str, Any]:
    inner = [_BYTES, {"name": "gzip", "configuration": {"level": 1}}]
    crc = [_BYTES, {"name": "crc32c"}]
    return {"name": "sharding_indexed", "configuration": {"codecs": inner, "index_codecs": crc}}


def write_stream(path: Path, of_bytes: bool = False) -> None:
    """As `datasets` stores them."""
    import pyarrow

    columns = rows()
    x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(columns["x"].reshape(-1)), 3)
    table = pyarrow.table({"x": x, "y": columns["y"]})
    if of_bytes:
        table = pyarrow.table(
            {"x": pyarrow.array(values(), pyarrow.binary()), "y": np.arange(ROWS, dtype=np.int32)}
        )
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, 16)


WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "npy": (".npy", lambda path: np.save(path, records())),
    "npz": (".npz", lambda path: np.savez(path, **rows())),
    "npz compressed": (".npz", lambda path: np.savez_compressed(path, **rows())),
    "bin": (".bin", lambda path: records().tofile(path)),
    "array_record": (".array_record", write_array_record),
    "jsonl": (".jsonl", write_lines),
    "zarr 2": (".zarr", lambda path: write_zarr(path, 2)),
    "zarr 3": (".zarr", lambda path: write_zarr(path, 3)),
    "zarr 2 zlib": (".zarr", lambda path: write_zarr(path, 2, compressor={"id": "zlib", "level": 1})),
    "zarr 2 blosc": (".zarr", lambda path: write_zarr(path, 2, compressor={"id": "blosc", "cname": "lz4"})),
    "zarr 3 zstd": (".zarr", lambda path: write_zarr(path, 3, codecs=[_BYTES, {"name": "zstd"}])),
    "zarr 3 sharded": (".zarr", lambda path: write_zarr(path, 3, codecs=[_sharding()])),
    "arrow": (".arrow", lambda path: write_table(path, compression="uncompressed")),
    "arrow stream": (".arrow", lambda path: write_stream(path)),
    "arrow compressed": (".arrow", lambda path: write_table(path, compression="zstd")),
    "parquet": (".parquet", write_table),
    "parquet plain": (
        ".parquet",
        lambda path: write_table(path, use_dictionary=False, compression="zstd", data_page_version="2.0"),
    ),
}


def values() -> list[bytes]:
    """The rows of every file of records: bytes of several lengths, of which one is empty."""
    random_ = np.random.default_rng(1)
    return [b"", *(random_.bytes(int(length)) for length in random_.integers(1, 300, ROWS - 1))]


def write_records(path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for value in values():
        writer.write(value)
    writer.close()


def write_tfrecord(path: Path) -> None:
    import google_crc32c

    def masked(data: bytes) -> bytes:
        crc = google_crc32c.value(data)
        return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")

    with path.open("wb") as file:
        for value in values():
            length = len(value).to_bytes(8, "little")
            file.write(length + masked(length) + value + masked(value))


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, value in enumerate(values()):
            for field, data in {"x": value, "y": str(number).encode()}.items():
                member = tarfile.TarInfo(f"{number:03}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def write_byte_table(path: Path, **options: Any) -> None:
    import pyarrow
    import pyarrow.feather
    import pyarrow.parquet

    table = pyarrow.table({"x": pyarrow.array(values(), pyarrow.binary()), "y": np.arange(ROWS, dtype=np.int32)})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=16, **options)
    else:
        pyarrow.feather.write_feather(table, path, chunksize=16, **options)


def write_hdf5(path: Path, libver: str = "earliest", **options: Any) -> None:
    import h5py

    columns = rows()
    with h5py.File(path, "w", libver=libver) as file:
        file.create_dataset("x", data=columns["x"], **({"chunks": (16, 2)} if options else {}), **options)
        file.create_dataset("y", data=columns["y"], chunks=(16,), **options)


def write_hdf5_bytes(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        values_ = file.create_dataset("x", (ROWS,), h5py.vlen_dtype(np.uint8), chunks=(16,))
        for number, value in enumerate(values()):
            values_[number] = np.frombuffer(value, np.uint8)
        file["y"] = np.arange(ROWS, dtype=np.int32)


def write_folder(path: Path) -> None:
    for number, value in enumerate(values()):
        file = path / f"{number // 32}" / f"{number:03}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)


def write_block(path: Path) -> None:
    """A block of the cache of stores, whose bytes are `BLOCK`."""
    from feedline._src.files.cache import Cache

    place = Cache(str(path.parent / "made"), 1 << 30)
    place.put("block", BLOCK)
    path.write_bytes(Path(place.path("block")).read_bytes())


def write_lanes(path: Path) -> None:
    from feedline import save_lanes

    save_lanes(LANES, path)


def write_lane(path: Path) -> None:
    """A single lane, whose file no other one contradicts."""
    from feedline import save_lanes

    save_lanes({**LANES, "lanes": {"0": LANES["lanes"]["0"]}, "writers": [0]}, path)


def write_image(path: Path) -> None:
    import cv2

    across = np.linspace(0, 255, 24, dtype=np.uint8)
    image = np.stack([np.tile(across, (20, 1)), np.tile(across[:20, None], (1, 24)), np.full((20, 24), 90)], -1)
    cv2.imwrite(str(path), image.astype(np.uint8))


DESCRIPTION = {"source": {"kind": "arrays"}, "rows": 64, "format": "npy", "shards": 3}


def write_manifest(path: Path) -> None:
    from feedline._src.tools.convert.manifest import Manifest

    with Manifest(path, path.with_name("result"), DESCRIPTION) as manifest:
        for shard in range(3):
            manifest.add({"shard": shard, "digest": f"d{shard}"})


def write_log(path: Path) -> None:
    path.write_text("step,loss,rows_per_s,wait_share\n10,2.5,1152.0,0.25\n20,1.5,1152.0,0.25\n")


BLOCK = b"".join(values())
LANES = {
    "step": 5,
    "position": 40,
    "lanes": {str(lane): {"next_index": 40 + lane, "inner": {"a": [lane]}} for lane in range(3)},
    "writers": [0, 0, 0],
}
WRITERS |= {
    "hdf5": (".h5", write_hdf5),
    "hdf5 latest": (".h5", lambda path: write_hdf5(path, "latest")),
    "hdf5 gzip": (".h5", lambda path: write_hdf5(path, compression="gzip", shuffle=True)),
    "hdf5 checksums": (".h5", lambda path: write_hdf5(path, fletcher32=True)),
}
RECORDS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "tfrecord": (".tfrecord", write_tfrecord),
    "tfrecord index": (".tfrecord", write_tfrecord),
    "tar": (".tar", write_tar),
    "tar index": (".tar", write_tar),
    "records": (".array_record", write_records),
    "parquet bytes": (".parquet", write_byte_table),
    "arrow bytes": (".arrow", lambda path: write_byte_table(path, compression="uncompressed")),
    "arrow bytes compressed": (".arrow", lambda path: write_byte_table(path, compression="zstd")),
    "hdf5 bytes": (".h5", write_hdf5_bytes),
    "folder": (".photos", write_folder),
}
OTHERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "npz resealed": WRITERS["npz compressed"],
    "tar resealed": RECORDS["tar"],
    "tfrecord resealed": RECORDS["tfrecord"],
    "tfrecord index resealed": RECORDS["tfrecord"],
    "tar index resealed": RECORDS["tar"],
    "remote npy": WRITERS["npy"],
    "remote npz": WRITERS["npz"],
    "remote parquet": WRITERS["parquet"],
    "remote arrow": WRITERS["arrow"],
    "remote arrow compressed": WRITERS["arrow compressed"],
    "remote arrow bytes": RECORDS["arrow bytes"],
    "remote tfrecord": RECORDS["tfrecord"],
    "remote tar": RECORDS["tar"],
    "dataset": (".arrow", lambda path: write_stream(path, of_bytes=True)),
    "image jpeg": (".jpg", lambda path: write_image(path)),
    "image png": (".png", lambda path: write_image(path)),
    "image webp": (".webp", lambda path: write_image(path)),
    "image gif": (".gif", lambda path: write_image(path)),
    "image bmp": (".bmp", lambda path: write_image(path)),
    "image tiff": (".tiff", lambda path: write_image(path)),
    "image ppm": (".ppm", lambda path: write_image(path)),
    "image avif": (".avif", lambda path: write_image(path)),
    "manifest": (".conversion", lambda path: write_manifest(path)),
    "log": (".csv", lambda path: write_log(path)),
    "cache": (".block", write_block),
    "lane files": (".lanes", write_lanes),
    "lane file": (".lanes", write_lane),
}
FILES = {**WRITERS, **RECORDS, **OTHERS}
STATES = ("rows state", "lanes state", "mixture state")
CALLS = ("variables", "address", "greeting")
FORMATS = (*FILES, *STATES, *CALLS)
