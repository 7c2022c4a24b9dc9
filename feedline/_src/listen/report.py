"""`Report`: what limits a feed, what that costs, and which setting to change."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from feedline._src.listen.words import STAGES, counted, factor, milliseconds, percent
from feedline._src.options import Settings

_log = logging.getLogger("feedline")
LITTLE = 0.05  # below this wait share, training counts as limited by compute, as in XProf
Bound = Literal["read", "host", "place", "compute", "loop", "machine", "straggler"]
BOUNDS: dict[Bound, str] = {  # the meaning of each value of `Report.bound`
    "read": "reading rows",
    "host": "the transform, casts and copies",
    "place": "the calls that place batches, and transfers",
    "compute": "the training step, input is fast enough",
    "loop": "the program's own Python keeps the devices idle",
    "machine": "threads of the feed wait for the GIL or a processor",
    "straggler": "one process has slower input than the others",
}


@dataclasses.dataclass(frozen=True)
class Change:
    """Settings to change, and the predicted effect. Example of `str`: threads 2 → 4, buffer 2 → 4.

    Attributes:
      now, then: the present and the advised values of the settings that change, by name.
      wait_share: the predicted share of the time in which the loop waits after the change.
    """

    now: Mapping[str, int]
    then: Mapping[str, int]
    wait_share: float

    @classmethod
    def of(cls, before: Settings, after: Settings, wait_share: float) -> Change:
        changed = [name for name in Settings._fields if getattr(before, name) != getattr(after, name)]
        if not (before.threads and after.threads):  # 0 threads: workers or the caller read; other settings show it
            changed = [name for name in changed if name != "threads"]
        now, then = ({name: getattr(settings, name) for name in changed} for settings in (before, after))
        return cls(now, then, wait_share)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value} → {self.then[name]}" for name, value in self.now.items())


@dataclasses.dataclass(frozen=True)
class Straggler:
    """The process with the slowest input, which holds up the others.

    Attributes:
      process: its index.
      stage: the stage in which it loses the most time: "read", "host" or "place".
      stage_s, others_s: the stage's time per batch in that process, and its median in the other processes.
    """

    process: int
    stage: str
    stage_s: float
    others_s: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What limits training, as `Feed.report()` returns it: `print` shows text, and a notebook shows a picture.

    A report judges the latest 256 batches. Batches that were read before the loop began do not count.

    Attributes:
      bound: what limits training: "read", "host", "place", "compute", "loop", "machine" or "straggler".
      au: accelerator utilisation, 0 to 1: batches × device time of a step ÷ wall time. If `idle_s` is not known,
        all of the loop's own time counts as device time.
      wait_share: the share of the time in which the devices were idle because the loop waited for a batch, or a
        step waited for the transfer of its batch. With several processes, the largest share of any process; `au`
        is at most 1 − this share.
      headroom: for each stage, its speed alone ÷ the speed of the loop without waiting; 1.0 or less: this stage
        makes the loop wait. For "compute", the speed of the loop without waiting ÷ its speed now.
      advice: one sentence: the setting to change, with the predicted gain; or why no setting helps.
      change: the settings to change and the predicted wait, as values; None: no change promises a clear gain.
      step_s: the mean time of a step: `loop_s` + `wait_s`. With `steps_per_call=K`, all times are for K steps.
      loop_s: the loop's own time between two calls of `next`, plus the time in `next` while the devices computed.
      wait_s: the time in `next` while the devices were idle.
      late_s: how long the transfer of a batch continued after the loop had got the batch; 0 if not known.
      idle_s: the part of the loop's own time in which the devices computed nothing; None: not known.
      stages_s: for "read", "transform", "stage" and "place", the thread-seconds per batch.
      cpu_s: processor seconds per batch, summed over the threads that made the batch.
      batches: how many batches were judged.
      process: the index of this process.
      straggler: the process that holds up the others; None: no process does, or there is only one.
      settings: the feed's threads, workers, buffer and prefetch, as they are now.
      tuning: the latest 32 sentences about settings that are "auto": what was tried, and the result.
    """

    bound: Bound
    au: float
    wait_share: float
    headroom: Mapping[str, float]
    advice: str
    change: Change | None
    step_s: float
    loop_s: float
    wait_s: float
    late_s: float
    stages_s: Mapping[str, float]
    cpu_s: float
    batches: int
    process: int
    straggler: Straggler | None
    settings: Mapping[str, int]
    tuning: Sequence[str] = ()
    idle_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The attributes as JSON values."""
        return dataclasses.asdict(self)

    @property
    def waits(self) -> bool:
        """Whether the loop of this process waits. If not, `bound` may be the limit of another process."""
        return self.wait_s + self.late_s >= LITTLE * self.step_s

    @property
    def verdict(self) -> str:
        """One sentence: what limits training, and what that costs."""
        costs = f"the loop waits for input {percent(self.wait_share)} of the time (AU {percent(self.au)})"
        if (slow := self.straggler) is not None:
            return (
                f"process {slow.process} holds up the others: its {STAGES[slow.stage]} takes "
                f"{milliseconds(slow.stage_s)} ms a batch, {milliseconds(slow.others_s)} ms in the others; {costs}"
            )
        if self.bound == "machine":
            return f"the machine is busy: {BOUNDS['machine']}, and {costs}"
        if self.bound == "loop":
            idle = percent((self.idle_s or 0.0) / max(1e-9, self.step_s))
            return f"Python in the loop limits training: the devices are idle for {idle} of the time, and {costs}"
        name = "compute" if self.bound == "compute" else STAGES[self.bound]
        fast = self.waits and self.bound != "compute" and self.headroom[self.bound] > 1
        return f"{name} limits training{', although alone it is fast enough on average' if fast else ''}: {costs}"

    def __str__(self) -> str:
        """The verdict, the times of the stages with their headroom, and the advice."""
        inside = [
            f"{what} for {milliseconds(time_s)} ms"
            for what, time_s in (("batch still in transfer", self.late_s), ("devices idle", self.idle_s))
            if time_s is not None and time_s >= 0.01 * self.step_s
        ]
        own = f"{milliseconds(self.loop_s)} ms the loop's own" + (f" ({', '.join(inside)})" if inside else "")
        step = f"  a step takes {milliseconds(self.step_s)} ms: {own}, {milliseconds(self.wait_s)} ms waiting"
        host_s = self.stages_s["transform"] + self.stages_s["stage"]
        stage_s = {**self.stages_s, "host": host_s, "compute": self.loop_s}
        stages = [
            f"  {STAGES[name]:<14}{milliseconds(stage_s[name]):>8} ms "
            f"{'of the loop' if name == 'compute' else 'of threads':<11} headroom {factor(headroom)} ×"
            for name, headroom in self.headroom.items()
        ]
        judged = f"  judged by the latest {counted(self.batches, 'batch')}"
        tuned = [f"  tuning {sentence}" for sentence in self.tuning]
        return "\n".join([self.verdict, step, *stages, judged, *tuned, f"advice: {self.advice}"])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as a page (.html) or a picture (.svg): one file, which needs no other files.

        Raises:
          ValueError: the name has neither suffix.
          OSError: the file cannot be written. An existing file then stays unchanged.
        """
        from feedline._src.listen import page

        target = Path(path)
        if target.suffix not in (".html", ".svg"):
            raise ValueError(f"a report is saved as .html or as .svg, got {str(target)!r}; rename it")
        with page.written_whole(target) as partial:
            text = page.page(self) if target.suffix == ".html" else page.svg(self)
            partial.write_text(text, encoding="utf-8")

    def _repr_html_(self) -> str:
        """The picture, for a notebook."""
        from feedline._src.listen.page import svg

        return svg(self)


def report_of(feed: object) -> Report | None:
    """The report of a feed; None: the object makes no reports, or the feed has delivered too few batches.

    Takes about two milliseconds. Errors are only logged, because code that observes must not end training.
    """
    report: Callable[[], Report | None] = getattr(feed, "report", lambda: None)
    try:
        return report()
    except ValueError:  # too few batches
        return None
    except Exception:  # noqa: BLE001  see above
        _log.exception("feedline could not judge how its feed works")
        return None
