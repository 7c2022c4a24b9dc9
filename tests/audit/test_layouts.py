"""The layouts of an audit: their meshes, and that the next launch resumes every state that one saves."""

import itertools

import numpy as np
import pytest

from feedline._src.tools.audit.layouts import ONE_DEVICE, devices_for, launches


@pytest.mark.parametrize("counts", [[1], [1, 2], [1, 3], [1, 2, 4, 8], [1, 6, 16]])
def test_each_launch_resumes_what_the_launch_before_it_saved(counts):
    plan = launches(counts)
    assert plan[0][0].name == ONE_DEVICE
    assert [launch[0].processes for launch in plan] == (counts if len(counts) > 1 else [1, 1])
    for before, after in itertools.pairwise(plan):
        saved = {layout.saves for layout in before if layout.saves}
        assert len(saved) == 2
        assert {layout.resumes for layout in after if layout.resumes} == saved
        assert before[-1].killed
    assert not any(layout.saves for layout in plan[-1])
    assert plan[-1][2].times == 2


@pytest.mark.parametrize("counts", [[1], [1, 2], [1, 3], [1, 2, 4, 8], [1, 6, 16]])
def test_meshes(counts):
    devices = devices_for(counts)
    assert devices >= 4
    for layout in (layout for launch in launches(counts) for layout in launch):
        assert layout.devices == devices
        assert devices % layout.processes == 0
        mesh = layout.arranged(range(devices))
        assert mesh.shape == layout.mesh
        assert len(set(mesh.ravel())) == mesh.size
        process = mesh // (devices // layout.processes)
        if layout.arrangement == "across" and layout.processes % 2 == 0:
            assert (process[:, 0] != process[:, 1]).all()
        if layout.mesh != (1, 1):
            assert set(process.ravel()) == set(range(layout.processes))
    permuted = next(layout for layout in launches(counts)[-1] if layout.arrangement == "permuted")
    assert not np.array_equal(permuted.arranged(range(devices)).ravel(), range(devices))
