"""Processes that save lanes at different places are found, and those that save in another order are not blamed."""

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
def save(services, monkeypatch, tmp_path):
    """Saves as one of two processes."""
    monkeypatch.setattr(module, "out_of_step", feedline.ProcessError)  # which ends no process here

    def save(process, folder, position):
        monkeypatch.setattr(module, "coordination", lambda: services[process])
        module.compare_save(BOTH, tmp_path / folder, 0, position)

    return save


def test_saves_to_one_folder_at_different_places_are_out_of_step(save):
    save(0, "5", 16)
    told = r"step: in the lanes that are saved to \S*/5, .*process 0 .*position 16, and .*process 1 .*position 20"
    with pytest.raises(feedline.ProcessError, match=told):
        save(1, "5", 20)


def test_streams_may_be_saved_in_another_order_by_each_process(save):
    for process, order in ((0, ("training", "evaluation")), (1, ("evaluation", "training"))):
        for stream in order:
            save(process, f"{stream}/5", {"training": 40, "evaluation": 8}[stream])


def test_a_process_may_be_ahead_and_save_to_a_folder_again(save):
    save(0, "latest", 16)
    save(0, "latest", 32)
    save(1, "latest", 16)
    save(1, "latest", 32)


def test_what_one_process_has_found_is_gathered_by_all(services, monkeypatch):
    places = []
    for service in services:
        monkeypatch.setattr(module, "coordination", lambda service=service: service)
        monkeypatch.setattr(module, "counted", lambda kind, processes: f"feedline/{kind}/1")
        places.append(module.StepPlaces("checkpoints", BOTH))
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda each, value: each.gather("damage", value), places, [[], [1, ["params.w"]]])
        assert list(found) == [[[], [1, ["params.w"]]]] * 2
    monkeypatch.setattr(module, "coordination", lambda: None)
    assert module.StepPlaces("checkpoints", [0]).gather("damage", []) == [[]]
