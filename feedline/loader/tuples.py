"""States of Grain's iterators as JSON values and back: JSON makes lists of tuples, and Grain compares. Pure."""

from __future__ import annotations

import copy
from typing import Any

_MARK = "__tuple__"


def marked(state: Any) -> Any:
    """A copy in which each tuple is a dict that says so.

    Example:
      >>> marked({"slice": (2, 5), "index": [0]})
      {'slice': {'__tuple__': [2, 5]}, 'index': [0]}
    """
    if isinstance(state, dict):
        return {key: marked(value) for key, value in state.items()}
    if type(state) is list:
        return [marked(value) for value in state]
    if type(state) is tuple:
        return {_MARK: [marked(value) for value in state]}
    return copy.deepcopy(state)


def unmarked(state: Any) -> Any:
    """What was marked, with its tuples.

    Example:
      >>> unmarked(marked({"slice": (2, 5), "index": [0]}))
      {'slice': (2, 5), 'index': [0]}
    """
    if isinstance(state, dict):
        if state.keys() == {_MARK}:
            return tuple(unmarked(value) for value in state[_MARK])
        return {key: unmarked(value) for key, value in state.items()}
    return [unmarked(value) for value in state] if type(state) is list else copy.deepcopy(state)
