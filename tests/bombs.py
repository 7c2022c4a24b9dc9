"""Small files that claim to hold gigabytes, or expand to them. Reads each under a memory limit, prints the result.

tests/test_security.py runs this program once for all files.
"""

import io
import json
import resource
import struct
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import h5py
import jax
import numpy as np
import pyarrow
import pyarrow.feather

import feedline

LIMIT_BYTES = 6 << 30
FOLDER = Path(sys.argv[1])


def deflated(size, bits=15):
    """`size` zero bytes, compressed."""
    compressor = zlib.compressobj(6, zlib.DEFLATED, bits)
    zeros = bytes(1 << 24)
    parts = [compressor.compress(zeros[: min(len(zeros), size - at)]) for at in range(0, size, len(zeros))]
    return b"".join(parts) + compressor.flush()


def npz_member_that_expands(path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (64,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x.npy", "w") as member:
        member.write(header.getvalue())
        for _ in range(16):
            member.write(bytes(1 << 24))


def npz_directory_that_promises(path):
    header = io.BytesIO()
    shape = ((1 << 44) - 128,)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.infolist()[0].file_size = 1 << 44


def tfrecord_of_2_to_63_bytes(path):
    import google_crc32c

    length = (1 << 63).to_bytes(8, "little")
    crc = google_crc32c.value(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    path.write_bytes(length + masked.to_bytes(4, "little") + bytes(100))


def tar_with_header(path, kind, size, pax=None):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        header = tarfile.TarInfo("0.x")
        header.pax_headers = pax or {}
        archive.addfile(header)
        huge = tarfile.TarInfo("1.x")
        huge.type, huge.size = kind, size
        archive.fileobj.write(huge.tobuf(tarfile.GNU_FORMAT))
        archive.fileobj.write(bytes(2048))


def tar_sparse(path):
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 60)}
    tar_with_header(path, tarfile.REGTYPE, 0, {**sparse, "GNU.sparse.name": "0.x"})


def hdf5(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (64, 1 << 42), np.int32, chunks=(1, 1 << 20), compression="gzip")


def arrow_buffer_that_promises(path):
    table = pyarrow.table({"x": np.zeros(4096, np.int64)})
    pyarrow.feather.write_feather(table, path, compression="zstd")
    data = path.read_bytes()
    promise = struct.pack("<q", 4096 * 8)
    assert promise in data
    path.write_bytes(data.replace(promise, struct.pack("<q", 1 << 44)))


def zarr(path, compressor, data):
    path.mkdir()
    metadata = {"zarr_format": 2, "shape": [64], "chunks": [64], "dtype": "<i4", "compressor": compressor,
                "fill_value": 0, "order": "C", "filters": None}  # fmt: skip
    (path / ".zarray").write_text(json.dumps(metadata))
    (path / "0").write_bytes(data)


def png(path, side=30_000):
    """900 million black pixels, one bit each."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    pixels = deflated(side * (side // 8 + 1))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def gif(path, side=30_000):
    image = struct.pack("<4HB", 0, 0, side, side, 0) + b"\x02\x02\x4c\x01\x00"
    path.write_bytes(b"GIF89a" + struct.pack("<HHBBB6x", side, side, 0x80, 0, 0) + b"," + image + b";")


def avif(path, side=30_000):
    import cv2

    data = bytearray(cv2.imencode(".avif", np.zeros((64, 64, 3), np.uint8))[1].tobytes())
    at = data.index(b"ispe") + 8
    data[at : at + 8] = struct.pack(">II", side, side)
    path.write_bytes(data)


BOMBS = {
    "a.npz": npz_member_that_expands,
    "b.npz": npz_directory_that_promises,
    "a.tfrecord": tfrecord_of_2_to_63_bytes,
    "size.tar": lambda path: tar_with_header(path, tarfile.REGTYPE, 1 << 60),
    "longname.tar": lambda path: tar_with_header(path, tarfile.GNUTYPE_LONGNAME, 1 << 60),
    "pax.tar": lambda path: tar_with_header(path, tarfile.XHDTYPE, 1 << 60),
    "paxsize.tar": lambda path: tar_with_header(path, tarfile.REGTYPE, 0, {"size": str(1 << 62)}),
    "sparse.tar": tar_sparse,
    "wide.h5": hdf5,
    "a.arrow": arrow_buffer_that_promises,
    "zlib.zarr": lambda path: zarr(path, {"id": "zlib", "level": 1}, deflated(1 << 28)),
    "a.png": png,
    "a.gif": gif,
    "a.avif": avif,
}


def read(path):
    if path.suffix in (".png", ".gif", ".avif"):
        from feedline._src.images import ImageDecoder
        from feedline._src.sources.decoded import Row

        decode = ImageDecoder(8, "center", False, (0.08, 1.0), (0.75, 4 / 3), False, None, None)
        decode(path.read_bytes(), {"image": np.zeros((8, 8, 3), np.uint8)}, Row(0, 0, 0, 7))
        return
    source = feedline.open_source(path)
    if hasattr(source, "records"):
        source.records(np.arange(2))
        return
    out = jax.tree.map(lambda leaf: np.zeros((2, *leaf.shape), leaf.dtype), source.spec)
    source.read(np.arange(2), out)


def memory_kib(name):
    """VmRSS: the memory in use. VmHWM: the most memory in use since VmHWM was reset."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1])


for name, write in BOMBS.items():
    write(FOLDER / name)
resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
for name in BOMBS:
    files = [FOLDER / name] if (FOLDER / name).is_file() else list((FOLDER / name).rglob("*"))
    size, before = sum(file.stat().st_size for file in files), memory_kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    try:
        read(FOLDER / name)
        found = "read"
    except (ValueError, TypeError, feedline.FeedError) as error:
        found = f"{type(error).__name__}: {error}"[:500]
    print(
        json.dumps(
            {"bomb": name, "bytes": size, "grown_mib": (memory_kib("VmHWM") - before) >> 10, "found": found}
        ),
        flush=True,
    )
