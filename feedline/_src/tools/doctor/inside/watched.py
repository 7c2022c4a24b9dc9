"""Wraps `jax.jit` and `jax.pmap`, so that the calls of the functions that they return are observed."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from feedline._src.tools.doctor.batches import Leaf
from feedline._src.tools.doctor.inside.loop import host_bytes
from feedline._src.tools.doctor.inside.program import Unrolled, unrolled
from feedline._src.tools.doctor.inside.record import Record
from feedline._src.tools.doctor.inside.stacks import user_line

_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOOKED_AT = range(1, 11)
"""The calls, from 0, of which arguments and results are compared; of `_SAMPLED`, values are looked at, too."""
_SAMPLED = range(1, 4)
_LOOP = 3
"""A function that was called so often is a step of a loop."""
_MAX_FUNCTIONS = 200


def install(record: Record) -> None:
    """Wrap jax's functions, and listen for compilations. The main thread is taken for the training thread."""
    main = threading.main_thread().ident

    def count_compilation(event: str, duration_secs: float, **about: Any) -> None:
        if event != _COMPILED or threading.get_ident() != main:
            return
        record.compiled += 1
        record.compile_s += duration_secs
        if record.loop and not record.inside_call:
            with record.guarded("compilations"):
                key = user_line(sys._getframe()), str(about.get("fun_name", "a program"))
                found = record.operations.setdefault(key, [0, 0.0])
                found[0] += 1
                found[1] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count_compilation)
    jax.jit = _watching(record, jax.jit)
    jax.pmap = _watching(record, jax.pmap)


