"""Runs examples/text.py, notes the rows that each step is given, and kills its own process before a given step.

python text_job.py NOTES KILLED_AT train ...

Each process writes a line for each step to NOTES.<process>: the step, and [row, digest, source] for each row that lies
on its devices. With KILLED_AT 0 no process is killed; otherwise the last one is.
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
        self._file = open(f"{notes}.{jax.process_index()}", "a")  # noqa: SIM115  open until the process ends

    def __getattr__(self, name: str):
        return getattr(self._feed, name)

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._feed)
        step = self._feed.get_state()["step"]
        rows = []
        for tokens, source in zip(
            batch["tokens"].addressable_shards, batch["source"].addressable_shards, strict=True
        ):
            for i, row in enumerate(np.asarray(tokens.data), start=tokens.index[0].start or 0):
                digest = hashlib.sha256(row.tobytes()).hexdigest()[:16]
                rows.append([i, digest, int(source.data[i - (tokens.index[0].start or 0)])])
        print(json.dumps([step, rows]), file=self._file, flush=True)
        if step == self._killed_at and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch


if __name__ == "__main__":
    notes, killed_at = sys.argv[1], int(sys.argv[2])
    fit = trainer.fit
    trainer.fit = lambda feed, *args, **options: fit(Noted(feed, notes, killed_at), *args, **options)
    sys.argv[:] = [str(EXAMPLE), *sys.argv[3:]]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
