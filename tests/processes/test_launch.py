"""The launch of these tests: errors and hangs of one process are shown, and do not block the others for long."""

import pytest

from .launch import Topology, launch, result_of
from .values import combined

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """given(name): what a case of `broken` returned in two processes."""
    folder = tmp_path_factory.mktemp("broken")
    launch(Topology(2, 1), [f"{__package__}.broken"], folder, None, patience_s=3)
    return lambda name: combined([result_of(folder, name, process) for process in range(2)])


def test_the_processes_have_joined_and_each_has_its_own_devices(given):
    assert given("works") == {"processes": 2, "local": [[True, False], [False, True]]}


def test_the_traceback_of_one_process_is_shown(given):
    with pytest.raises(AssertionError, match=r"process 1: Traceback(.|\n)*ArithmeticError: as it was told to"):
        given("fails_on_one")


def test_different_values_of_processes_fail_the_test(given):
    with pytest.raises(AssertionError, match="the processes disagree"):
        given("disagrees")


@pytest.mark.parametrize("name", ["hangs_on_one", "comes_after"])
def test_a_process_that_hangs_is_ended_and_shows_its_stack(given, name):
    with pytest.raises(AssertionError, match=rf"process 1: it ended before it had done {name}(.|\n)*broken\.py"):
        given(name)
