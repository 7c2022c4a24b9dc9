"""Wraps `jax.jit`, `jax.pmap` and compiled programs, so that each call of a compiled function is observed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import jax

from feedline._src.tools.doctor.inside import fetches
from feedline._src.tools.doctor.inside.calls import Function
from feedline._src.tools.doctor.inside.lines import user_line
from feedline._src.tools.doctor.inside.record import Record, on_main_thread

_COMPILED = "/jax/core/compile/backend_compile_duration"


def install(record: Record) -> None:
    """Wrap jax's functions."""
    jax.monitoring.register_event_duration_secs_listener(functools.partial(_count_compilation, record))
    jax.jit = _jit(record, jax.jit)
    jax.pmap = _pmap(record, jax.pmap)
    _wrap_compiled(record)
    record.on_first_array = lambda array: fetches.install_on(type(array), record)


def _count_compilation(record: Record, event: str, seconds: float, **about: Any) -> None:
    if event != _COMPILED or not on_main_thread():
        return
    record.compiled += 1
    record.compile_s += seconds
    if record.looped and not record.inside_call:
        found = record.compilations[user_line(), str(about.get("fun_name", "a program"))]
        found[0] += 1
        found[1] += seconds


def _jit(record: Record, usual: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def jit(*args: Any, **kwargs: Any) -> Any:
        if not args:  # jax.jit(static_argnums=0) returns a decorator
            return lambda function: jit(function, **kwargs)
        return Watched(record, usual(*args, **kwargs), user_line())

    return jit


def _pmap(record: Record, usual: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(usual)
    def pmap(*args: Any, **kwargs: Any) -> Any:
        return Watched(record, usual(*args, **kwargs), user_line(), is_pmap=True)

    return pmap


def _wrap_compiled(record: Record) -> None:
    """Programs that were lowered and compiled ahead: `jax.jit(f).lower(...).compile()`."""
    functions: WeakKeyDictionary[Any, Function] = WeakKeyDictionary()
    usual: Callable[..., Any] = jax.stages.Compiled.__call__

    @functools.wraps(usual)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not on_main_thread() or record.inside_call:
            return usual(self, *args, **kwargs)
        if self not in functions:
            functions[self] = Function(record, "a compiled program", user_line())
        return functions[self].call(functools.partial(usual, self), None, args, kwargs)

    setattr(jax.stages.Compiled, "__call__", call)  # noqa: B010  mypy: a method


class Watched:
    """A jitted function that is observed when it is called. All else is that of the function itself."""

    def __init__(self, record: Record, function: Any, line: str, *, is_pmap: bool = False) -> None:
        functools.update_wrapper(self, function)
        self._watched_record = record
        self._watched_function = function
        self._watched_pmap = is_pmap
        self._watched_calls = Function(record, getattr(function, "__name__", "a function"), line)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function, record = self._watched_function, self._watched_record
        if record.inside_call or not on_main_thread():
            return function(*args, **kwargs)
        if self._watched_pmap:
            record.pmaps[self._watched_calls.line] += 1
        trace = getattr(function, "trace", None)
        return self._watched_calls.call(function, trace, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # as a function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_watched"):  # while an instance is being made, or copied
            raise AttributeError(name)
        return getattr(self._watched_function, name)
