"""The `feedline bench` command: its subcommands and their options."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from feedline._src.tools.cli.cpu_devices import use_cpu_devices

_MB = 1_000_000
_LIMITS = {"limit": "np.take alone", "gather": "gather alone"}


@dataclasses.dataclass(frozen=True)
class _Benchmark:
    """The options that all benchmarks share: the devices, and where the result goes.

    Attributes:
      cpu_devices: run on this many CPU devices. 0: on the accelerators that JAX finds.
      json: print the result as one object on the last line of standard output.
      out: file for the same object: machine, versions, options, raw samples.
      plot: file for a picture of it, .png or .svg. Needs matplotlib, the extra `bench`.
    """

    cpu_devices: int = 8
    json: bool = False
    out: Path | None = None
    plot: Path | None = None

    def run(self) -> int:
        """Measure, print and save. Returns the exit code 0."""
        if self.cpu_devices:
            use_cpu_devices(self.cpu_devices)
        from feedline._src.tools.bench.machine import describe

        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        name = type(self).__name__.removesuffix("Benchmark").lower()
        machine = describe()
        _print(f"{machine['processor']}, {machine['cores']} cores; columns by {machine['columns']}")
        result = {"benchmark": name, "machine": machine, "options": options, **self.results()}
        text = json.dumps(result, default=str)
        if self.out is not None:
            self.out.write_text(text + "\n")
        if self.plot is not None:
            from feedline._src.tools.bench.plots import plot

            plot(json.loads(text), self.plot)
        if self.json:
            print(text)
        return 0

    def results(self) -> dict[str, Any]:
        """The results as they stand in the printed object."""
        return {"results": self.measured()}

    def measured(self) -> Any:
        """Measure and print. Returns the results as JSON values."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FeedBenchmark(_Benchmark):
    """How fast a feed delivers: your own, or shuffled rows of several sizes beside copying them alone.

    Attributes:
      target: a path or glob of rows, of which a feed of all leaves is made, or module:make_feed, found from the
        current folder, where make_feed(mesh) builds a feedline.Feed over a mesh with the axes data and model.
        None: generated rows, from memory and from a mapped file, to one device and to all, measured alternately
        with copying alone: by np.take, and by the fastest gather known, which is feedline's own in C.
      row_bytes: sizes of generated rows.
      batch_mb: sizes of batches of generated rows, in 10^6 bytes.
      gib: size of the generated data, in memory and once more in a file.
      rounds: how often each feed is measured.
      seconds: how long each measurement takes.
      folder: where the generated file is written. None: the system's folder for temporary files.
    """

    target: tyro.conf.Positional[str | None] = None
    row_bytes: tuple[int, ...] = (256, 3072, 12288, 153600)
    batch_mb: tuple[float, ...] = (16, 4)
    gib: float = 2.0
    rounds: int = 7
    seconds: float = 0.7
    folder: Path | None = None

    def measured(self) -> Any:
        """The results of `feedline._src.tools.bench.feed`."""
        from feedline._src.tools.bench import feed

        if self.target is not None:
            return self._measured_user_feed(self.target)
        _print("   row B batch MB  from → devices    M rows/s    GB/s  ÷ np.take          ÷ fastest gather")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return feed.matrix(
                Path(folder),
                int(self.gib * 2**30),
                self.row_bytes,
                [int(size * _MB) for size in self.batch_mb],
                self.rounds,
                self.seconds,
                _print_feeds,
            )

    def _measured_user_feed(self, target: str) -> Any:
        import jax
        import numpy as np

        from feedline._src.tools.audit.target import load_make_feed
        from feedline._src.tools.bench.feed import measure_feed

        devices = jax.devices()
        mesh = jax.sharding.Mesh(np.array(devices)[:, None], ("data", "model"))
        with load_make_feed(target, len(devices))(mesh) as feed:
            found = measure_feed(feed, self.seconds * self.rounds)
        _print(f"{found['rows_per_s']:,.0f} rows/s, {found['gb_per_s']:.3f} GB/s to {len(devices)} devices")
        stages = ("read_s", "transform_s", "place_s", "wait_s")
        for stage in stages:
            _print(f"{stage.removesuffix('_s'):>10} {found[stage] * 1e3:9.3f} ms a batch")
        return found