def _watching(record: Record, usual: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` or `jax.pmap`, which return a decorator if they get no function: jax.jit(static_argnums=0)."""

    @functools.wraps(usual)
    def made(*args: Any, **kwargs: Any) -> Any:
        function, line = usual(*args, **kwargs), "unknown"
        with record.guarded("lines"):
            line = user_line(sys._getframe())
        if args or "fun" in kwargs:
            return watched(function, line)
        return lambda decorated: watched(function(decorated), line)

    def watched(function: Any, line: str) -> Any:
        """A proxy. Functions of one name that are made at one line are observed together."""
        proxy = function
        with record.guarded("functions"):
            name = str(getattr(function, "__name__", "a function"))
            observed = record.functions.get((name, line))
            proxy = WatchedCallable(function, observed or Function(record, name, line, usual.__name__ == "pmap"))
        return proxy  # noqa: RET504  it is the function itself if the hook failed

    return made


class Watched:
    """A proxy of what jax returns: a jitted function, or a stage of compiling it ahead.

    Attributes, pickling, copies and `isinstance` are those of the original. What `trace`, `lower` and `compile`
    return is watched, too.
    """

    def __init__(self, original: Any, function: Function) -> None:
        for name in functools.WRAPPER_ASSIGNMENTS:  # what a class has itself is not asked of __getattr__
            if hasattr(original, name):
                setattr(self, name, getattr(original, name))
        self._watched_original = original
        self._watched_function = function

    @property  # type: ignore[misc]  # object's can be set
    def __class__(self) -> Any:
        return type(self._watched_original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_watched"):  # while an instance is being made
            raise AttributeError(name)
        found = getattr(self._watched_original, name)
        if name not in ("trace", "lower", "compile"):
            return found

        @functools.wraps(found)
        def stage(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            return (WatchedCallable if callable(result) else Watched)(result, self._watched_function)

        return stage

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self._watched_original, types.FunctionType):  # pickled by its name, and copied as itself
            return self.__qualname__
        return self._watched_original.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._watched_original)


class WatchedCallable(Watched):
    """A proxy that can be called: a jitted function, or a program that was compiled ahead."""

    def __init__(self, original: Any, function: Function) -> None:
        super().__init__(original, function)
        self._watched_arguments: Mapping[str, str] | None = None  # of the last call that compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched_function.call(self, self._watched_original, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        binds = instance is not None and hasattr(type(self._watched_original), "__get__")
        return types.MethodType(self, instance) if binds else self


class Function:
    """What was observed of one compiled function. Calls on other threads than the main one are not."""

    def __init__(self, record: Record, name: str, line: str, is_pmap: bool) -> None:
        self.name, self.line, self.is_pmap = name, line, is_pmap
        self.called_from, self.calls = "", 0
        self.argument_bytes = self.numpy_bytes = 0
        self.made, self.compile_s, self.made_again_s = 0, 0.0, 0.0  # functions that were compiled
        self.compiled_again, self.compiled_again_s, self.change = 0, 0.0, ""  # one function, after its first time
        self.fed_back: list[int] = []  # bytes in each call that was looked at
        self._record, self._main = record, threading.main_thread().ident
        self._dry = self._queued = 0  # calls before which the devices had, or had not, done all work
        self._arguments: dict[str, weakref.ref[Any]] = {}
        self._outputs: dict[int, weakref.ref[Any]] = {}
        self._batch: dict[str, Leaf] = {}
        self._new_in: Counter[str] = Counter()
        self._unrolled: Unrolled | None = None

    def call(self, watched: WatchedCallable, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function, and observe what comes before and after."""
        record, ready = self._record, False
        if not record.inside_call and threading.get_ident() == self._main:
            with record.guarded("arguments"):
                ready = self._before(function, args, kwargs)
        if not ready:
            return function(*args, **kwargs)
        compiled, seconds = record.compiled, record.compile_s
        record.inside_call = True
        try:
            result = function(*args, **kwargs)
        finally:
            record.inside_call = False
        with record.guarded("results"):
            if record.compiled > compiled:
                self._compiled(watched, _named(args, kwargs), record.compile_s - seconds)
            self._after(args, kwargs, result)
        return result

    def _before(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Look at the arguments. Returns False while jax traces: the call is a part of another program."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return False
        if not self.calls and len(self._record.functions) < _MAX_FUNCTIONS:
            self._record.functions[self.name, self.line] = self
        if self._record.loop and self._record.loop.step is self:
            self._record.loop.before_step()
        with self._record.guarded("idle devices"):
            self._count_idle_devices()
        disabled = jax.config.jax_disable_jit  # type: ignore[attr-defined]  # then nothing was traced before
        if self.calls == 1 and hasattr(function, "trace") and not disabled:
            with self._record.guarded("program"):
                self._unrolled = unrolled(function.trace(*args, **kwargs).jaxpr)
        if self.calls and self.calls not in _LOOKED_AT:
            return True
        named = _named(args, kwargs)
        with self._record.guarded("batch"):
            for name, leaf in named.items() if self.calls in _SAMPLED else ():
                if self._is_new(name, leaf):
                    self._new_in[name] += 1
                    self._batch[name] = Leaf.of(name, leaf, self._batch.get(name))
        self.numpy_bytes = host_bytes((args, kwargs))
        self.argument_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in named.values())
        self._arguments = {name: weakref.ref(leaf) for name, leaf in named.items() if _is_array(leaf)}
        return True

    def _count_idle_devices(self) -> None:
        """Note whether the first device has already computed what the last call returned, so that it idles."""
        last = [array for reference in self._record.last if (array := reference()) is not None]
        known = [array.addressable_data(0).is_ready() for array in last if not array.is_deleted()]
        self._dry += bool(known) and all(known)
        self._queued += bool(known) and not all(known)

    def _is_new(self, name: str, leaf: Any) -> bool:
        """Whether this argument is another array than in the last call, and not one that was returned then."""
        if isinstance(leaf, np.ndarray):
            return True
        known = self._arguments.get(name)
        return _is_array(leaf) and (known is None or known() is not leaf) and not self._was_returned(leaf)

    def _was_returned(self, leaf: Any) -> bool:
        """Whether the last call returned this array."""
        returned = self._outputs.get(id(leaf))
        return returned is not None and returned() is leaf

    def _compiled(self, watched: WatchedCallable, named: Mapping[str, Any], seconds: float) -> None:
        """Note what differs from the arguments for which this function was compiled before."""
        arguments = {name: _described(leaf) for name, leaf in named.items()}
        if watched._watched_arguments is not None:
            self.compiled_again += 1
            self.compiled_again_s += seconds
            self.change = self.change or changed(watched._watched_arguments, arguments)
        else:
            self.made += 1
            self.made_again_s += seconds if self.made > 1 else 0
            self.compile_s = self.compile_s or seconds
        watched._watched_arguments = arguments

    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        record = self._record
        outputs = [leaf for leaf in jax.tree.leaves(result) if _is_array(leaf)]
        record.last = [weakref.ref(leaf) for leaf in (*outputs[:1], *outputs[-1:])]
        if self.calls == 0 or self.calls in _LOOKED_AT:
            kinds = Counter((leaf.shape, leaf.dtype) for leaf in outputs)
            fed_back = 0
            for leaf in jax.tree.leaves((args, kwargs)):
                if self._was_returned(leaf) and not leaf.is_deleted() and kinds[leaf.shape, leaf.dtype]:
                    kinds[leaf.shape, leaf.dtype] -= 1
                    fed_back += leaf.nbytes
            self.fed_back += [fed_back] * bool(self.calls)
            self._outputs = {id(leaf): weakref.ref(leaf) for leaf in outputs}
            self.called_from = user_line(sys._getframe())
        self.calls += 1
        if self.calls == _LOOP and record.loop is None and outputs:
            record.begin_loop(self)
        if record.loop and record.loop.step is self:
            record.loop.after_step()

    def as_object(self) -> dict[str, Any]:
        """JSON values."""
        new = [leaf for name, leaf in list(self._batch.items()) if self._new_in[name] >= min(self.calls - 1, 2)]
        return {
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
            "dry_share": self._dry / (self._dry + self._queued) if self._dry + self._queued else 1.0,
            "batch": [leaf._asdict() | {"values": leaf.values._asdict()} for leaf in new],
            "unrolled": self._unrolled and self._unrolled._asdict(),
        }


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What differs between the arguments of two calls; empty if nothing does.

    Example:
      >>> changed({"argument 0": "float32[8]", "lr": "float 0.1"}, {"argument 0": "float32[7]", "lr": "float 0.1"})
      'argument 0: float32[8] → float32[7]'
    """
    found = [
        f"{name}: {before.get(name, 'none')} → {after.get(name, 'none')}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    return ", ".join(found[:2]) + (f" and {len(found) - 2} more arguments" if len(found) > 2 else "")


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
