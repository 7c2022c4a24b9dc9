"""Runs examples/text.py, notes the rows that each step is given, and kills its own process before a given step.

python text_job.py NOTES KILLED_AT train ...

Each process writes a line for each step to NOTES.<process>: the step, and [row, digest, source] for each row that
lies on its devices. With KILLED_AT 0 no process is killed; otherwise the last one is.
"""

import hashlib
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import jax
import numpy as np

import feedline
from feedline import trainer

EXAMPLE = Path(__file__).parent.parent / "examples" / "text.py"


class Noted:
    """A feed that notes what it delivers."""

    def __init__(self, feed: feedline.Feed, notes: str, killed_at: int) -> None:
        self._feed = feed
        self._killed_at = killed_at
        self._notes = Path(f"{notes}.{jax.process_index()}")

    def __getattr__(self, name: str):
        return getattr(self._feed, name)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._feed)
        step = self._feed.get_state()["step"]
        rows = []
        for tokens, sources in zip(
            batch["tokens"].addressable_shards, batch["source"].addressable_shards, strict=True
        ):
            first = tokens.index[0].start or 0
            for i, (row, source) in enumerate(zip(np.asarray(tokens.data), sources.data.tolist(), strict=True)):
                rows.append([first + i, hashlib.sha256(row.tobytes()).hexdigest()[:16], source])
        with self._notes.open("a") as file:
            print(json.dumps([step, rows]), file=file)
        if step == self._killed_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


def noting(fit, notes: str, killed_at: int):
    """`fit`, given a feed that notes what it delivers."""
    return lambda feed, *args, **options: fit(Noted(feed, notes, killed_at), *args, **options)


if __name__ == "__main__":
    trainer.fit = noting(trainer.fit, sys.argv[1], int(sys.argv[2]))
    sys.argv[:] = [str(EXAMPLE), *sys.argv[3:]]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
