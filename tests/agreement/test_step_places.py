"""Processes at different places of the data at one step of a loop are named."""

from concurrent.futures import ThreadPoolExecutor

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
    monkeypatch.setattr(module, "out_of_step", feedline.ProcessError)  # which ends no process here
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


def test_what_one_process_has_found_is_gathered_by_all(places, monkeypatch):
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda each, value: each.gather("damage", value), places, [[], [1, ["params.w"]]])
        assert list(found) == [[[], [1, ["params.w"]]]] * 2
    monkeypatch.setattr(module, "coordination", lambda: None)
    assert module.StepPlaces("checkpoints", [0]).gather("damage", []) == [[]]
