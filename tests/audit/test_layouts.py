"""The layouts of an audit: their meshes, and that the next launch resumes every state that one saves."""

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
        saved = {layout.saves for layout in before if layout.saves}
        assert len(saved) == 1
        assert {layout.resumes for layout in after if layout.resumes} == saved
        assert before[-1].saves  # its processes are killed, so nothing can come after it
    assert not any(layout.saves for layout in plan[-1])
    assert plan[-1][2].times == 2
    assert devices >= 4
    for layout in itertools.chain(*plan):
        mesh = layout.arranged(range(devices))
        assert mesh.shape == layout.mesh
        assert len(set(mesh.ravel())) == mesh.size
        process = mesh // (devices // layout.processes)
        if layout.arrangement == "across" and layout.processes % 2 == 0:
            assert (process[:, 0] != process[:, 1]).all()
        if layout.mesh != (1, 1):
            assert set(process.ravel()) == set(range(layout.processes))
    permuted = next(layout for layout in plan[-1] if layout.arrangement == "permuted")
    assert not np.array_equal(permuted.arranged(range(devices)).ravel(), range(devices))
