"""Options are validated and converted on construction."""

import math
import threading

import numpy as np
import pytest

from feedline import Blocks, Limits, Order, Reading
from feedline._src.options import checked_integer

COUNTS = {"threads": 0, "workers": 0, "buffer": 1, "check_replicas_every": 0}
LIMITS = ["stall_warning_s", "stall_error_s"]
NO_INTEGERS = [1.0, math.nan, "1", None, [1], True, False, np.bool_(True), np.float32(2), np.array([1, 2])]


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


REFUSED = [
    (Limits, {"host_bytes": 0}, ValueError, r"^Limits\.host_bytes must be at least 1, got 0$"),
    (Limits, {"device_bytes": 0.5}, TypeError, r"^Limits\.device_bytes must be an integer, got 0\.5$"),
    (Limits, {"cores": -1}, ValueError, r"^Limits\.cores must be at least 1, got -1$"),
    (Reading, {"limits": 4}, TypeError, r"^Reading\.limits must be a feedline\.Limits, got 4$"),
    (Reading, {"bad_rows": "skip"}, ValueError, r"^Reading\.bad_rows must be one of .*, got 'skip'$"),
    (Reading, {"bad_rows": None}, ValueError, r"^Reading\.bad_rows must be one of .*, got None$"),
    (Reading, {"bad_rows_budget": -1}, ValueError, r"bad_rows_budget must be at least 0, got -1"),
    (Reading, {"bad_rows_budget": 1.0}, ValueError, r"a share of at least 0 and below 1, got 1"),
    (Reading, {"bad_rows_budget": math.nan}, ValueError, r"below 1, got nan"),
    (Reading, {"bad_rows_budget": True}, TypeError, r"a count or a share of the rows, got True"),
    (Reading, {"bad_rows_budget": "1%"}, TypeError, r"a count or a share of the rows, got '1%'"),
    (Reading, {"quarantine": "bad.jsonl"}, ValueError, r'bad_rows="raise" replaces none; leave quarantine out'),
    (Blocks, {"rows": 0, "window": 2}, ValueError, r"^Blocks\.rows must be at least 1, got 0$"),
    (Blocks, {"rows": 4, "window": 1.5}, TypeError, r"^Blocks\.window must be an integer, got 1\.5$"),
    (Order, {"seed": -1}, ValueError, r"^Order\.seed must be at least 0, got -1$"),
    (Order, {"seed": 2**64}, ValueError, r"^Order\.seed must be below 2\^64, got \d+; use fewer bits$"),
    (Order, {"shuffle": 1}, TypeError, r"^Order\.shuffle must be True, False or feedline\.Blocks, got 1$"),
    (Order, {"shuffle": None}, TypeError, r"^Order\.shuffle must be True, False or feedline\.Blocks, got None$"),
]  # fmt: skip
REFUSED += [
    (Reading, {name: value}, ValueError, rf"^Reading\.{name} must be above 0 and at most 1e\+09 seconds, got ")
    for name in LIMITS
    for value in (0, -0.5, math.nan, math.inf, 1.1e9)
]
REFUSED += [
    (Reading, {name: value}, TypeError, rf"^Reading\.{name} must be a number of seconds, got ")
    for name in LIMITS
    for value in (None, True, "30", 30j)
]
REFUSED += [
    (Reading, {name: least - 1}, ValueError, rf"^Reading\.{name} must be at least {least}, got {least - 1}$")
    for name, least in COUNTS.items()
]


@pytest.mark.parametrize(("options", "given", "error", "match"), REFUSED)
def test_a_wrong_value_is_refused(options, given, error, match):
    with pytest.raises(error, match=match):
        options(**given)


@pytest.mark.parametrize("value", [0, 7, 0.0, 0.25, np.int16(7), np.float32(0.5)])
def test_a_budget_is_a_count_or_a_share(value):
    budget = Reading(bad_rows="mask", bad_rows_budget=value).bad_rows_budget
    assert budget == value
    assert type(budget) in (int, float)


def test_the_greatest_and_least_values_are_accepted(tmp_path):
    assert Order(2**64 - 1).seed == 2**64 - 1
    assert Limits(np.int64(5), 1, 1).host_bytes == 5
    assert Reading(bad_rows="mask", quarantine=tmp_path / "bad").quarantine == str(tmp_path / "bad")
    assert Reading(**COUNTS).buffer == 1
    for value in (1, np.float32(0.25), 1e9):
        reading = Reading(stall_warning_s=value, stall_error_s=value)
        assert [type(reading.stall_warning_s), type(reading.stall_error_s)] == [float, float]
    assert reading.stall_error_s < threading.TIMEOUT_MAX
