"""What the processes observed is combined to the digests of global batches."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.tools.audit.digest import row_digests
from feedline._src.tools.audit.observed import (
    Difference,
    Observed,
    Settings,
    combined_digests,
    global_digests,
    shard_digests,
)

VALUES = np.arange(48, dtype=np.int32).reshape(8, 6)
DIGESTS = row_digests(VALUES, 0, (6,), ((0, 6),))


def shards(spec, values=VALUES):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    return shard_digests(jax.device_put(values, NamedSharding(mesh, spec)), 0)


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(("data", "model")), P("data", "model"), P(None, "model")], ids=str
)
def test_shards_of_any_sharding_combine_to_the_digests_of_rows(spec):
    np.testing.assert_array_equal(combined_digests(shards(spec), 8), DIGESTS)


def test_replicas_that_differ_are_found():
    changed = VALUES.copy()
    changed[5, 0] += 1
    with pytest.raises(Difference, match="two devices hold different values") as found:
        combined_digests([*shards(P("data")), *shards(P("data"), changed)], 8)
    assert found.value.where == {"row": 5}


def test_a_part_that_no_device_holds_is_found():
    with pytest.raises(Difference, match="a part of it is on no device") as found:
        combined_digests(shards(P("data", "model"))[:-1], 8)
    assert found.value.where == {"row": 6}


def observed(**changed):
    settings = Settings(8, 8, "drop", None, transformed=False)
    fields = {
        "batches": [[shards(P("data"))]],
        "states": [{"step": 1, "epoch": 0, "position": 8}],
        "first_batch": 3,
    }
    row_specs = [((6,), np.dtype(np.int32))]
    return Observed(settings=settings, names=["batch"], row_specs=row_specs, seconds=0.0, **{**fields, **changed})


def test_processes_are_combined_batch_by_batch():
    half = shards(P("data"))
    processes = [observed(batches=[[half[:4]]]), observed(batches=[[half[4:]]])]
    np.testing.assert_array_equal(global_digests(processes)[0, :, 0], DIGESTS)
    with pytest.raises(Difference) as found:
        global_digests(processes[:1])
    assert found.value.where == {"batch": 3, "row": 4, "leaf": "batch"}
    with pytest.raises(Difference, match="process 1 and process 0 disagree"):
        global_digests([observed(), observed(states=[{"step": 2, "epoch": 0, "position": 8}])])
