"""examples/text.py is killed and resumed: with the same losses on one topology, with the same rows on any."""

import csv
import itertools
import json
import shutil
import sys

import numpy as np
import programs
import pytest
import text_job
from launched import FEEDLINE

from feedline.trainer import fit

pytestmark = pytest.mark.slow

STEPS, BATCH = 18, 24
SIZES = {"steps": STEPS, "batch_size": BATCH, "length": 64, "width": 64, "layers": 1, "save_every": 3}
PATIENCE_S = 600
LOGGED = ("step", "loss", "code", "topics", "docstrings")


class Run:
    """A run of the example in its own folder, by jobs that continue one another."""

    def __init__(self, tokens, folder):
        self.tokens, self.folder, self.notes = tokens, folder, folder / "rows"
        folder.mkdir(exist_ok=True)

    def here(self, text, patch):
        """Train to the end in this process."""
        patch.setattr(text, "fit", text_job.noting(fit, self.notes, 0))
        text.train(self.tokens, self.folder, **SIZES)

    def elsewhere(self, *launcher, killed_at=0):
        """Train in other processes, to the end or to the step in which one of them kills itself."""
        options = [[f"--{name.replace('_', '-')}", value] for name, value in SIZES.items()]
        train = ["train", self.tokens, self.folder, *itertools.chain(*options)]
        command = [*launcher, sys.executable, "-W", "error", text_job.__file__, self.notes, killed_at, *train]
        done = programs.run(list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode != 0) == (killed_at > 0), done.stderr

    def losses(self):
        """The lines of the log, as exact hexadecimal numbers: the step, its loss, and the loss of each corpus."""
        with (self.folder / "log.csv").open() as file:
            return [[float(line[name]).hex() for name in LOGGED] for line in csv.DictReader(file)]

    def steps(self, process):
        """The steps that a process took, in all jobs one after the other."""
        return [json.loads(line)[0] for line in (self.folder / f"rows.{process}").read_text().splitlines()]

    def rows(self):
        """{step: {offset in the batch: [digest, source]}}. A step that is repeated must have the same rows."""
        found = {}
        for path in self.folder.glob("rows.*"):
            for step, rows in map(json.loads, path.read_text().splitlines()):
                for i, *row in rows:
                    assert found.setdefault(step, {}).setdefault(i, row) == row
        assert all(set(rows) == set(range(BATCH)) for rows in found.values())
        return found


def processes(count):
    """The command that launches a program as `count` processes of one device each."""
    return [*FEEDLINE, "launch", "--processes", count, "--cpu", "--devices-per-process", 1, "--grace-s", 0.5, "--"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three runs: one is never stopped; two are killed, and continue on one process, or on two and then three."""
    folder = tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(text_job.EXAMPLE.parent)
        import text

        documents = {name: texts[:60] for name, texts in text.corpora().items()}
        patch.setattr(text, "corpora", lambda: documents)
        text.prepare(folder / "tokens")
        unbroken, killed, moved = (
            Run(folder / "tokens", folder / name) for name in ("unbroken", "killed", "moved")
        )
        killed.elsewhere(killed_at=8)
        shutil.copytree(killed.folder, moved.folder, dirs_exist_ok=True)
        moved.elsewhere(*processes(2), killed_at=14)
        moved.elsewhere(*processes(3))
        for run in (killed, unbroken):
            run.here(text, patch)
    return unbroken, killed, moved


def test_on_one_topology_the_losses_are_those_of_a_run_that_is_never_stopped(runs):
    unbroken, killed, _ = runs
    assert killed.steps(0)[:8] == list(range(1, 9))
    assert killed.steps(0)[8] in (4, 7)  # if the kill cut the save of step 6 short, the save of step 3 is complete
    assert killed.losses() == unbroken.losses()
    assert [float.fromhex(line[0]) for line in killed.losses()] == list(range(1, STEPS + 1))
    assert killed.rows() == unbroken.rows()


def test_on_other_processes_the_rows_are_the_same_and_the_losses_to_rounding(runs):
    unbroken, _, moved = runs
    assert moved.steps(1)[0] in (4, 7)
    assert moved.steps(2)[0] in (10, 13)
    assert moved.rows() == unbroken.rows()
    found, expected = (np.vectorize(float.fromhex)(run.losses()) for run in (moved, unbroken))
    # other devices sum a batch in another order: this changes a step by some 1e-7, which training enlarges
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (expected[-1, 1:] < expected[0, 1:]).all()
    sources = [source for rows in unbroken.rows().values() for _, source in rows.values()]
    assert np.bincount(sources).tolist() == [STEPS * BATCH // 2, STEPS * BATCH // 4, STEPS * BATCH // 4]