@dataclasses.dataclass(frozen=True)
class OrderBenchmark(_Benchmark):
    """What the shuffled order costs for each row, for 10^6 to 10^15 rows.

    Attributes:
      repeats: how often each is measured.
    """

    repeats: int = 9

    def measured(self) -> Any:
        """The results of `feedline._src.tools.bench.order`."""
        from feedline._src.tools.bench import order

        found = order.costs(self.repeats)
        _print(order.table(found))
        return found


@dataclasses.dataclass(frozen=True)
class PlaceBenchmark(_Benchmark):
    """What it costs to place a batch that is in host memory, and to take one that is placed.

    Attributes:
      batch_mb: size of the batch, in 10^6 bytes.
      repeats: how often each is measured.
    """

    batch_mb: float = 4
    repeats: int = 200

    def measured(self) -> Any:
        """The results of `feedline._src.tools.bench.place`."""
        from feedline._src.tools.bench import place

        taking, placing = place.taking(self.repeats), place.placing(int(self.batch_mb * _MB), self.repeats)
        _print(f"take a ready batch, 1 leaf, {taking['devices']} devices: {taking['take_s'] * 1e6:.0f} µs")
        for found in placing:
            memory = "aligned" if found["aligned"] else "misaligned"
            _print(
                f"place {found['leaves']:>3} leaves on {found['devices']} devices, {memory:<10}: "
                f"{found['place_s'] * 1e6:8.0f} µs"
            )
        return {"taking": taking, "placing": placing}


@dataclasses.dataclass(frozen=True)
class OverlapBenchmark(_Benchmark):
    """How much longer a step is than the slower one of loading and computing, at several depths of prefetch.

    Attributes:
      step_ms: how long a load takes, and a computation.
      steps: how many are measured at each depth.
    """

    step_ms: float = 20
    steps: int = 100

    def measured(self) -> Any:
        """The results of `feedline._src.tools.bench.overlap`."""
        from feedline._src.tools.bench.overlap import overlap

        found = overlap(self.step_ms / 1e3, self.steps)
        for depth in found["depths"]:
            _print(
                f"prefetch {depth['prefetch']}: a step of {depth['step_s'] * 1e3:.2f} ms, "
                f"{depth['of_the_slower']:.3f} × the slower of load and compute"
            )
        return found


@dataclasses.dataclass(frozen=True)
class ResumeBenchmark(_Benchmark):
    """What it costs to restore a state, at the start of 10^15 rows and far into them.

    Attributes:
      repeats: how often each is measured.
    """

    repeats: int = 50

    def measured(self) -> Any:
        """The results of `feedline._src.tools.bench.resume`."""
        from feedline._src.tools.bench.resume import resume

        found = resume(self.repeats)
        for each in found:
            _print(
                f"at position {each['position']:>17,}: set_state {each['restore_s'] * 1e3:.2f} ms, "
                f"the first batch {each['first_batch_s'] * 1e3:.2f} ms later"
            )
        return found


@dataclasses.dataclass(frozen=True)
class ModesBenchmark(_Benchmark):
    """Train an MLP in the modes jit_single, jit_multi and pmap: step time, memory, compilation, what would fit.

    Each mode runs in a process of its own, with one size of the batch and with twice that size. A mode that runs
    out of memory is a row that says so.

    Attributes:
      preset: small: 6 hidden layers of 256 units, 1,024 rows a batch. reference: 90 hidden layers of 2,056
        units with 1,024 inputs, 6,912 rows a batch, for accelerators.
      rounds: how often each mode is measured.
      seconds: how long each measurement takes.
    """

    preset: Literal["small", "reference"] = "small"
    rounds: int = 1
    seconds: float = 0.5

    def results(self) -> dict[str, Any]:
        """The results of `feedline._src.tools.bench.modes`."""
        from feedline._src.tools.bench import modes
        from feedline._src.tools.bench.workload import PRESETS

        workload = PRESETS[self.preset]
        _print(str(workload))
        found = modes.modes(workload, self.rounds, self.seconds, _print)
        for line in modes.remarks(found):
            _print(line)
        return {"workload": dataclasses.asdict(workload), "modes": found}


