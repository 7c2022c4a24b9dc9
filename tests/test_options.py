"""Options are validated on construction, and immutable."""

import dataclasses
import math
import threading

import numpy as np
import pytest

from feedline import Limits, Order, Reading
from feedline._src.options import checked_integer

COUNTS = {"threads": 0, "workers": 0, "buffer": 1, "check_replicas_every": 0}
LIMITS = ["stall_warning_s", "stall_error_s"]
NO_INTEGERS = [1.0, math.nan, "1", None, [1], True, False, np.bool_(True), np.float32(2), np.array([1, 2])]


def test_defaults():
    assert Order() == Order(seed=0, shuffle=True)
    assert dataclasses.asdict(Reading()) == {
        "threads": None,
        "workers": 0,
        "buffer": 2,
        "bad_rows": "raise",
        "bad_rows_budget": 0.001,
        "quarantine": None,
        "restart": 0,
        "stall_warning_s": 30.0,
        "stall_error_s": 300.0,
        "check_replicas_every": 0,
        "limits": {"host_bytes": None, "device_bytes": None, "cores": None},
    }


@pytest.mark.parametrize("options", [Order(3), Reading(threads=4)])
def test_frozen_and_hashable_and_compared_by_value(options):
    for field in dataclasses.fields(options):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(options, field.name, 1)
    assert dataclasses.replace(options) == options
    assert hash(dataclasses.replace(options)) == hash(options)
    assert options != type(options)()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_numpy_integers_become_integers(dtype):
    assert type(Order(dtype(7)).seed) is int
    reading = Reading(threads=dtype(3), workers=dtype(2), buffer=dtype(5))
    assert reading == Reading(threads=3, workers=2, buffer=5)
    assert [type(getattr(reading, name)) for name in COUNTS] == [int] * len(COUNTS)
    assert hash(Order(dtype(7))) == hash(Order(7))
    assert type(checked_integer("x", np.array(7, dtype), at_least=0)) is int


@pytest.mark.parametrize("value", NO_INTEGERS)
@pytest.mark.parametrize("name", ["Order.seed", *(f"Reading.{name}" for name in COUNTS)])
def test_a_value_that_is_not_an_integer_is_refused(name, value):
    if name == "Reading.threads" and value is None:
        return
    options, field = name.split(".")
    with pytest.raises(TypeError, match=rf'^{name} must be an integer,( or "auto",)? got ') as error:
        {"Order": Order, "Reading": Reading}[options](**{field: value})
    assert str(error.value).endswith(f"got {value!r}")


def test_auto_stands_for_a_number_that_is_found():
    reading = Reading(threads="auto", workers="auto", buffer="auto")
    assert (reading.threads, reading.workers, reading.buffer) == ("auto", "auto", "auto")
    for field in ("threads", "workers", "buffer"):
        with pytest.raises(TypeError, match=f"^Reading.{field} must be an integer, or \"auto\", got 'Auto'$"):
            Reading(**{field: "Auto"})
    with pytest.raises(TypeError, match=r"^Reading\.check_replicas_every must be an integer, got 'auto'$"):
        Reading(check_replicas_every="auto")


@pytest.mark.parametrize("name", ["host_bytes", "device_bytes", "cores"])
def test_limits_are_positive_integers(name):
    assert getattr(Limits(**{name: np.int64(5)}), name) == 5
    with pytest.raises(ValueError, match=rf"^Limits\.{name} must be at least 1, got 0$"):
        Limits(**{name: 0})
    with pytest.raises(TypeError, match=rf"^Limits\.{name} must be an integer, got 0\.5$"):
        Limits(**{name: 0.5})


def test_limits_of_a_reading_are_limits():
    with pytest.raises(TypeError, match=r"^Reading\.limits must be a feedline\.Limits, got 4$"):
        Reading(limits=4)


