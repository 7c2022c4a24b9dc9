"""If processes are at different places of the data at one step of a loop, an error names them."""

import pytest
from real_service import joined

import feedline
from feedline._src.agreement import step_places as module

BOTH = (0, 1)


@pytest.fixture(scope="module")
def services():
    with joined(2) as found:
        yield found


@pytest.fixture
def places(services, monkeypatch):
    """The `StepPlaces` of each of two processes."""
    monkeypatch.setattr(module, "out_of_step", feedline.ProcessError)  # the real one ends processes
    monkeypatch.setattr(module, "counted", lambda kind, processes: f"feedline/{kind}/1")
    found = []
    for service in services:
        monkeypatch.setattr(module, "coordination", lambda service=service: service)
        found.append(module.StepPlaces("fit", BOTH))
    return found


def test_other_places_at_one_step_are_out_of_step(places):
    for each in places:
        each.compare(5, 0, 16)
    places[0].compare(6, 0, 20)
    told = r"step: at step 6 of .*process 0 is at epoch 0, position 20, and .*process 1 .* epoch 1, position 20"
    with pytest.raises(feedline.ProcessError, match=told):
        places[1].compare(6, 1, 20)
