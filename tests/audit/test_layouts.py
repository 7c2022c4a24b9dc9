"""The layouts of an audit: meshes span all processes, and each launch resumes the state of the one before."""

import itertools

import numpy as np
import pytest

from feedline._src.tools.audit.layouts import devices_for, launches


@pytest.mark.parametrize("counts", [[1], [1, 2], [1, 3], [1, 2, 4, 8], [1, 6, 16]])
def test_every_saved_state_is_resumed_and_every_mesh_spans_all_processes(counts):
    plan, devices = launches(counts), devices_for(counts)
    assert plan[0][0].is_reference
    assert [launch[0].processes for launch in plan] == (counts if len(counts) > 1 else [1, 1])
    for before, after in itertools.pairwise(plan):
        assert [layout.saves for layout in before] == [False] * (len(before) - 1) + [True]  # only the last saves
        assert [layout.times for layout in after if layout.resumes] == [1, 1, 2]
    assert not any(layout.saves for layout in plan[-1])
    assert not any(layout.resumes for layout in plan[0])
    assert devices >= 4
    for layout in itertools.chain(*plan):
        assert layout.mesh.ndim == 2
        assert len(set(layout.mesh.ravel())) == layout.mesh.size
        process = layout.mesh // (devices // layout.processes)
        if layout.name == "model across processes" and layout.processes % 2 == 0:
            assert (process[:, 0] != process[:, 1]).all()
        if layout.mesh.shape != (1, 1):
            assert set(process.ravel()) == set(range(layout.processes))
    permuted = next(layout for layout in plan[-1] if "permuted" in layout.name)
    assert not np.array_equal(permuted.mesh.ravel(), range(devices))
