"""Observes a process of a job: its compiled functions, their calls and compilations, its loop, its memory.

Of jax, only `jax.jit` and `jax.pmap` are replaced, by wrappers. The functions that these return behave like the
usual ones, and a hook that fails never changes what the job computes. The main thread is taken for the training
thread. `job` derives findings from the observations.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from feedline._src.tools.doctor.checks import Leaf
from feedline._src.tools.doctor.findings import first_three
from feedline._src.tools.doctor.sampling import Sampler, user_line
from feedline._src.tools.doctor.unrolled import unrolled
from feedline._src.trainer.memory import MemoryWatch

LOOP = 3
"""A function with at least this many calls is taken to be called in a loop."""
_COMPILED = "/jax/core/compile/backend_compile_duration"
_MOVED_BYTES = 256  # smaller arrays count as scalars, such as learning rates
_LOOKED_AT = range(4)  # numbers of the calls whose arguments and results are examined


class Record:
    """What was observed in this process. The main thread fills it; the sampler's thread saves it every 2 s."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self.functions: dict[tuple[str, str], Function] = {}  # by name, and the line that made them
        self.compiled: dict[tuple[str, str], dict[str, Any]] = {}  # by line and name
        self.last_compiled: dict[str, Any] | None = None
        self.last_outputs: list[weakref.ref[Any]] = []  # two arrays that the last observed call returned
        self.inside_call = False  # whether the main thread is in a call of a compiled function
        self.step: Function | None = None  # its calls are the steps of the loop; None before the loop
        self.failures: dict[str, str] = {}  # {the hook that failed: why}
        self._write, self._process = write, os.getpid()
        self._writing = threading.Lock()

    def begin_loop(self, step: Function) -> None:
        """Begin to observe a loop, whose steps are the calls of `step`."""
        self.memory = MemoryWatch(every=5, warm_up=10, on_growth="ignore")
        self.sampler = Sampler(self.guarded, self.write)
        self.step = step

    def count_compilation(self, event: str, duration_secs: float, **about: Any) -> None:
        """Listen to `jax.monitoring`. Before the loop, compilations outside observed calls are counted as one."""
        if event == _COMPILED and threading.current_thread() is threading.main_thread():
            with self.guarded("compilations"):
                key = user_line(sys._getframe()), str(about.get("fun_name", "a program"))
                found = self.compiled.setdefault(key, {"times": 0, "seconds": 0.0, "change": ""})
                found["times"] = found["times"] + 1 if self.step or self.inside_call else 1
                found["seconds"] += duration_secs if found["times"] > 1 else 0
                self.last_compiled = found

    def devices_idle(self) -> bool | None:
        """Whether the first device has computed what the last call returned. None: the arrays no longer exist."""
        last = [array for reference in self.last_outputs if (array := reference()) is not None]
        ready = [array.addressable_data(0).is_ready() for array in last if not array.is_deleted()]
        return all(ready) if ready else None

    @contextlib.contextmanager
    def guarded(self, where: str) -> Iterator[None]:
        """Record an exception in the doctor's own code as a failure, so that the job continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  reported as something that could not be checked
            self.failures[where] = f"{type(error).__name__}: {error}"

    def write(self) -> None:
        """Replace the file of this process. A process that was forked from this one writes nothing."""
        if os.getpid() == self._process:
            with self._writing, self.guarded("writing"), contextlib.suppress(OSError):  # the doctor has ended
                self._write(self.as_object())

    def as_object(self) -> dict[str, Any]:
        """All that was observed, as JSON values."""
        growths = self.memory.growths() if self.step else []
        return {
            "failures": dict(self.failures),
            "functions": [function.as_object() for function in list(self.functions.values())],
            "compiled": [{"line": line, "name": name, **how} for (line, name), how in list(self.compiled.items())],
            "samples": self.sampler.as_object() if self.step else None,
            "steps": self.step.calls if self.step else 0,
            "growths": [{"text": str(growth), **growth._asdict()} for growth in growths],
        }


def install(record: Record) -> None:
    """Wrap `jax.jit` and `jax.pmap`, and listen for compilations, until this process ends."""
    jax.monitoring.register_event_duration_secs_listener(record.count_compilation)
    jax.jit, jax.pmap = _watching(record, jax.jit), _watching(record, jax.pmap)
    atexit.register(record.write)


def _watching(record: Record, usual: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `jax.jit` or `jax.pmap`. jax.jit(static_argnums=0), without a function, returns a decorator."""

    @functools.wraps(usual)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        function = usual(*args, **kwargs)
        return watched(function) if args or "fun" in kwargs else lambda decorated: watched(function(decorated))

    def watched(function: Any) -> Any:
        """A proxy. Functions with the same name, made at the same line, share one `Function`."""
        with record.guarded("functions"):
            key = str(getattr(function, "__name__", "a function")), user_line(sys._getframe())
            function = Watched(function, record.functions.get(key) or Function(record, *key))
        return function  # noqa: RET504  not watched if the hook failed

    return wrapped


