"""Global batches put together from what the processes hold."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline.audit.digest import row_digests
from feedline.audit.held import Difference, Held, Settings, joined, pieces_of, whole

VALUES = np.arange(48, dtype=np.int32).reshape(8, 6)
DIGESTS = row_digests(VALUES, 0, (6,), ((0, 6),))


def pieces(spec, values=VALUES):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    return pieces_of(jax.device_put(values, NamedSharding(mesh, spec)), 0)


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(("data", "model")), P("data", "model"), P(None, "model")], ids=str
)
def test_parts_of_any_sharding_make_the_rows(spec):
    np.testing.assert_array_equal(joined(pieces(spec), 8, (6,)), DIGESTS)


def test_replicas_that_differ_are_found():
    changed = VALUES.copy()
    changed[5, 0] += 1
    with pytest.raises(Difference, match="two devices hold different values") as found:
        joined([*pieces(P("data")), *pieces(P("data"), changed)], 8, (6,))
    assert found.value.where == {"row": 5}


def test_a_part_that_nobody_holds_is_found():
    with pytest.raises(Difference, match="a part of it is on no device") as found:
        joined(pieces(P("data", "model"))[:-1], 8, (6,))
    assert found.value.where == {"row": 6}


def held(**changed):
    settings = Settings(8, 8, "drop", None, transformed=False)
    mine = {"batches": [[pieces(P("data"))]], "states": [{"step": 1, "epoch": 0, "position": 8}], "taken": 3}
    forms = [((6,), np.dtype(np.int32))]
    return Held(settings=settings, names=["batch"], forms=forms, seconds=0.0, **{**mine, **changed})


def test_processes_are_put_together_batch_by_batch():
    half = pieces(P("data"))
    processes = [held(batches=[[half[:4]]]), held(batches=[[half[4:]]])]
    np.testing.assert_array_equal(whole(processes)[0, :, 0], DIGESTS)
    with pytest.raises(Difference) as found:
        whole(processes[:1])
    assert found.value.where == {"batch": 3, "row": 4, "leaf": "batch"}
    with pytest.raises(Difference, match="process 1 and process 0 disagree"):
        whole([held(), held(states=[{"step": 2, "epoch": 0, "position": 8}])])
