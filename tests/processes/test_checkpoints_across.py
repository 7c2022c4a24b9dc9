"""Training that is resumed on several topologies has the losses of training that never stops."""

import os
import secrets
import shutil
import tempfile
from pathlib import Path

import grain
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline._src.trainer import checkpoints as module
from feedline._src.trainer.model import Sizes, classifier

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .meeting import shared
from .values import PerProcess

pytestmark = pytest.mark.slow

LEGS = [*TOPOLOGIES, ALONE]
STEPS, N = 5, 200  # steps on each topology; rows
RANDOM = np.random.default_rng(0)
ROWS = {"image": RANDOM.integers(256, size=(N, 8), dtype=np.uint8), "label": RANDOM.integers(10, size=N)}


def lane(number, count):
    rows = grain.MapDataset.range(number, N, count).map(lambda i: {name: leaf[i] for name, leaf in ROWS.items()})
    return rows.repeat().to_iter_dataset()


KINDS = {"jit_multi": ROWS, "pmap": ROWS, "lanes": feedline.Lanes(lane, 8)}  # "lanes" trains by jit_multi


def losses_of(mode, steps, rows=ROWS, folder=None):
    """Losses of up to `steps` steps, from the newest checkpoint in `folder` on. The last step is saved, too."""
    init, loss = classifier(Sizes(8, 10, layers=1, width=16))
    with feedline.Feed(rows, 64, NamedSharding(feedline.trainer.mesh_for(mode), P("data"))) as feed:
        fitted = feedline.trainer.fit(
            feed,
            init,
            loss,
            optax.adam(1e-2),
            mode=mode,
            steps=steps,
            report_every=1,
            checkpoint_dir=folder,
            save_every=2,
        )
    return [entry["loss"] for entry in fitted.history]


def new_folder(kind):
    """An unused path, the same in all processes."""
    path = os.path.join(tempfile.gettempdir(), f"feedline-{kind}-{secrets.token_hex(8)}")
    return Path(shared(f"checkpoints-{kind}", path))


@case(KINDS)
def a_training_leg(here, kind):
    """Resumes where the topology before this one stopped, from a folder that all processes see."""
    before = here.before()
    folder = Path(before["folder"]) if before else new_folder(kind)
    steps = STEPS + max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    losses = losses_of("pmap" if kind == "pmap" else "jit_multi", steps, KINDS[kind], folder)
    return {
        "folder": str(folder),
        "losses": losses,
        "saved": sorted(int(path.name) for path in folder.glob("[0-9]*")),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_on_other_topologies(outcome, kind):
    legs = [outcome(topology, a_training_leg, kind) for topology in LEGS]
    shutil.rmtree(legs[0]["folder"])
    seen = [loss for leg in legs for loss in leg["losses"]]
    np.testing.assert_allclose(seen, losses_of("jit_single", STEPS * len(LEGS), KINDS[kind]), rtol=1e-4)
    assert [leg["saved"] for leg in legs] == [[2, 4, 5], [6, 8, 10], [12, 14, 15], [16, 18, 20]]
    assert jax.process_count() == 1


@case()
def a_directory_for_each_process(here):
    """The error in each process. Without the check, Orbax would wait for files that other processes see."""
    usual, module._SEEN_S = module._SEEN_S, 0.0
    try:
        if jax.process_index() == 0:
            with module._lock(here.folder):
                pass
        module._check_shared(here.folder)
    except feedline.FeedError as error:
        return PerProcess(str(error))
    finally:
        module._SEEN_S = usual
    return PerProcess(None)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_processes_that_do_not_share_the_directory_are_told(outcome, topology):
    first, *others = outcome(topology, a_directory_for_each_process)
    assert first is None
    assert len(others) == topology.processes - 1
    for told in others:
        assert "all processes must share the directory of checkpoints, and this process does not see the" in told
