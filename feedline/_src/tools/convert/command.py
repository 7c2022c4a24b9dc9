"""The `feedline convert` command and its options."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from typing import Annotated, Any, Literal

import tyro

from feedline._src.tools.cli.interrupt import Terminated


@dataclasses.dataclass(frozen=True)
class Convert:
    """Write the rows of any source as files that can be read fast, and compare them with the source.

    Row i of the result is row i of the source, with the same shapes and dtypes. Each file is read back. Files are
    written to DESTINATION.partial, which is renamed once all files are finished. To continue after a stop, run the
    same command again: finished files are kept.

        feedline convert 'raw/*.parquet' rows --format npy --workers 8

    Attributes:
      source: a path or glob of files with rows; or module:name, which is imported from the current folder and is
        a source or a function without arguments that returns one.
      destination: a new folder.
      columns: names of the leaves to convert, separated by commas. None: all leaves.
      dtype: dtype of an element of a .bin file, or of an ArrayRecord record, such as uint16; for several fields, a
        Python list such as "[('image', 'uint8', (32, 32, 3)), ('label', 'int32')]".
      window: rows are windows of this many adjacent elements (tokens) of a .npy, .npz or .bin file.
      format: file format. None: npy for arrays, array_record for bytes, parquet for several fields with bytes.
      rows_per_shard: rows of each file. None: about 256 MB per file, or more so that there are at most 512 files.
      workers: processes that convert. 0: only this process.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    destination: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DESTINATION")]
    columns: str | None = None
    dtype: str | None = None
    window: int | None = None
    format: Literal["array_record", "npy", "parquet", "zarr"] | None = None
    rows_per_shard: int | None = None
    workers: int = 0

    def run(self) -> int:
        """Convert, and print how to open the result. Returns the exit code.

        Raises:
          ValueError, TypeError, OSError: an option is wrong, or the result cannot be written.
          FeedError: a row cannot be read, or differs from the source's row when it is read back.
          KeyboardInterrupt, Terminated: Ctrl-C, SIGTERM; the message says how to continue.
        """
        from rich.console import Console
        from rich.progress import track

        from feedline._src.listen.words import counted
        from feedline._src.tools.convert.convert import Conversion
        from feedline._src.tools.convert.formats import open_line

        console = Console(stderr=True)
        hidden = not console.is_terminal
        with contextlib.closing(self._opened()) as source:
            conversion = Conversion.of(source, self.destination, self.format, self.rows_per_shard)
            with contextlib.closing(conversion.run(self.workers)) as steps:
                try:
                    kept = next(steps)
                    left = conversion.shards - kept
                    for _ in track(steps, "converting", left, console=console, transient=True, disable=hidden):
                        pass
                except (KeyboardInterrupt, Terminated) as end:
                    how = str(end) or "interrupted"
                    end.args = (
                        f"{how}; finished files are in {conversion.folder}; run the same command to continue",
                    )
                    raise
        grouped = conversion.format in ("parquet", "zarr")
        groups = f", in groups of {conversion.rows_per_chunk:,}" if grouped else ""
        earlier = f" ({kept:,} by an earlier run)" if kept else ""
        rows, files = counted(conversion.count, "row"), counted(conversion.shards, "file")
        print(f"{rows} in {files}{earlier}{groups}, written and read back; open them with")
        print(
            open_line(conversion.pattern(conversion.destination), conversion.format, conversion.rows.dtype),
            flush=True,
        )
        return 0

    def _opened(self) -> Any:
        from feedline._src.sources.open_source import open_source
        from feedline._src.tools.cli.options import is_name, load_name, open_options
        from feedline._src.tools.convert.convert import open_any

        options = open_options(self.source, self.columns, self.dtype, self.window)
        if not is_name(self.source):
            return open_source(self.source, **options)
        named = load_name(self.source)
        return open_any(named() if inspect.isroutine(named) else named)
