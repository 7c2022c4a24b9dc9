"""Converts states of Grain's iterators to JSON values and back, and compares their form. Pure.

JSON turns tuples into lists, and Grain does not accept a list in place of a tuple.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

_MARK = "__tuple__"


def marked(state: Any) -> Any:
    """A copy in which each tuple is a dict with the key `__tuple__`.

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
    """The inverse of `marked`: a copy with the tuples restored.

    Example:
      >>> unmarked(marked({"slice": (2, 5), "index": [0]}))
      {'slice': (2, 5), 'index': [0]}
    """
    if isinstance(state, dict):
        if state.keys() == {_MARK}:
            return tuple(unmarked(value) for value in state[_MARK])
        return {key: unmarked(value) for key, value in state.items()}
    return [unmarked(value) for value in state] if type(state) is list else copy.deepcopy(state)


def difference(state: Any, fresh: Any, name: str = "it") -> str | None:
    """Describes how the form of a state differs from that of a new iterator's state; None if it does not.

    The types in the state of a Grain iterator never change, but for None: an inner iterator has not begun, or has
    ended. Elements of lists are not compared: interleaving keeps iterators of different forms in one place.

    Example:
      >>> difference({"parent": {"next_index": 1.5}}, {"parent": {"next_index": 0}})
      'parent.next_index must be of type int, and is 1.5'
      >>> difference({"next_index": 7}, {"next_index": 0})
    """
    if fresh is None or (state is None and isinstance(fresh, dict | list | tuple)):
        return None
    kind = _kind(fresh)
    if _kind(state) is not kind:
        return f"{name} must be of type {kind.__name__}, and is {repr(state)[:100]}"
    if kind is not dict or not fresh:
        return None
    if state.keys() != fresh.keys():
        return f"{name} must have the keys {sorted(fresh, key=str)}, and has {sorted(state, key=str)}"
    parts = (difference(state[key], fresh[key], key if name == "it" else f"{name}.{key}") for key in fresh)
    return next(filter(None, parts), None)


def _kind(value: Any) -> type:
    return int if isinstance(value, np.integer) else type(value)
