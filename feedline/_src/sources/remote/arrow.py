"""Arrow files and streams in stores: all metadata are fetched at once, record batches when they are read."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.sources.encoded.table_files import kinds_of
from feedline._src.sources.formats import arrow, extras
from feedline._src.sources.formats.arrow_columns import naming_file, rows_of, spec_of
from feedline._src.sources.formats.grouped_file import MOST_ROWS, Group, GroupedFile
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.opening import digest_of, readable
from feedline._src.sources.formats.table_file import Columns, TableFile, column_of, names_with_bytes
from feedline._src.sources.remote import arrow_stream
from feedline._src.sources.remote.flatbuffer import Table
from feedline._src.stores.remote_object import RemoteObject

_MARK = b"ARROW1"
_TAIL = struct.Struct("<i6s")  # size of the footer, mark
_TAIL_BYTES = 1 << 16
"""Of the end of an object, fetched at once: most footers are smaller."""
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
_FOOTER_BATCHES, _MESSAGE_HEADER, _BATCH_ROWS, _BATCH_COMPRESSION = 3, 2, 0, 3  # fields of the tables of Arrow


class ArrowObject:
    """The metadata of an Arrow file in a store.

    Attributes:
      is_stream: whether it is a stream, and no file.
      blocks: offset, size of the metadata and size of the body of each record batch.
      lengths: rows of each record batch.
      compressed: whether any record batch is.
      outline: as large as the object, zero but for the metadata. pyarrow finds in it where buffers lie.
    """

    def __init__(self, item: RemoteObject) -> None:
        with naming_file(item, "an Arrow file", arrow.REWRITE):
            try:
                self._read(item)
            except (struct.error, IndexError) as error:
                raise ValueError(f"its metadata are damaged ({error})") from error

    def _read(self, item: RemoteObject) -> None:
        tail_at = max(0, item.size - _TAIL_BYTES)
        begin, tail = item.samples([(0, len(_MARK) + 2), (tail_at, _TAIL_BYTES)])
        self.is_stream = begin.startswith(arrow_stream.MARK)
        if self.is_stream:
            self._read_stream(item)
            return
        if not begin.startswith(_MARK):
            raise ValueError("it does not begin as an Arrow file")
        size, mark = _TAIL.unpack(tail[-_TAIL.size :])
        at = item.size - _TAIL.size - size
        if mark != _MARK or size < 0 or at < len(begin):
            raise ValueError("it does not end as an Arrow file")
        (footer,) = item.samples([(at, item.size - at)]) if at < tail_at else (tail[at - tail_at :],)
        self.blocks = _blocks(footer, item.size)
        spots = [(int(block["offset"]), int(block["metadata"])) for block in self.blocks]
        messages = item.samples(spots)
        self._note(messages)
        self._draw(item, [(0, begin), (at, footer), *zip([start for start, _ in spots], messages, strict=True)])

    def _read_stream(self, item: RemoteObject) -> None:
        found = arrow_stream.messages_of(item)
        self.blocks = np.array([(at, len(data), 0, body) for at, data, body in found[1:]], _BLOCK)
        self._note([data for _, data, _ in found[1:]])
        if self.compressed:
            raise ValueError("it is a compressed stream, which has no index of its record batches")
        end = (item.size - len(arrow_stream.END), arrow_stream.END)
        self._draw(item, [*((at, data) for at, data, _ in found), end])

    def _note(self, messages: Sequence[bytes]) -> None:
        batches = [_batch(message) for message in messages]
        self.lengths = [_rows(batch) for batch in batches]
        if min(self.lengths, default=0) < 0 or sum(self.lengths) > MOST_ROWS:
            raise ValueError(f"its record batches promise {min(self.lengths)} to {max(self.lengths)} rows")
        self.compressed = any(batch.field(_BATCH_COMPRESSION) is not None for batch in batches)

    def _draw(self, item: RemoteObject, parts: Sequence[tuple[int, bytes]]) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, item.size, flags=flags)  # only pages that are written take memory
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux: and small ones
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.outline = np.frombuffer(memory, np.uint8)
        for start, data in parts:
            self.outline[start : start + len(data)] = np.frombuffer(data, np.uint8)


def _blocks(footer: bytes, size: int) -> npt.NDArray[Any]:
    """The record batches of a file of that size, by its footer."""
    at = Table.root(footer).target(_FOOTER_BATCHES)
    (count,) = struct.unpack_from("<I", footer, at)
    if count * _BLOCK.itemsize > len(footer) - at - 4:
        raise ValueError(f"its footer promises {count} record batches, and is too short for them")
    blocks = np.frombuffer(footer, _BLOCK, count, at + 4)
    parts = [blocks[name].astype(object) for name in ("offset", "metadata", "body")]  # no overflow
    outside = not all((part >= 0).all() for part in parts) or (np.sum(parts, axis=0) > size).any()
    if outside or sum(parts[1].tolist()) > size:  # all metadata are fetched at once
        raise ValueError("its footer names bytes outside of it, or some twice")
    return blocks


def _batch(message: bytes) -> Table:
    start = 8 if message[:4] == b"\xff\xff\xff\xff" else 4  # the mark of a continuation, and the size
    found = Table.root(message[start:])
    return Table(found.data, found.target(_MESSAGE_HEADER))


def _rows(batch: Table) -> int:
    at = batch.field(_BATCH_ROWS)
    return 0 if at is None else int(struct.unpack_from("<q", batch.data, at)[0])


def mapped(item: RemoteObject, options: OpenOptions) -> list[dict[str, Any]] | None:
    """The record batches as views of the object, as `arrow.mapped`; None if it is compressed or has nulls."""
    found = ArrowObject(item)
    if found.compressed:
        return None
    outline, memory = found.outline, np.frombuffer(item.memory, np.uint8)
    with naming_file(item, "an Arrow file", arrow.REWRITE):
        schema, batches = arrow.batches_of(outline)
        spec = spec_of(schema, options, item)
        start = outline.ctypes.data

        def view(buffer: Any) -> Any:
            return memory[buffer.address - start :][: buffer.size]

        def copy(buffer: Any) -> Any:
            return np.frombuffer(item.read(buffer.address - start, buffer.size), np.uint8)

        trees: list[dict[str, Any]] = []
        for batch in batches:
            batch.validate()  # invalid lengths would make pyarrow abort the process
            columns = {name: batch.column(name) for name in spec}
            if any(each.buffers()[0] is not None for column in columns.values() for each in _nested(column)):
                return None
            buffers = [b for column in columns.values() for b in column.buffers() if b is not None and b.size]
            if not all(0 <= b.address - start <= len(outline) - b.size for b in buffers):
                return None  # pyarrow has copied them, as it does with misaligned ones
            trees.append({})
            for name, column in columns.items():  # booleans are unpacked, so their bytes must be there
                has_bits = extras.require("pyarrow", "arrow").types.is_boolean(_nested(column)[-1].type)
                trees[-1][name] = rows_of(column, f"column {name!r}", copy if has_bits else view).values
    return trees or [{name: np.empty((0, *row.shape), row.dtype) for name, row in spec.items()}]


def _nested(column: Any) -> list[Any]:
    """A column, the values of its lists, and so on. Where it has no nulls, it has no buffer that says where."""
    pyarrow = extras.require("pyarrow", "arrow")
    found = [column]
    while True:
        if isinstance(found[-1].type, pyarrow.BaseExtensionType):
            found[-1] = found[-1].storage
        if not pyarrow.types.is_fixed_size_list(found[-1].type):
            break
        found.append(found[-1].values)
    return found


def _reader(item: RemoteObject, schema: Any, names: Sequence[str]) -> Any:
    """A reader of some columns."""
    ipc = extras.require("pyarrow.ipc", "arrow")
    fields = sorted(schema.get_field_index(name) for name in names)
    return ipc.open_file(readable(item), options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))


def _columns(
    item: RemoteObject, schema: Any, names: Sequence[str], group: int, extent: tuple[int, int], is_stream: bool
) -> Any:
    """A record batch with some of its columns. Its blocks are fetched together."""
    item.fetch_parts([extent])
    if is_stream:
        ipc, pyarrow = extras.require("pyarrow.ipc", "arrow"), extras.require("pyarrow", "arrow")
        batch = ipc.read_record_batch(ipc.read_message(pyarrow.py_buffer(item.read(*extent))), schema)
    else:
        batch = _reader(item, schema, names).get_batch(group)
    batch.validate()  # invalid lengths would make pyarrow abort the process
    return batch


def grouped(item: RemoteObject, options: OpenOptions) -> GroupedFile:
    """The record batches, each of which is read when it is needed, as `arrow.grouped`."""
    found = ArrowObject(item)
    schema, _ = arrow.batches_of(found.outline)
    spec = spec_of(schema, options, item)
    names = sorted(spec)
    blocks, is_stream = found.blocks, found.is_stream  # the outline is not kept

    def extent(leaf: int, group: int) -> tuple[int, int]:
        block = blocks[group]
        return int(block["offset"]), int(block["metadata"]) + int(block["body"])

    def read(leaf: int, group: int) -> Group:
        batch = _columns(item, schema, [names[leaf]], group, extent(leaf, group), is_stream)
        return rows_of(batch.column(names[leaf]), f"column {names[leaf]!r}")

    return GroupedFile(
        spec, [found.lengths] * len(names), read, lambda _: digest_of(item), lambda *at: [extent(*at)]
    )


def table(item: RemoteObject, options: OpenOptions) -> TableFile | None:
    """The record batches as `table_files.arrow_file` has them; None if no chosen column holds bytes."""
    found = ArrowObject(item)
    with naming_file(item, "an Arrow file", arrow.REWRITE):
        schema, _ = arrow.batches_of(found.outline)
    names = names_with_bytes(schema, options, item)
    if not names:
        return None
    blocks, is_stream = found.blocks, found.is_stream  # the outline is not kept

    def extents(group: int) -> list[tuple[int, int]]:
        block = blocks[group]
        return [(int(block["offset"]), int(block["metadata"]) + int(block["body"]))]

    def read(group: int) -> Columns:
        batch = _columns(item, schema, names, group, extents(group)[0], is_stream)
        return Columns({name: column_of(batch.column(name), f"column {name!r}") for name in names})

    return TableFile(kinds_of(schema, names, item), found.lengths, read, extents=extents)