def test_seeds_fill_64_bits():
    assert Order(2**64 - 1).seed == 2**64 - 1
    with pytest.raises(
        ValueError, match=r"^Order\.seed must be below 2\^64, got 18446744073709551616; use fewer bits$"
    ):
        Order(2**64)
    with pytest.raises(ValueError, match=r"^Order\.seed must be at least 0, got -1$"):
        Order(-1)


@pytest.mark.parametrize("shuffle", [1, 0, None, "yes", np.bool_(True)])
def test_shuffle_is_a_bool(shuffle):
    with pytest.raises(TypeError, match=r"^Order\.shuffle must be True, False or feedline\.Blocks, got "):
        Order(shuffle=shuffle)


@pytest.mark.parametrize(("name", "least"), COUNTS.items())
def test_counts_have_a_least_value(name, least):
    assert getattr(Reading(**{name: least}), name) == least
    with pytest.raises(ValueError, match=rf"^Reading\.{name} must be at least {least}, got {least - 1}$"):
        Reading(**{name: least - 1})


@pytest.mark.parametrize("value", ["skip", None, True, "Raise"])
def test_bad_rows_are_raised_or_replaced_and_nothing_else(value):
    with pytest.raises(
        ValueError, match=r"^Reading\.bad_rows must be one of \('raise', 'substitute', 'mask'\), got "
    ):
        Reading(bad_rows=value)


@pytest.mark.parametrize(
    ("value", "kept"), [(0, 0), (7, 7), (np.int16(7), 7), (0.0, 0.0), (0.25, 0.25), (np.float32(0.5), 0.5)]
)
def test_a_budget_is_a_count_or_a_share(value, kept):
    budget = Reading(bad_rows="mask", bad_rows_budget=value).bad_rows_budget
    assert (budget, type(budget)) == (kept, type(kept))


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (-1, ValueError, r"bad_rows_budget must be at least 0, got -1"),
        (1.0, ValueError, r"a share of at least 0 and below 1, got 1"),
        (-0.1, ValueError, r"below 1, got -0\.1"),
        (math.nan, ValueError, r"below 1, got nan"),
        (True, TypeError, r"a count or a share of the rows, got True"),
        ("1%", TypeError, r"a count or a share of the rows, got '1%'"),
        (None, TypeError, r"a count or a share of the rows, got None"),
    ],
)
def test_a_wrong_budget_is_refused(value, error, match):
    with pytest.raises(error, match=match):
        Reading(bad_rows="mask", bad_rows_budget=value)


def test_a_quarantine_is_for_rows_that_are_replaced(tmp_path):
    assert Reading(bad_rows="mask", quarantine=tmp_path / "bad").quarantine == str(tmp_path / "bad")
    with pytest.raises(ValueError, match=r'bad_rows="raise" replaces none; leave it out, or use'):
        Reading(quarantine="bad.jsonl")


@pytest.mark.parametrize("name", LIMITS)
class TestLimitsOfAStall:
    @pytest.mark.parametrize("value", [1, 0.5, np.int64(3), np.float32(0.25), 1e9])
    def test_any_positive_number_becomes_a_float(self, name, value):
        found = getattr(Reading(**{name: value}), name)
        assert type(found) is float
        assert found == value

    @pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, math.inf, 1.1e9])
    def test_out_of_range(self, name, value):
        with pytest.raises(
            ValueError, match=rf"^Reading\.{name} must be above 0 and at most 1e\+09 seconds, got "
        ):
            Reading(**{name: value})

    @pytest.mark.parametrize("value", [None, True, "30", [30], 30j])
    def test_no_number(self, name, value):
        with pytest.raises(TypeError, match=rf"^Reading\.{name} must be a number of seconds, got ") as error:
            Reading(**{name: value})
        assert str(error.value).endswith(f"got {value!r}")


def test_the_longest_limit_is_one_that_a_thread_can_wait():
    assert Reading(stall_error_s=1e9).stall_error_s < threading.TIMEOUT_MAX
