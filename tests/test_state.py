"""A state is refused over other data, and the error names the field. Digests never change."""

import copy
from typing import Any

import pytest

from feedline._src.order.schedule import Cursor
from feedline._src.state import FIELDS, check, check_lanes, digest, make

FINGERPRINT: dict[str, Any] = {
    "rows": 60_000,
    "spec": {"batch['image']": ["uint8", [28, 28]], "batch['label']": ["int32", []]},
    "data": "0123456789abcdef0123456789abcdef",
    "order": {"seed": 7, "shuffle": True},
    "format": "columns",
}
OTHERS: dict[str, Any] = {
    "rows": 60_001,
    "spec": {"batch['image']": ["uint8", [28, 29]], "batch['label']": ["int32", []]},
    "data": "f" * 32,
    "order": {"seed": 8, "shuffle": True},
    "format": "records",
}
OF_A_STREAM = {**FINGERPRINT, "rows": None, "order": None, "format": "stream"}
STATE = make(12, Cursor(3, 456), FINGERPRINT, None)


def test_a_state_shares_nothing_with_the_feed_that_made_it():
    fingerprint, lanes = copy.deepcopy(OF_A_STREAM), {"0": {"next_index": 5}}
    state = make(1, Cursor(0, 8), fingerprint, lanes)
    state["fingerprint"]["spec"]["batch['image']"][1].append(3)
    state["lanes"]["0"]["next_index"] = 6
    assert fingerprint == OF_A_STREAM
    assert lanes == {"0": {"next_index": 5}}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_differs_is_named_and_only_its_own_permission_lets_it_pass(field):
    saved = {**STATE, "fingerprint": {**FINGERPRINT, field: OTHERS[field]}}
    told = (
        rf"^the state was saved over other data: its '{field}' is .*, this feed's is .*allow=\(\"{field}\",\)\)$"
    )
    for allow in (set(), set(FIELDS) - {field}):
        with pytest.raises(ValueError, match=told) as error:
            check(saved, FINGERPRINT, allow)
    for allow in ([field], FIELDS):
        assert check(saved, FINGERPRINT, allow) == (12, Cursor(3, 456))
    for value in (OTHERS[field], FINGERPRINT[field]):
        assert repr(value)[:100] in str(error.value)


@pytest.mark.parametrize("allow", ["rows", "", ("row",), ("rows", "version")])
def test_permissions_that_name_no_field_are_refused(allow):
    with pytest.raises(
        ValueError, match=r"^allow must be a collection of fields out of \('rows', .*\), got "
    ) as error:
        check(STATE, FINGERPRINT, allow)
    assert str(error.value).endswith(f"got {allow!r}")


@pytest.mark.parametrize("name", ["step", "epoch", "position"])
@pytest.mark.parametrize("value", [None, True, -1, 2**63, 1.0, "1"])
def test_negative_or_non_integer_numbers_are_refused(name, value):
    with pytest.raises(
        ValueError, match=rf"^a state's '{name}' must be an integer in \[0, 2\^63\), got "
    ) as error:
        check({**STATE, name: value}, FINGERPRINT, ())
    assert str(error.value).endswith(f"got {value!r}")


A, B = {"next_index": 3}, {"next_index": 7}


@pytest.mark.parametrize(
    ("position", "lanes", "told"),
    [
        (6, [1], r"'lanes' must be a dict with a state for each lane, got \[1\]"),
        (6, {"0": A, "1": None}, "at position 6 every lane has begun, and lane 1 has no state"),
        (6, {"0": None}, "at position 6 every lane has begun, and lane 0 has no state"),  # lane of another process
        (0, {"0": None, "1": A}, r"at position 0 no lane has begun, and lane 1 has the state \{'next_index': 3\}"),
        (6, {"0": A, "2": B}, r"the lanes of this stream are named '0' to '1', and the state has a lane '2'"),
        (6, {"0": A, 1: B}, r"the lanes of this stream are named '0' to '1', and the state has a lane 1"),
        (7, {"0": A, "1": B}, "each of 2 lanes gives the same .* a multiple of 2, and it is 7"),
    ],
)
def test_an_inconsistent_state_of_lanes_is_refused(position, lanes, told):
    with pytest.raises(ValueError, match=f"{told}.*; pass what feed.get_state.* returned, unchanged$"):
        check_lanes({"position": position, "lanes": lanes}, 2, ["1"])
    assert check_lanes({"position": 6, "lanes": {"0": A, "1": B}}, 2, ["1"]) == {"0": A, "1": B}
    assert check_lanes({"position": 6, "lanes": {"1": B}}, 2, ["1"]) == {"1": B}  # what one process saved
    given = {"1": {"next": 3}}
    found = check_lanes({"position": 6, "lanes": given}, 2, ["1"])
    given["1"]["next"] = 4  # the program changes its own dict later
    assert found == {"1": {"next": 3}}
    assert check_lanes({"position": 0, "lanes": {"0": None, "1": None}}, 2, ["1"]) is None


def test_digests_never_change():
    assert digest(FINGERPRINT) == "4fc497877bddb3faa1c1694ba44dbdb7"
    assert digest(None) == "74234e98afe7498fb5daf1f36ac2d78a"
    assert digest({"é": [1, 2.5, "ß", True, None]}) == "ef275c9e53420c2eb080edbb2146fb9d"