class Watched:
    """A proxy of a jitted function, or of a stage of its ahead-of-time compilation: Traced, Lowered, Compiled.

    Attributes, pickling, copying and `isinstance` behave as for the original. What `trace`, `lower` and `compile`
    return is watched, too.
    """

    def __init__(self, original: Any, function: Function) -> None:
        functools.update_wrapper(self, original, updated=())  # __getattr__ is not called for what the class has
        self._watched_original = original
        self._watched_function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched_function.call(self._watched_original, args, kwargs)

    @property  # type: ignore[misc]  # object.__class__ can be set
    def __class__(self) -> Any:
        return type(self._watched_original)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_watched"):  # not set yet; looking it up would recurse
            raise AttributeError(name)
        found = getattr(self._watched_original, name)
        if name not in ("trace", "lower", "compile"):
            return found
        return functools.wraps(found)(lambda *args, **kw: Watched(found(*args, **kw), self._watched_function))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        binds = instance is not None and hasattr(type(self._watched_original), "__get__")
        return types.MethodType(self, instance) if binds else self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self._watched_original, types.FunctionType):  # pickled by name, and copied as itself
            return self.__qualname__
        return self._watched_original.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._watched_original)


class Function:
    """What was observed of one compiled function. Only calls on the main thread are observed."""

    def __init__(self, record: Record, name: str, line: str) -> None:
        self.name, self.line = name, line
        self.calls = 0
        self.argument_bytes = self.numpy_bytes = 0
        self.fed_back: list[int] = []  # for each examined call: bytes of arguments that the previous one returned
        self.unrolled: dict[str, Any] | None = None
        self._record = record
        self._idle_devices = {True: 0, False: 0, None: 0}  # how many calls, by `devices_idle` before each
        self._arguments = weakref.WeakValueDictionary[str, Any]()  # arrays of the last examined call, by name
        self._outputs = weakref.WeakValueDictionary[int, Any]()  # what that call returned, by id
        self._batch: dict[str, Leaf] | None = None  # arguments that were new in each examined call
        self._compiled_for: dict[str, str] = {}

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function, and observe its arguments and results."""
        record, is_observed = self._record, False
        if not record.inside_call and threading.current_thread() is threading.main_thread():
            with record.guarded("arguments"):
                is_observed = self._before(function, args, kwargs)
        if not is_observed:
            return function(*args, **kwargs)
        record.last_compiled, record.inside_call = None, True
        try:
            result = function(*args, **kwargs)
        finally:
            record.inside_call = False
        with record.guarded("results"):
            self._after(args, kwargs, result)
        return result

    def _before(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Examine the arguments. Returns False while jax traces, because the call is part of another program."""
        record = self._record
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            return False
        if not self.calls:
            record.functions[self.name, self.line] = self
        self._idle_devices[record.devices_idle()] += 1
        disabled = jax.config.jax_disable_jit  # type: ignore[attr-defined]  # if set, the job traces nothing
        if self.calls == 1 and hasattr(function, "trace") and not disabled:
            with record.guarded("program"):
                self.unrolled = unrolled(function.trace(*args, **kwargs).jaxpr)
        if self.calls not in _LOOKED_AT:
            return True
        named = _named(args, kwargs)
        if self.calls:
            before = dict.fromkeys(named) if self._batch is None else self._batch
            new = {name: leaf for name, leaf in named.items() if name in before and self._is_new(name, leaf)}
            self._batch = {name: Leaf.of(name, leaf, before[name]) for name, leaf in new.items()}
        large = [leaf for leaf in named.values() if isinstance(leaf, np.ndarray) and leaf.nbytes >= _MOVED_BYTES]
        self.numpy_bytes = sum(leaf.nbytes for leaf in large)
        self.argument_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in named.values())
        arrays = {name: leaf for name, leaf in named.items() if _is_array(leaf)}
        self._arguments = weakref.WeakValueDictionary(arrays)
        return True

    def _is_new(self, name: str, leaf: Any) -> bool:
        """Whether it is a NumPy array, or a JAX array that the last call neither got by this name nor returned."""
        is_other = _is_array(leaf) and self._arguments.get(name) is not leaf and not self._was_returned(leaf)
        return is_other or isinstance(leaf, np.ndarray)

    def _was_returned(self, leaf: Any) -> bool:
        return self._outputs.get(id(leaf)) is leaf

    def _after(self, args: Any, kwargs: Any, result: Any) -> None:
        record = self._record
        if record.last_compiled is not None:
            arguments = {name: _described(leaf) for name, leaf in _named(args, kwargs).items()}
            if self._compiled_for and not record.last_compiled["change"]:
                unchanged = "no argument had changed: jax.jit was called again, or a static argument differs"
                record.last_compiled["change"] = changed(self._compiled_for, arguments) or unchanged
            self._compiled_for = arguments
        outputs = [leaf for leaf in jax.tree.leaves(result) if _is_array(leaf)]
        record.last_outputs = [weakref.ref(leaf) for leaf in (*outputs[:1], *outputs[-1:])]
        if self.calls in _LOOKED_AT:
            kept = [leaf for leaf in jax.tree.leaves((args, kwargs)) if self._was_returned(leaf)]
            self.fed_back.append(sum(leaf.nbytes for leaf in kept if not leaf.is_deleted()))
            self._outputs = weakref.WeakValueDictionary({id(leaf): leaf for leaf in outputs})
        self.calls += 1
        if self.calls == LOOP and record.step is None and outputs:
            record.begin_loop(self)
        if record.step is self:
            record.memory.after_step()

    def as_object(self) -> dict[str, Any]:
        """JSON values."""
        known = self._idle_devices[True] + self._idle_devices[False]
        return {
            **{name: value for name, value in vars(self).items() if not name.startswith("_")},
            "idle_share": self._idle_devices[True] / known if known else 1.0,
            "batch": [leaf._asdict() for leaf in (self._batch or {}).values()],
        }


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """What differs between the arguments of two calls; empty if nothing differs."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return first_three([f"{name}: {before.get(name, 'none')} → {after.get(name, 'none')}" for name in names])


def _named(args: Any, kwargs: Any) -> dict[str, Any]:
    """The leaves of all arguments by name, such as "argument 1['image']" or "['lr']"."""
    trees = {f"argument {i}": argument for i, argument in enumerate(args)} | {"": kwargs}
    return {
        name + jax.tree_util.keystr(path): leaf
        for name, tree in trees.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _is_array(leaf: Any) -> bool:
    """Whether this is a JAX array of numbers, and not of random keys."""
    return isinstance(leaf, jax.Array) and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)


def _described(leaf: Any) -> str:
    """The properties of an argument on which a compiled program depends, as text."""
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype}{list(leaf.shape)} of NumPy"
    if not _is_array(leaf):
        return f"{type(leaf).__name__} {leaf!r}"[:80]
    spec = getattr(leaf.sharding, "spec", None)
    where = f"on {leaf.sharding.num_devices} devices" + (f" as {spec}" if spec is not None else "")
    weak = ", weakly typed" if leaf.weak_type else ""
    return f"{leaf.dtype}{list(leaf.shape)} {where}{weak}{'' if leaf.committed else ', not committed'}"
