"""Counts of batches taken: of every feed, and of some that are gone."""

from feedline.agreement import taken as module
from feedline.agreement.taken import counts, more_than, taken_of


def test_counts_of_feeds_that_are_gone_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(module, "_of_feeds", set())
    module._gone.clear()
    training = taken_of("training")
    for number in range(1000):
        taken_of(f"evaluation {number}").batches = 7
        training.batches += 1
    assert len(counts()) == module._KEPT + 1
    assert counts()["training"] == 1000
    assert counts()["evaluation 999"] == 7
    del training  # as when main returns: the end of the program tells others of it
    assert counts()["training"] == 1000
    assert more_than({"training": 999, "evaluation 0": 3}) == (999, 1000)
    assert len(module._of_feeds) == 0


def test_a_feed_may_go_after_the_names_of_the_module(monkeypatch):
    """As at the end of the program."""
    taken = taken_of("the last")
    taken.batches = 5
    with monkeypatch.context() as at_exit:
        at_exit.setattr(module, "_gone", None)
        del taken
    assert counts()["the last"] == 5
