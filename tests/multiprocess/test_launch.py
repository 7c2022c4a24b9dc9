"""The launch itself: a process that goes wrong hides nothing, and holds up nobody for long."""

import pytest

from .launch import Topology, gave, launch
from .values import joined

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """given(name): what a case of `broken` gave in two processes."""
    folder = tmp_path_factory.mktemp("broken")
    launch(Topology(2, 1), [f"{__package__}.broken"], folder, None, patience_s=3)
    return lambda name: joined([gave(folder, name, process) for process in range(2)])


def test_the_processes_are_joined_and_each_has_devices_of_its_own(given):
    assert given("works") == {"processes": 2, "local": [[True, False], [False, True]]}


def test_the_traceback_of_one_process_is_told(given):
    with pytest.raises(AssertionError, match=r"process 1: Traceback(.|\n)*ArithmeticError: as it was told to"):
        given("fails_on_one")


def test_processes_that_disagree_are_found_out(given):
    with pytest.raises(AssertionError, match="the processes disagree"):
        given("disagrees")


@pytest.mark.parametrize("name", ["hangs_on_one", "comes_after"])
def test_a_process_that_hangs_is_ended_and_tells_where_it_was(given, name):
    with pytest.raises(AssertionError, match=rf"process 1: it ended before it had done {name}(.|\n)*broken\.py"):
        given(name)
