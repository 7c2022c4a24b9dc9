"""The output of several processes on one screen: whole lines, each after its process."""

from __future__ import annotations

from collections import deque

_LONGEST = 1 << 16
_REMEMBERED = 20


class Lines:
    """Cuts what one process writes to one stream into lines, as it comes.

    A line without an end waits for it, up to 64 KiB.

    Example:
      >>> lines = Lines(2)
      >>> lines.add(b"step 1\\nste")
      b'[2] step 1\\n'
      >>> lines.add(b"p 2"), lines.end()
      (b'', b'[2] step 2\\n')
    """

    def __init__(self, process: int, last: deque[bytes] | None = None) -> None:
        """`last` collects the newest lines; the two streams of a process may share one."""
        self.last = recent() if last is None else last
        self._prefix = b"[%d] " % process
        self._rest = b""  # Holds no line end, and at most _LONGEST bytes.

    def add(self, chunk: bytes) -> bytes:
        """The lines that `chunk` completes, in order, ready to be written."""
        *whole, rest = (self._rest + chunk).split(b"\n")
        while len(rest) > _LONGEST:
            whole.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._rest = rest
        return self._write(whole)

    def end(self) -> bytes:
        """The last line, if it had no end."""
        whole, self._rest = ([self._rest] if self._rest else []), b""
        return self._write(whole)

    def _write(self, whole: list[bytes]) -> bytes:
        written = [b"%b%b\n" % (self._prefix, line) for line in whole]
        self.last.extend(written)
        return b"".join(written)


def recent() -> deque[bytes]:
    """Room for the newest lines of a process."""
    return deque(maxlen=_REMEMBERED)
