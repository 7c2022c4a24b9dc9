"""Reading of FlatBuffers, in which the metadata of Arrow are stored."""

from __future__ import annotations

import struct


class Table:
    """A table of a FlatBuffer: https://flatbuffers.dev/internals. Damage is a struct.error or an IndexError."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]

    @classmethod
    def root(cls, data: bytes) -> Table:
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def field(self, number: int) -> int | None:
        """Where a field lies; None if it has its default value."""
        if self._fields < 0 or 4 + 2 * number >= struct.unpack_from("<H", self.data, self._fields)[0]:
            return None
        offset = struct.unpack_from("<H", self.data, self._fields + 4 + 2 * number)[0]
        return self.at + offset if offset else None

    def target(self, number: int) -> int:
        """Where lies what a field refers to."""
        at = self.field(number)
        if at is None:
            raise ValueError("its metadata lack a part")
        return at + int(struct.unpack_from("<I", self.data, at)[0])

    def number(self, number: int, form: str) -> int:
        """A field that is a number; 0 if it has its default value."""
        at = self.field(number)
        return 0 if at is None else int(struct.unpack_from(form, self.data, at)[0])
