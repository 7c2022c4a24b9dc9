"""What is observed in the calls of one compiled function."""

from __future__ import annotations

import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from feedline._src.tools.doctor.batches import Leaf, Values
from feedline._src.tools.doctor.inside.fetches import host_arrays, quietly
from feedline._src.tools.doctor.inside.growth import Growth
from feedline._src.tools.doctor.inside.lines import user_line
from feedline._src.tools.doctor.inside.probe import Probe
from feedline._src.tools.doctor.inside.program import unrolled
from feedline._src.tools.doctor.inside.record import Record

_SAMPLED = range(1, 4)
"""The calls, from 0, of which the arguments are looked at."""
_LOOP = 3
"""A function that was called so often is a step of a loop."""
_MOST_BYTES = 64 << 20
_OLDER = 4
"""Calls before the last of which the results are known."""
_MOST_COMPILATIONS = 50


class Function:
    """One compiled function.

    Args:
      name: of the function; `line` is where it was jitted, or first called.
    """

    def __init__(self, record: Record, name: str, line: str) -> None:
        self.name, self.line, self.called_from = name, line, ""
        self.calls = 0
        self._record = record
        self._began = self._ended = 0.0
        self._argument_bytes = 0
        self._outputs: dict[int, weakref.ref[Any]] = {}
        self._older: deque[dict[int, weakref.ref[Any]]] = deque(maxlen=_OLDER)
        self._arguments: dict[str, weakref.ref[Any]] = {}
        self._fed_back_bytes = self._fed_back_calls = 0
        self._samples: dict[str, Leaf] = {}
        self._new_in: Counter[str] = Counter()
        self._signatures: list[dict[str, Any]] = []
        self._unrolled: Any = None

    def call(self, function: Callable[..., Any], trace: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
        """Call the function, and observe what comes before and after. On the main thread only."""
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return function(*args, **kwargs)
        if not self.calls:
            self._record.add(self)
            self.called_from = user_line()
        with quietly(), self._record.guarded("arguments"):
            self._before(trace, args, kwargs)
        compiled, seconds, began = self._record.compiled, self._record.compile_s, time.perf_counter()
        self._record.inside_call = True
        try:
            result = function(*args, **kwargs)
        finally:
            self._record.inside_call = False
        self._ended = time.perf_counter()
        if self.calls == 1:
            self._began = began  # the first call compiled
        with quietly(), self._record.guarded("results"):
            if self._record.compiled > compiled:
                self._compiled(_named(args, kwargs), self._record.compile_s - seconds)
            if given := host_arrays(leaves):
                size = sum(array.nbytes for array in given)
                self._record.moved("to device", f"{self.name}() of NumPy arrays", user_line(), size, 0.0)
            self._after(leaves, result)
        self.calls += 1
        self._record.last = self
        self._record.looped |= self.calls >= _LOOP
        return result

    def _before(self, trace: Any, args: Any, kwargs: Any) -> None:
        """Look at the arguments of the first calls only: to name them takes some 10 µs each."""
        if self.calls and self.calls not in _SAMPLED:
            return
        named = _named(args, kwargs)
        if self.calls == 1 and trace is not None:
            with self._record.guarded("program"):
                self._unrolled = unrolled(trace(*args, **kwargs).jaxpr)
        if self.calls in _SAMPLED:
            for name, leaf in named.items():
                if self._is_new(name, leaf):
                    self._new_in[name] += 1
                    self._sample(name, leaf)
        self._argument_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in named.values())
        self._arguments = {name: weakref.ref(leaf) for name, leaf in named.items() if _is_array(leaf)}

    def _is_new(self, name: str, leaf: Any) -> bool:
        """Whether this argument is another array than in the last call, and not one that was returned then."""
        if isinstance(leaf, np.ndarray):
            return True
        known = self._arguments.get(name)
        return _is_array(leaf) and (known is None or known() is not leaf) and not self._was_returned(leaf)

    def is_older(self, array: Any) -> bool:
        """Whether an earlier call than the last returned this array. To wait for it holds no step up."""
        found = [refs[id(array)]() is array for refs in self._older if id(array) in refs]
        return any(found) and not self._was_returned(array)

    def _was_returned(self, leaf: Any) -> bool:
        """Whether the last call returned this array."""
        returned = self._outputs.get(id(leaf))
        return returned is not None and returned() is leaf

    def _sample(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, np.ndarray):
            devices, replicated, part = 1, False, leaf
        else:
            devices, replicated = leaf.sharding.num_devices, leaf.sharding.is_fully_replicated
            part = leaf.addressable_data(0)
        values = Values.of(np.asarray(part)) if part.nbytes <= _MOST_BYTES else Values(False, 0, 0)
        if name in self._samples:
            values = values.both(self._samples[name].values)
        self._samples[name] = Leaf(name, leaf.shape, str(leaf.dtype), devices, replicated, values)

    def _compiled(self, named: dict[str, Any], seconds: float) -> None:
        signature = {"line": user_line(), "call": self.calls, "seconds": seconds}
        if len(self._signatures) < _MOST_COMPILATIONS:
            self._signatures.append({**signature, "arguments": {k: _described(v) for k, v in named.items()}})
        if not self.calls:
            self._record.jitted[self.line, self.name] += 1

    def _after(self, leaves: list[Any], result: Any) -> None:
        outputs = [leaf for leaf in jax.tree.leaves(result) if _is_array(leaf)]
        kinds = Counter(_kind(leaf) for leaf in outputs)
        size = 0
        for leaf in leaves:
            if self._was_returned(leaf) and not leaf.is_deleted() and kinds[_kind(leaf)]:
                kinds[_kind(leaf)] -= 1
                size += leaf.nbytes
        if size:
            self._fed_back_bytes, self._fed_back_calls = size, self._fed_back_calls + 1
        self._older.append(self._outputs)
        self._outputs = {id(leaf): weakref.ref(leaf) for leaf in outputs}
        if outputs and "growth" not in self._record.parts and self.calls == _LOOP:
            self._record.parts |= {"growth": Growth(self), "probe": Probe()}
        growth = self._record.parts.get("growth")
        if isinstance(growth, Growth) and growth.function is self:
            growth.after_step()
        if outputs:
            self._record.met(outputs[0])
        self._record.write_now_and_then()

    def as_object(self) -> dict[str, Any]:
        """JSON values."""
        new = [leaf for name, leaf in self._samples.items() if self._new_in[name] >= min(self.calls - 1, 2)]
        return {
            "name": self.name,
            "line": self.line,
            "called_from": self.called_from,
            "calls": self.calls,
            "seconds": self._ended - self._began,
            "argument_bytes": self._argument_bytes,
            "compilations": list(self._signatures),
            "fed_back_bytes": self._fed_back_bytes,
            "fed_back_calls": self._fed_back_calls,
            "batch": [leaf._asdict() | {"values": leaf.values._asdict()} for leaf in new],
            "unrolled": self._unrolled and self._unrolled._asdict(),
        }


