"""The `feedline bench` commands and their options: `feed`, `modes`, `practices`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from feedline._src.options import checked_integer
from feedline._src.tools.cli.options import use_cpu_devices

if TYPE_CHECKING:
    from feedline._src.tools.bench.workload import Workload

_BAR = 32  # characters


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Benchmark:
    """The options that all benchmarks share: the devices, and where the result goes.

    Attributes:
      seconds: how long each measurement takes.
      cpu_devices: run on this many CPU devices. 0: on the accelerators that JAX finds.
      json: print the result as one object on the last line of standard output.
      out: file for the same object: machine, versions, options, raw samples.
    """

    seconds: float = 0.5
    cpu_devices: int = 8
    json: bool = False
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None

    def run(self) -> int:
        """Measure, print and save. Returns the exit code 0."""
        if not 0 < self.seconds < 1e9:
            raise ValueError(f"--seconds must be above 0 and below 1e9, got {self.seconds}")
        if self.cpu_devices:
            use_cpu_devices(self.cpu_devices)
        if self.out is not None:
            self.out.open("a").close()  # a file that cannot be written is an error now, not after the measurement
        from feedline._src.tools.bench.machine import describe

        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        name = type(self).__name__.removesuffix("Benchmark").lower()
        machine = describe()
        _print(f"{machine['processor']}, {machine['cores']} cores; columns by {machine['columns']}")
        result = {"benchmark": name, "machine": machine, "options": options, **self.measured()}
        text = json.dumps(result, default=str)
        if self.out is not None:
            self.out.write_text(text + "\n")
        if self.json:
            print(text)
        return 0

    def measured(self) -> dict[str, Any]:
        """Measure and print. Returns the results as JSON values."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedBenchmark(_Benchmark):
    """Measure how fast your feed delivers, what the limit of this machine is, and how long each stage takes.

    The limit is the rate without reads and transform: one batch in host memory is copied, placed and prefetched
    again and again. Run nothing else meanwhile: another program on the same cores changes what is measured.

    Attributes:
      target: module:make_feed, imported from the current folder: make_feed(mesh) builds a feedline.Feed over a
        mesh with the axes data and model. Or a path or glob of files, to measure a feed of all their leaves.
    """

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    seconds: float = 5

    def measured(self) -> dict[str, Any]:
        """{"results": what `measure_feed` returns}."""
        import jax
        import numpy as np

        from feedline._src.tools.bench.feed import STAGES, measure_feed
        from feedline._src.tools.targets import build_feed, load_make_feed

        devices = jax.devices()
        mesh = jax.sharding.Mesh(np.array(devices)[:, None], ("data", "model"))
        make_feed = load_make_feed(self.target, len(devices))
        with build_feed(self.target, make_feed, mesh, lambda options: options) as feed:
            found = measure_feed(feed, self.seconds)
        _print(f"{found['gb_per_s']:.3f} GB/s to {len(devices)} devices")
        rate, limit = found["rows_per_s"], found["limit_rows_per_s"]
        for name, each, share in (("feed", rate, f", {rate / limit:.0%} of the limit"), ("limit", limit, "")):
            bar = "█" * round(_BAR * each / max(rate, limit))
            _print(f"{name:>10} {bar:<{_BAR}} {each:,.0f} rows/s{share}")
        _print("limit: one batch in memory, copied, placed and prefetched again and again")
        for stage in STAGES:
            _print(f"{stage.removesuffix('_s'):>10} {found[stage] * 1e3:9.3f} ms a batch")
        return {"results": found}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TrainingBenchmark(_Benchmark):
    """The options that `modes` and `practices` share.

    Attributes:
      preset: small has 6 hidden layers of 256 units, and 1,024 rows a batch; reference, for accelerators, has 90
        hidden layers of 2,056 units, 1,024 inputs, and 6,912 rows a batch.
      rounds: how often each case is measured.
    """

    preset: Literal["small", "reference"] = "small"
    rounds: int = 1

    def workload(self) -> Workload:
        """Print the preset's MLP, and return it."""
        from feedline._src.tools.bench.workload import PRESETS

        checked_integer("--rounds", self.rounds, at_least=1)
        _print(str(PRESETS[self.preset]))
        return PRESETS[self.preset]


@dataclasses.dataclass(frozen=True)
class ModesBenchmark(_TrainingBenchmark):
    """Train an MLP in the modes jit_single, jit_multi and pmap: step time, memory, compilation.

    Each mode runs in a process of its own, with one batch size and with twice that size. If a mode runs out of
    memory, its row says so.
    """

    def measured(self) -> dict[str, Any]:
        """{"workload", "modes": what `bench.modes.modes` returns}."""
        from feedline._src.tools.bench import modes

        workload = self.workload()
        found = modes.modes(workload, self.rounds, self.seconds, _print)
        for line in modes.remarks(found):
            _print(line)
        return {"workload": dataclasses.asdict(workload), "modes": found}


@dataclasses.dataclass(frozen=True)
class PracticesBenchmark(_TrainingBenchmark):
    """Measure what each practice of the trainer brings: step time and device memory, with and without it.

    Practices are donation, rematerialisation, bfloat16, a sharded state, uint8 inputs, several steps a call,
    metrics fetched together, and others. Measurements with and without a practice alternate. Practices that change
    the time on the host are measured with a small model, whose steps are short.
    """

    rounds: int = 5

    def measured(self) -> dict[str, Any]:
        """{"workload", "practices": what `bench.practices.practices` returns}."""
        from feedline._src.tools.bench import practices

        workload = self.workload()
        found = practices.practices(workload, self.rounds, self.seconds, _print)
        return {"workload": dataclasses.asdict(workload), "practices": found}


def _print(line: str) -> None:
    print(line, flush=True)
