"""The `feedline inspect` command and its options."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from feedline._src.tools.cli.options import MAX_CPU_DEVICES, is_name, load_name, open_options, use_cpu_devices
from feedline._src.tools.cli.terminal import printable

if TYPE_CHECKING:
    from feedline._src.feed_options import FeedOptions
    from feedline._src.tools.inspect.target import Target

_MAX_DEVICES = 1 << 20  # of a mesh that need not exist; the description takes seconds for this many


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Describe a source, and a feed of it on any mesh.

    The mesh need not exist. The command prints the number of rows, the shape and dtype of each leaf, and the first
    rows; which process reads which rows, and what each device holds; the memory, with its formula; the steps of an
    epoch, the rows that are left out or padded, and batch sizes that fit. It reads only the first rows. Exit code
    1: a feed refuses these options; the reason is printed first, with a change that works.

        feedline inspect 'rows/*.npy' --mesh data=32,model=2 --processes 8

    Attributes:
      source: a path or glob of files with rows; or module:name, which is imported from the current folder and is
        a source that feedline.Feed takes, or a function make_feed(mesh) that builds a feedline.Feed over the mesh.
      mesh: names and sizes of the mesh axes, such as data=4,model=2; make_feed gets a mesh of CPU devices.
        Empty: data=N for the N devices that JAX finds, and for module:name also model=1.
      spec: the PartitionSpec of the batch, such as data+fsdp,None,model. Each entry is for one axis of a leaf: a
        mesh axis, mesh axes joined by +, or None. Leaves with fewer axes use the first entries. Empty: the first
        mesh axis. make_feed has its own shardings.
      processes: the number of processes that divide the devices equally, in the order of jax.devices().
      batch_size: rows in the global batch. None: make_feed's own, or 8 for each shard.
      remainder: what to do with rows that do not fill a batch. None: make_feed's own, or drop.
      prefetch: placed batches that are kept ready. None: make_feed's own, or 2.
      buffer: host batches that are read ahead. None: make_feed's own, or 2.
      columns: for a path, the names of the leaves to read, separated by commas. None: all of them.
      dtype: dtype of an element of a .bin file, or of an ArrayRecord record, such as uint16; for several fields, a
        Python list such as "[('image', 'uint8', (32, 32, 3)), ('label', 'int32')]".
      window: each row is a window of this many adjacent elements (tokens) of a .npy, .npz or .bin file.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    mesh: str = ""
    spec: str = ""
    processes: int = 1
    batch_size: int | None = None
    remainder: Literal["drop", "pad", "wrap"] | None = None
    prefetch: int | None = None
    buffer: int | None = None
    columns: str | None = None
    dtype: str | None = None
    window: int | None = None

    def run(self) -> int:
        """Describe and print. Returns the exit code."""
        target = self.target()
        from rich.console import Console

        from feedline._src.tools.inspect.show import show

        show(printable(self.source), target, Console())
        return 1 if target.plan.problems else 0

    def target(self) -> Target:
        """Plan the feed to describe. If `make_feed` fails, its error is raised, unless the plan lists problems."""
        axes = parse_mesh(self.mesh) if self.mesh else None
        if axes is not None and is_name(self.source):  # first, since importing the module may use devices
            _use_devices(math.prod(axes.values()))
        # by default JAX would take most memory of the accelerators, which a training job may be using
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        if axes is None:
            axes = {"data": len(jax.devices()), **({"model": 1} if is_name(self.source) else {})}
        target = self._over(axes)
        if target.refusal is not None and not target.plan.problems:
            raise target.refusal
        return target

    def _over(self, axes: dict[str, int]) -> Target:
        from feedline._src.sources.open_source import open_source
        from feedline._src.tools.inspect.target import of_feed, of_source

        given = open_options(self.source, self.columns, self.dtype, self.window)
        named: Any = self.source
        if is_name(named):
            named = load_name(named)
        elif given:
            named = open_source(named, **given)
        if not callable(named):
            entries = parse_spec(self.spec, axes) if self.spec else [*axes][:1]
            return of_source(named, axes, entries, self.processes, self._changed)
        if self.spec:
            raise ValueError(
                f"--spec is for a path or a source; {self.source} shards the batch itself. Leave --spec out"
            )
        return of_feed(self.source, named, axes, self.processes, self._changed)

    def _changed(self, options: FeedOptions) -> FeedOptions:
        """Apply the options of the command line to those of the feed."""
        given: dict[str, Any] = {name: getattr(self, name) for name in ("batch_size", "remainder", "prefetch")}
        if self.buffer is not None:
            given["reading"] = dataclasses.replace(options.reading, buffer=self.buffer)
        return dataclasses.replace(options, **{name: value for name, value in given.items() if value is not None})


def _use_devices(count: int) -> None:
    """Make JAX run on `count` CPU devices, unless it already has at least `count` devices."""
    if count > MAX_CPU_DEVICES:
        raise ValueError(
            f"--mesh may have at most {MAX_CPU_DEVICES:,} devices for module:name, got {count:,}; divide three "
            "numbers by the same factor: --processes, --batch-size, and the size of the mesh axis that splits the "
            "rows; then the rows of each process stay the same"
        )
    if "jax" in sys.modules:
        import jax

        if len(jax.devices()) >= count:
            return
    use_cpu_devices(count)


def parse_mesh(text: str) -> dict[str, int]:
    """{axis: size} of a mesh.

    Example:
      >>> parse_mesh("data=4,model=2")
      {'data': 4, 'model': 2}
    """
    parts = [re.fullmatch(r"\s*([^\W\d]\w*)\s*=\s*(\d+)\s*", part) for part in text.split(",")]
    axes = {part[1]: int(part[2]) for part in parts if part and int(part[2])}
    if len(axes) < len(parts):
        raise ValueError(
            f"--mesh takes names of different axes and their sizes, as in data=4,model=2, got {text!r}"
        )
    if math.prod(axes.values()) > _MAX_DEVICES:
        raise ValueError(f"--mesh may have at most {_MAX_DEVICES:,} devices, got {text!r}")
    return axes


def parse_spec(text: str, axes: Mapping[str, int]) -> tuple[Any, ...]:
    """The entries of the PartitionSpec of a batch, one for each axis of a leaf.

    Example:
      >>> parse_spec("data+fsdp,None,model", {"data": 2, "fsdp": 2, "model": 2})
      (('data', 'fsdp'), None, 'model')
    """
    entries = [tuple(name.strip() for name in part.split("+")) for part in text.split(",")]
    used = [name for names in entries for name in names if names != ("None",)]
    wrong = [name for name in used if name not in axes or used.count(name) > 1]
    if wrong:
        raise ValueError(
            f"--spec takes, for each axis of a leaf, None or axes of the mesh, and each mesh axis only once; got "
            f"{wrong[0]!r} in {text!r}; the mesh has {', '.join(axes)}"
        )
    return tuple(None if names == ("None",) else names if len(names) > 1 else names[0] for names in entries)
