"""A feed of rows or lanes is restored from a checkpoint of Orbax on other topologies."""

import shutil

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import feedline
from feedline.checkpoint import Restore, Save

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .layouts import sharding_of
from .test_checkpoints_across import new_folder

pytestmark = pytest.mark.slow

LEGS = [*TOPOLOGIES, ALONE]
STEPS = 3


def lane(number, count):
    return grain.MapDataset.range(number, 640, count).map(lambda i: {"x": np.int32(i)}).to_iter_dataset()


KINDS = {"rows": {"x": np.arange(640, dtype=np.int32)}, "lanes": feedline.Lanes(lane, 8)}


@case(KINDS)
def a_checkpointed_leg(here, kind):
    """Resumes from the checkpoint of the topology before this one, takes a few batches, and saves another."""
    before = here.before()
    folder = new_folder(f"items-{kind}") if before is None else before["folder"]
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with (
        ocp.CheckpointManager(folder, options=options) as manager,
        feedline.Feed(KINDS[kind], 8, sharding_of("permuted", here.devices)) as feed,
    ):
        if before is not None:
            manager.restore(manager.latest_step(), args=ocp.args.Composite(feed=Restore(feed)))
        delivered = [batch for _, batch in zip(range(STEPS), feed, strict=False)]
        step = feed.get_state()["step"]
        manager.save(step, args=ocp.args.Composite(feed=Save(feed)))
    return {"batches": delivered, "step": step, "folder": str(folder)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_feed_is_restored_on_other_topologies(outcome, kind):
    legs = [outcome(topology, a_checkpointed_leg, kind) for topology in LEGS]
    shutil.rmtree(legs[0]["folder"])
    assert [leg["step"] for leg in legs] == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
    delivered = [batch["x"] for leg in legs for batch in leg["batches"]]
    with feedline.Feed(KINDS[kind], 8, jax.devices()[0]) as feed:
        np.testing.assert_array_equal(delivered, [next(feed)["x"] for _ in delivered])
