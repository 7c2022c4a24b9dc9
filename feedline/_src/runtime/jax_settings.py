"""Carries JAX's thread-local settings from the thread that builds a feed to every thread of that feed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_WANTED = (
    "enable_x64",
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "threefry_partitionable",
)
"""The settings that change what JAX computes, or where. Transfer guards and settings that only add checks or logs
are not carried over."""


def known(names: Sequence[str], of: Any) -> tuple[str, ...]:
    """Those that a version of jax, `of`, has, as a context and as a value: a version may lose a setting."""
    return tuple(name for name in names if hasattr(of, name) and hasattr(of.config, f"jax_{name}"))


_NAMES = known(_WANTED, jax)


@dataclasses.dataclass(frozen=True)
class JaxSettings:
    """JAX's settings on one thread, to be applied on others.

    ``with jax.enable_x64(True):`` holds for one thread only, but a feed reads, transforms and places on others.
    Without this the batches of a feed that was built in such a context would be narrowed to 32 bits.

    Attributes:
      values: one for each of `_NAMES`.

    Example:
      >>> with jax.enable_x64(True):
      ...     settings = JaxSettings.of_this_thread()
      >>> with settings.applied():  # on any thread
      ...     print(jax.numpy.arange(2).dtype)
      int64
    """

    values: tuple[Any, ...]

    @classmethod
    def of_this_thread(cls) -> JaxSettings:
        """The settings of the calling thread."""
        return cls(_values())

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """A context in which these settings hold on the calling thread; a microsecond if they already do."""
        return contextlib.nullcontext() if _values() == self.values else self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value, here in zip(_NAMES, self.values, _values(), strict=True):
                if value != here:
                    stack.enter_context(getattr(jax, name)(value))
            yield

    def apply_everywhere(self) -> None:
        """Make these settings the defaults of all threads of this process. For a worker process."""
        for name, value in zip(_NAMES, self.values, strict=True):
            jax.config.update(f"jax_{name}", value)

    def __reduce__(self) -> Any:
        # a worker process has no accelerator, and a device cannot be pickled
        values = (None if name == "default_device" else v for name, v in zip(_NAMES, self.values, strict=True))
        return JaxSettings, (tuple(values),)


def _values() -> tuple[Any, ...]:
    return tuple([getattr(jax.config, f"jax_{name}") for name in _NAMES])
