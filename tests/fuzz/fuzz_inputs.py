"""The inputs of `fuzz.py`: small valid files of every format."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "formats"))

from fuzz_seals import SEALS
from written_formats import CASES, X, write_zarr


class Outcome(NamedTuple):
    """What became of an input: one of `fuzz.EXPECTED`, or one that refutes; and the error, if there is one."""

    kind: str
    detail: str = ""


VALUES = [b"", *(np.random.default_rng(1).bytes(length) for length in range(1, 300, 5))]
"""The files of a folder, and the bytes of a block of the cache."""


def write_dataset(path: Path) -> None:
    """A stream, as `datasets` stores its rows."""
    CASES["arrow stream text"].write(path, slice(None))


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
_INNER = {
    "chunk_shape": [5, 3],
    "codecs": [_BYTES, {"name": "gzip", "configuration": {"level": 1}}],
    "index_codecs": [_BYTES, {"name": "crc32c"}],
}
ZARRS: dict[str, tuple[int, dict[str, Any]]] = {
    "zarr zlib": (2, {"compressor": {"id": "zlib", "level": 1}}),
    "zarr blosc": (2, {"compressor": {"id": "blosc", "cname": "lz4"}}),
    "zarr zstd": (3, {"codecs": [_BYTES, {"name": "zstd"}]}),
    "zarr shards": (3, {"codecs": [{"name": "sharding_indexed", "configuration": _INNER}]}),
}


def _zarr_case(version: int, metadata: dict[str, Any]) -> Any:
    def write(path: Path, rows: slice) -> None:
        write_zarr(path, X[rows], version, metadata=metadata)

    return dataclasses.replace(CASES["zarr"], write=write)


def _written(case: Any) -> tuple[str, Callable[[Path], Any]]:
    return case.suffix, lambda path: case.write(path, slice(None))


ALL_CASES = {**CASES, **{name: _zarr_case(*how) for name, how in ZARRS.items()}}
RESEALED = {kind: kind.removesuffix(" resealed").removesuffix(" index") for kind in SEALS}
INDEXED = {"tfrecord index": "tfrecord", "tar index": "tar", "jsonl index": "jsonl"}
OF_FORMATS = {
    **{name: name for name in ALL_CASES},
    **{f"remote {name}": name for name in CASES},
    **INDEXED,
    **RESEALED,
}
"""{kind of input: name of the case whose files are damaged}"""


def write_folder(path: Path) -> None:
    for number, value in enumerate(VALUES):
        file = path / f"{number // 32}" / f"{number:03}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value)


def write_block(path: Path) -> None:
    """A block of the cache of stores, whose bytes are `BLOCK`."""
    block = cached_block(path.parent / "made")
    block.write([0], BLOCK)
    path.write_bytes(Path(block.path).read_bytes())


def cached_block(folder: Path) -> Any:
    """The range for the bytes `BLOCK`, of the cache in this folder."""
    from feedline._src.files.cache import Cache
    from feedline._src.files.cached_range import CachedRange
    from feedline._src.files.client import RemoteObject
    from feedline._src.files.file import Version
    from feedline._src.files.store import Url

    stored = RemoteObject(Url("s3://bucket", "block"), Version(len(BLOCK), "tag"), 1.0)
    return CachedRange(Cache(str(folder), 1 << 30), stored, 0, len(BLOCK))


def write_lanes(path: Path) -> None:
    from feedline import save_lanes

    save_lanes(LANES, path)


def write_lane(path: Path) -> None:
    """A single lane: no file of another lane can contradict its file."""
    from feedline import save_lanes

    save_lanes({**LANES, "lanes": {"0": LANES["lanes"]["0"]}, "writers": [0]}, path)


def write_image(path: Path) -> None:
    import cv2

    across = np.linspace(0, 255, 24, dtype=np.uint8)
    image = np.stack([np.tile(across, (20, 1)), np.tile(across[:20, None], (1, 24)), np.full((20, 24), 90)], -1)
    cv2.imwrite(str(path), image.astype(np.uint8))


BLOCK = b"".join(VALUES)
IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tiff", "ppm", "avif")
LANES = {
    "step": 5,
    "position": 40,
    "lanes": {str(lane): {"next_index": 40 + lane, "inner": {"a": [lane]}} for lane in range(3)},
    "writers": [0, 0, 0],
}
OTHERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "folder": (".photos", write_folder),
    "dataset": (".arrow", write_dataset),
    **{f"image {kind}": (f".{kind}", write_image) for kind in IMAGES},
    "cache": (".block", write_block),
    "lane files": (".lanes", write_lanes),
    "lane file": (".lanes", write_lane),
}
FILES = {**{kind: _written(ALL_CASES[case]) for kind, case in OF_FORMATS.items()}, **OTHERS}
"""{kind of input: (suffix of its file, function that writes a valid file)}"""
STATES = ("rows state", "lanes state", "mixture state")
FORMATS = (*FILES, *STATES)