@dataclasses.dataclass(frozen=True)
class PracticesBenchmark(_Benchmark):
    """What each practice of the trainer brings: step time and device memory with it and without it.

    Among them: donation, rematerialisation, bfloat16, a sharded state, uint8 inputs, several steps a call, metrics
    fetched together, the compilation cache, asynchronous checkpoints. Each pair is measured alternately.

    Attributes:
      preset: small: 6 hidden layers of 256 units, 1,024 rows a batch. reference: 90 hidden layers of 2,056
        units with 1,024 inputs, 6,912 rows a batch, for accelerators. What costs time on the host is measured
        with a small model, whose steps are short.
      rounds: how often each practice is measured on and off.
      seconds: how long each measurement takes.
    """

    preset: Literal["small", "reference"] = "small"
    rounds: int = 5
    seconds: float = 0.5

    def results(self) -> dict[str, Any]:
        """The results of `feedline._src.tools.bench.practices`."""
        from feedline._src.tools.bench import practices
        from feedline._src.tools.bench.workload import PRESETS

        workload = PRESETS[self.preset]
        _print(str(workload))
        found = practices.practices(workload, self.rounds, self.seconds, _print)
        return {"workload": dataclasses.asdict(workload), "practices": found}


@dataclasses.dataclass(frozen=True)
class ScaleBenchmark(_Benchmark):
    """What one process out of thousands does and sends, and what of that grows with their number.

    One process plans and reads for a mesh that need not exist. The messages of all are counted by running the
    library's own code for each of them over a simulated coordination service.

    Attributes:
      processes: how many there are.
      rows: rows of the source.
      repeats: how often the feed of one process is built.
      latency_ms: of a call to the simulated service.
      call_us: time of process 0 for each call.
      real: also start so many real processes on this machine, each with one CPU device and about 100 MiB of memory
        of its own; 0: none.
    """

    processes: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16384)
    rows: int = 10**12
    repeats: int = 3
    latency_ms: float = 0.5
    call_us: float = 100
    real: int = 0

    def measured(self) -> Any:
        """The results of `feedline._src.tools.bench.scale`."""
        from feedline._src.tools.bench.scale import growth
        from feedline._src.tools.bench.scale.real import real
        from feedline._src.tools.bench.scale.service import Costs

        costs = Costs(self.latency_ms / 1e3, self.call_us / 1e6)
        simulated = growth.scale(self.processes, self.rows, costs, self.repeats, _print)
        started = real(self.real) if self.real else None
        for line in growth.real_lines(started) if started else ():
            _print(line)
        return {"simulated": simulated, "real": started}


@dataclasses.dataclass(frozen=True)
class Bench:
    """Measure this machine, or your own feed.

    Run it alone: another program on the same cores changes what is measured.
    """

    what: tyro.conf.OmitSubcommandPrefixes[
        Annotated[FeedBenchmark, tyro.conf.subcommand("feed")]
        | Annotated[OrderBenchmark, tyro.conf.subcommand("order")]
        | Annotated[PlaceBenchmark, tyro.conf.subcommand("place")]
        | Annotated[OverlapBenchmark, tyro.conf.subcommand("overlap")]
        | Annotated[ResumeBenchmark, tyro.conf.subcommand("resume")]
        | Annotated[ModesBenchmark, tyro.conf.subcommand("modes")]
        | Annotated[PracticesBenchmark, tyro.conf.subcommand("practices")]
        | Annotated[ScaleBenchmark, tyro.conf.subcommand("scale")]
    ]

    def run(self) -> int:
        """Run the chosen benchmark. Returns its exit code."""
        return self.what.run()


def _print_feeds(result: dict[str, Any]) -> None:
    size, batch = result["row_bytes"], result["batch_bytes"] / _MB
    for name, entrant in result["entrants"].items():
        where, rate = f"{size:>8} {batch:>8g}  {_LIMITS.get(name, name):<16}", entrant["median"]
        of_take, of_gather = (_share(entrant[of], *entrant[f"{of}_interval"]) for of in ("of_limit", "of_gather"))
        _print(f"{where} {rate / 1e6:>9.3f} {rate * size / 1e9:>7.2f}  {of_take:<17}  {of_gather}")


def _share(median: float, low: float, high: float) -> str:
    return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def _print(line: str) -> None:
    print(line, flush=True)
