"""The `feedline inspect` command and its options."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from feedline._src.tools.cli.options import is_name, use_cpu_devices
from feedline._src.tools.cli.terminal import printable

if TYPE_CHECKING:
    from feedline._src.tools.inspect.description import Description


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Describe a source, and a feed of it on any mesh.

    The mesh need not be there. The command prints the rows, the shape and dtype of each leaf, and the first rows;
    which process reads which rows, and which device holds them; the memory by formula; the steps of an epoch, the
    rows that are left out or padded, and batch sizes that fit. It reads the first rows only. Exit code 1: a feed
    refuses these options; the reason is printed first, with a change that works.

        feedline inspect 'rows/*.npy' --mesh data=32,model=2 --processes 8

    Attributes:
      source: a path or glob of rows; or module:name, found from the current folder, where the name is a source, as
        feedline.Feed takes it, or a function: make_feed(mesh) builds a feedline.Feed over the mesh.
      mesh: names and sizes of the mesh axes, as data=4,model=2, on CPU devices. Empty: the axis data over the
        devices that JAX finds, and for make_feed an axis model of size 1.
      spec: the PartitionSpec of the batch: for each axis of a leaf a mesh axis, several with + between, or None.
        Leaves with fewer axes take the first ones. Empty: the first mesh axis; make_feed has shardings of its own.
      processes: so many processes divide the devices equally, in the order of jax.devices().
      batch_size: rows in the global batch. None: make_feed's own, or 8 for each shard.
      remainder: of rows that do not fill a batch. None: make_feed's own, or drop.
      prefetch: placed batches that wait. None: make_feed's own, or 2.
      buffer: host batches that are read ahead. None: make_feed's own, or 2.
      json: print one line of JSON on standard output, in place of the text.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    mesh: str = ""
    spec: str = ""
    processes: int = 1
    batch_size: int | None = None
    remainder: Literal["drop", "pad", "wrap"] | None = None
    prefetch: int | None = None
    buffer: int | None = None
    json: bool = False

    def run(self) -> int:
        """Describe and print. Returns the exit code.

        Raises:
          ValueError, TypeError, OSError: an option is wrong, or there is no such source.
          FeedError: the first rows cannot be read.
        """
        description = self.description()
        if self.json:
            from feedline._src.tools.inspect.as_json import as_object

            print(json.dumps(as_object(description, self.source)), flush=True)
        else:
            from rich.console import Console

            from feedline._src.tools.inspect.show import show

            show(description, printable(self.source), Console())
        return 1 if description.problems else 0

    def description(self) -> Description:
        """What is printed. Raises as `run`."""
        from feedline._src.tools.inspect import mesh as meshes

        axes = None if not self.mesh else meshes.parse_mesh(self.mesh)
        if axes is not None:
            meshes.check_processes(self.processes, math.prod(axes.values()))
            _use_devices(math.prod(axes.values()))
        # of accelerators that a training uses, JAX would by default take all memory that is left
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax
        import numpy as np

        from feedline._src.tools.inspect.description import describe
        from feedline._src.tools.inspect.resolve import Overrides, resolve

        if axes is None:
            axes = {"data": len(jax.devices()), **({"model": 1} if is_name(self.source) else {})}
            meshes.check_processes(self.processes, len(jax.devices()))
        entries = None if not self.spec else meshes.parse_spec(self.spec, axes)
        devices = jax.devices()[: math.prod(axes.values())]
        mesh = jax.sharding.Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))
        overrides = Overrides(self.batch_size, self.remainder, self.prefetch, self.buffer)
        resolved = resolve(self.source, mesh, entries, overrides)
        description = describe(resolved.contents, resolved.options, mesh, self.processes)
        if resolved.refusal is not None and not description.problems:
            raise resolved.refusal
        return description


def _use_devices(count: int) -> None:
    """Make JAX run on `count` CPU devices, unless it has as many already."""
    if "jax" in sys.modules:
        import jax

        if len(jax.devices()) >= count:
            return
    use_cpu_devices(count)
