"""Counts transfers and waits on the main thread, with the line of the user's code that makes them.

`float(x)`, `x.item()`, `print(x)`, `np.asarray(x)`, `jax.device_get` and `jax.block_until_ready` wait until the
devices have computed x. Results of earlier steps than the last are not counted: the devices then have the last
step to do. `jax.device_put` and `jnp.asarray` of a NumPy array copy it on the thread that calls them.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from feedline._src.tools.doctor.inside.lines import user_line
from feedline._src.tools.doctor.inside.record import Record, on_main_thread

_METHODS = {
    "__float__": ("to host", "float()"),
    "__int__": ("to host", "int()"),
    "__bool__": ("to host", "bool()"),
    "__index__": ("to host", "an index"),
    "__array__": ("to host", "np.asarray()"),
    "__repr__": ("to host", "print()"),
    "__str__": ("to host", "print()"),
    "__format__": ("to host", "format"),
    "item": ("to host", ".item()"),
    "tolist": ("to host", ".tolist()"),
    "block_until_ready": ("wait", "block_until_ready"),
}
_MOVED_BYTES = 256
"""NumPy arrays below this size are not counted on their way to a device: scalars, learning rates."""
_local = threading.local()


def install(record: Record) -> None:
    """Wrap jax's functions now, and the class of concrete arrays once there is an array."""
    for name, what in (
        ("asarray", "np.asarray()"),
        ("array", "np.array()"),
    ):  # on a CPU they read the buffer itself
        setattr(np, name, _of_one(record, getattr(np, name), "to host", what))
    for kind, name in (("to host", "device_get"), ("wait", "block_until_ready")):
        setattr(jax, name, _of_tree(record, getattr(jax, name), kind, f"jax.{name}"))
    jax.device_put = _of_tree(record, jax.device_put, "to device", "jax.device_put")
    for name in ("asarray", "array"):
        setattr(jnp, name, _of_tree(record, getattr(jnp, name), "to device", f"jnp.{name}"))


def install_on(array: type, record: Record) -> None:
    """Wrap the methods of the class of concrete arrays."""
    for name, (kind, what) in _METHODS.items():
        setattr(array, name, _method(record, getattr(array, name), kind, what))


def quietly() -> _Quiet:
    """A context in which this thread's transfers are not counted: those of the doctor."""
    return _Quiet()


class _Quiet:
    def __enter__(self) -> None:
        self._before = getattr(_local, "busy", False)
        _local.busy = True

    def __exit__(self, *exception: object) -> None:
        _local.busy = self._before


def _counts() -> bool:
    return on_main_thread() and not getattr(_local, "busy", False)


def _method(record: Record, usual: Callable[..., Any], kind: str, what: str) -> Callable[..., Any]:
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _counts() or record.is_older([self]):
            return usual(self, *args, **kwargs)
        began = time.perf_counter()
        with _Quiet():
            result = usual(self, *args, **kwargs)
        size = 0 if kind == "wait" else self.nbytes
        record.moved(kind, what, user_line(), size, time.perf_counter() - began)
        return result

    counted.__doc__ = usual.__doc__  # not functools.wraps: some of the methods are not functions of Python
    return counted


def _of_one(record: Record, usual: Callable[..., Any], kind: str, what: str) -> Callable[..., Any]:
    """A function of NumPy: counted if its first argument is a concrete array of jax."""

    @functools.wraps(usual)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not (args and _is_concrete(args[0]) and _counts()) or record.is_older([args[0]]):
            return usual(*args, **kwargs)
        began = time.perf_counter()
        with _Quiet():
            result = usual(*args, **kwargs)
        record.moved(kind, what, user_line(), args[0].nbytes, time.perf_counter() - began)
        return result

    return counted


def _of_tree(record: Record, usual: Callable[..., Any], kind: str, what: str) -> Callable[..., Any]:
    """A function of jax whose first argument is a tree: of arrays of jax, or of NumPy on their way to a device."""

    @functools.wraps(usual)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if not (args and _counts()):
            return usual(*args, **kwargs)
        leaves = jax.tree.leaves(args[0])
        chosen = host_arrays(leaves) if kind == "to device" else [leaf for leaf in leaves if _is_concrete(leaf)]
        began = time.perf_counter()
        with _Quiet():
            result = usual(*args, **kwargs)
        if chosen and (kind == "to device" or not record.is_older(chosen)):
            size = 0 if kind == "wait" else sum(leaf.nbytes for leaf in chosen)
            record.moved(kind, what, user_line(), size, time.perf_counter() - began)
        return result

    return counted


def host_arrays(leaves: list[Any]) -> list[Any]:
    """Those that are NumPy arrays of some size."""
    return [leaf for leaf in leaves if isinstance(leaf, np.ndarray) and leaf.nbytes >= _MOVED_BYTES]


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