def _named(args: Any, kwargs: Any) -> dict[str, Any]:
    """The leaves of all arguments by name, as "argument 1['image']" or "lr"."""
    found = {}
    for i, argument in enumerate(args):
        for path, leaf in jax.tree_util.tree_leaves_with_path(argument):
            found[f"argument {i}{jax.tree_util.keystr(path)}"] = leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(kwargs):
        found[jax.tree_util.keystr(path)] = leaf
    return found


def _is_array(leaf: Any) -> bool:
    """Whether this is an array of JAX with numbers: no key of a random generator."""
    return isinstance(leaf, jax.Array) and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)


def _kind(leaf: Any) -> tuple[Any, ...]:
    return leaf.shape, leaf.dtype


def _described(leaf: Any) -> str:
    """What a compiled program depends on."""
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{list(leaf.shape)} of NumPy"
    if not _is_array(leaf):
        return f"{type(leaf).__name__} {leaf!r}"[:80]
    spec = getattr(leaf.sharding, "spec", None)
    where = f"on {leaf.sharding.num_devices} devices" + (f" as {spec}" if spec is not None else "")
    weak = ", weakly typed" if leaf.weak_type else ""
    return f"{leaf.dtype}{list(leaf.shape)} {where}{weak}{'' if leaf.committed else ', not committed'}"
