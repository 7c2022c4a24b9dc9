"""Splits the output of a process into whole lines, each prefixed with the index of the process."""

from __future__ import annotations

from collections import deque

_MAX_BYTES = 1 << 16
_REMEMBERED = 20


class Lines:
    """Splits the chunks that one process writes to one stream into prefixed lines.

    An incomplete line is kept until its end comes, up to 64 KiB.

    Example:
      >>> lines = Lines(2)
      >>> lines.add(b"step 1\\nste")
      b'[2] step 1\\n'
      >>> lines.add(b"p 2"), lines.end()
      (b'', b'[2] step 2\\n')
    """

    def __init__(self, process: int, last: deque[bytes] | None = None) -> None:
        """`last` collects the newest lines; the two streams of a process may share it."""
        self.last = recent_lines() if last is None else last
        self._prefix = b"[%d] " % process
        self._incomplete = b""  # Holds no line end, and at most _MAX_BYTES bytes.

    def add(self, chunk: bytes) -> bytes:
        """The lines that `chunk` completes, with their prefixes."""
        *whole, rest = (self._incomplete + chunk).split(b"\n")
        while len(rest) > _MAX_BYTES:
            whole.append(rest[:_MAX_BYTES])
            rest = rest[_MAX_BYTES:]
        self._incomplete = rest
        return self._prefixed(whole)

    def end(self) -> bytes:
        """The last line with its prefix, if it was incomplete."""
        whole, self._incomplete = ([self._incomplete] if self._incomplete else []), b""
        return self._prefixed(whole)

    def _prefixed(self, lines: list[bytes]) -> bytes:
        prefixed = [b"%b%b\n" % (self._prefix, line) for line in lines]
        self.last.extend(prefixed)
        return b"".join(prefixed)


def recent_lines() -> deque[bytes]:
    """An empty buffer for the newest lines of a process."""
    return deque(maxlen=_REMEMBERED)
