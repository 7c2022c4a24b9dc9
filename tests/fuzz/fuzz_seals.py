"""Mutations of bytes that a checksum protects. The checksum is corrected, so that readers get past it."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import tarfile
import zipfile
import zlib

from fuzz_mutations import Change, mutated, mutated_json

_BLOCK = 512
_CHECKSUM = slice(148, 156)  # of a tar header


def npz(data: bytes, chance: random.Random) -> bytes:
    """Mutate a member of a zip archive and write the archive anew, sometimes with a wrong size of a member."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {member.filename: archive.read(member) for member in archive.infolist()}
        how = archive.infolist()[0].compress_type
    name = chance.choice(sorted(members))
    members[name] = mutated(members[name], chance)
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", chance.choice((how, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))) as archive:
        for each, content in members.items():
            archive.writestr(each, content)
        if chance.random() < 0.3:
            archive.infolist()[0].file_size = chance.choice((0, 1 << 20, 1 << 31, 1 << 40, (1 << 63) - 1))
    return written.getvalue()


def tar(data: bytes, chance: random.Random) -> bytes:
    """Mutate one or two headers of a tar archive, and correct their checksums."""
    blocks = [data[at : at + _BLOCK] for at in range(0, len(data), _BLOCK)]
    headers = [i for i, block in enumerate(blocks) if block[257:262] == b"ustar"]
    for i in chance.sample(headers, min(len(headers), chance.choice((1, 1, 2)))):
        header = bytearray(blocks[i])
        for _ in range(chance.choice((1, 1, 2))):
            _change_field(header, chance)
        header[_CHECKSUM] = b"        "
        header[_CHECKSUM] = b"%06o\0 " % sum(header)
        blocks[i] = bytes(header)
    return b"".join(blocks)


def _change_field(header: bytearray, chance: random.Random) -> None:
    start, size = chance.choice(((0, 100), (124, 12), (124, 12), (156, 1), (156, 1), (157, 100), (345, 155)))
    names = (b"../../x.png\0", b"/x.png\0", b"a/../b.x\0", b".x\0", b"\xff.x\0", b"\0" * size, b"x" * size)
    sizes = (
        b"7" * 11 + b"\0",
        b"-7777777777\0",
        b"\x80" + b"\xff" * 11,
        b"\xff" * 12,
        b"\x80" + bytes(10) + b"\1",
    )
    types = tuple(b"0123456789LKxgSXVDMN\0"[i : i + 1] for i in range(21))
    values = {12: sizes, 1: types}.get(size, names)
    value = chance.choice((*values, chance.randbytes(size)))[:size]
    header[start : start + len(value)] = value


def tar_extended(data: bytes, chance: random.Random) -> bytes:
    """An archive with an extended header (PAX, GNU) of arbitrary records before its members."""
    keys = (
        "size", "path", "linkpath", "GNU.sparse.major", "GNU.sparse.minor", "GNU.sparse.map", "GNU.sparse.size",
        "GNU.sparse.realsize", "GNU.sparse.name", "GNU.sparse.numblocks", "hdrcharset", "mtime", "x",
    )  # fmt: skip
    values = (
        "0", "1", "-1", "9" * 20, "9" * 5000, "0,1", "1,2,3", "x", "", "../x.y", "1.5", "nan", "inf", "BINARY",
    )  # fmt: skip
    records = b""
    for _ in range(chance.choice((1, 2, 3))):
        record = f"{chance.choice(keys)}={chance.choice(values)}\n".encode()
        length = len(record) + 1
        length += len(str(length + len(str(length))))
        records += f"{chance.choice((length, length, length, 0, -5, 1 << 40))} ".encode() + record
    header = tarfile.TarInfo("x")
    header.type = chance.choice((b"x", b"g", b"L", b"K", b"S"))
    header.size = chance.choice((len(records), len(records), 1 << 30, 8 << 30))
    with contextlib.suppress(ValueError):
        return header.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % _BLOCK) + data
    return header.tobuf(tarfile.GNU_FORMAT) + records + bytes(-len(records) % _BLOCK) + data


def any_tar(data: bytes, chance: random.Random) -> bytes:
    """Mutate by `tar` or by `tar_extended`."""
    return chance.choice((tar, tar_extended))(data, chance)


def tfrecord(data: bytes, chance: random.Random) -> bytes:
    """Change the length of a record, with the right checksum."""
    import google_crc32c

    starts, at = [], 0
    while at < len(data):
        starts.append(at)
        at += 16 + int.from_bytes(data[at : at + 8], "little")
    at = chance.choice(starts)
    sizes = (0, 1, len(data), len(data) - at - 16, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1, chance.getrandbits(9))
    length = chance.choice(sizes).to_bytes(8, "little")
    crc = google_crc32c.value(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return data[:at] + length + masked.to_bytes(4, "little") + data[at + 12 :]


def index(data: bytes, chance: random.Random) -> bytes:
    """Change values of an index, with the right checksums."""
    line, _, payload = data.partition(b"\n")
    text = line.partition(b" ")[2]
    if chance.random() < 0.5:
        places = bytearray(payload)
        at = chance.randrange(len(payload) // 8) * 8
        value = chance.choice((0, -1, 1, 1 << 20, 1 << 62, -(1 << 63), (1 << 63) - 1, chance.getrandbits(12)))
        struct.pack_into("<q", places, at, value)
        payload = bytes(places)
        old = b'"crc32": %d' % zlib.crc32(data.partition(b"\n")[2])
        text = text.replace(old, b'"crc32": %d' % zlib.crc32(payload))
    else:
        text = mutated_json(text, chance)
    text += b"\n"
    return b"%08x " % zlib.crc32(text) + text + payload


SEALS: dict[str, Change] = {
    "npy compressed archive resealed": npz,
    "tar resealed": any_tar,
    "tfrecord resealed": tfrecord,
    "tfrecord index resealed": index,
    "tar index resealed": index,
    "jsonl index resealed": index,
}
