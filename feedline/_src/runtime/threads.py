"""Rules for the threads of a feed: JAX's thread-local settings, annotations of a profile, no fork, one consumer.

Annotations of `jax.profiler` show in XProf, beside the devices, what feedline's threads do. Their names are
"feedline." plus the name of a span in a trace (`listen/trace.py`). Without a profile, `annotation` takes 0.3 µs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import jax

# settings that change what JAX computes, or where: not transfer guards, and not settings that add checks or logs
_WANTED = (
    "enable_x64",
    "default_device",
    "default_matmul_precision",
    "default_prng_impl",
    "threefry_partitionable",
)


# the settings that, in this version of jax, have both a context manager and a value in jax.config
_NAMES = tuple(name for name in _WANTED if hasattr(jax, name) and hasattr(jax.config, f"jax_{name}"))
_of_config = operator.attrgetter(*(f"jax_{name}" for name in _NAMES))


@dataclasses.dataclass(frozen=True)
class JaxSettings:
    """JAX's settings on one thread, to be applied on other threads.

    ``with jax.enable_x64(True):`` affects one thread only, but a feed reads, transforms and places on others.
    Without `JaxSettings`, a feed that is built in this context would narrow its batches to 32 bits.

    Attributes:
      values: the value of each setting in `_NAMES`.

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
        return cls(_values())

    def applied(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the calling thread has these settings. Takes 1 µs if it has them already."""
        return contextlib.nullcontext() if _values() == self.values else self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, value, here in zip(_NAMES, self.values, _values(), strict=True):
                if value != here:
                    stack.enter_context(getattr(jax, name)(value))
            yield

    def apply_everywhere(self) -> None:
        """Make these settings the defaults of all threads of this process: for a worker process."""
        for name, value in zip(_NAMES, self.values, strict=True):
            jax.config.update(f"jax_{name}", value)

    def __reduce__(self) -> Any:
        # the default device is left out: workers have no accelerator, and a device cannot be pickled
        values = (None if name == "default_device" else v for name, v in zip(_NAMES, self.values, strict=True))
        return JaxSettings, (tuple(values),)


def _values() -> tuple[Any, ...]:
    return _of_config(jax.config)


_NO_ANNOTATION = contextlib.nullcontext()


def annotation(stage: str, **metadata: int) -> contextlib.AbstractContextManager[None]:
    """A context that appears in a profile, if one is taken, as `feedline.{stage}` with the metadata."""
    if not jax.profiler.TraceAnnotation.is_enabled():
        return _NO_ANNOTATION
    return jax.profiler.TraceAnnotation(f"feedline.{stage}", **metadata)


class Stopwatch:
    """Measures the wall and processor time of consecutive stages of one thread: call `lap` after each stage."""

    __slots__ = ("_cpu", "_wall", "began")

    def __init__(self) -> None:
        self.began = self._wall = time.perf_counter()
        self._cpu = time.thread_time()

    def lap(self) -> tuple[float, float]:
        """(wall, processor) seconds since the last call, or since the start."""
        wall, cpu = time.perf_counter(), time.thread_time()
        lap = wall - self._wall, cpu - self._cpu
        self._wall, self._cpu = wall, cpu
        return lap


def this_thread() -> str:
    """The name of the calling thread."""
    return threading.current_thread().name


class ProcessBound:
    """Base of iterators with threads and open files. Refuses pickling, copying, and use in a forked process.

    Attributes:
      _name: the name of the iterator in error messages.
      _instead: what to do instead of copying it, for error messages.
    """

    _name: ClassVar[str]
    _instead: ClassVar[str]

    def __init__(self) -> None:
        self._process = os.getpid()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self._name} can be neither pickled nor copied, since it holds threads and open files; "
            f"{self._instead}"
        )

    def _is_forked(self) -> bool:
        return os.getpid() != self._process

    def _check_not_forked(self) -> None:
        if self._is_forked():
            raise ValueError(
                f"{self._name} works in the process that built it, {self._process}. This process, {os.getpid()}, "
                "is a fork of it, and threads do not survive a fork, not even JAX's. Start the process with "
                f'multiprocessing.get_context("spawn"), and in it {self._instead}'
            )


class SingleThread:
    """A context that one thread at a time may enter. Another thread gets a ValueError and does not wait.

    It is not a lock, because an interrupt right before the release would leave a lock held for ever. This context
    records the thread inside it, so a thread that was interrupted before the release can enter it again.
    """

    __slots__ = ("_holder",)

    def __init__(self) -> None:
        self._holder: dict[str, int] = {}

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder.setdefault("thread", me) != me:
            raise ValueError(
                "an iterator of batches is for one thread at a time, and another thread is inside it; give each "
                "thread an iterator of its own, or guard it with a lock"
            )

    @property
    def occupied(self) -> bool:
        return bool(self._holder)

    def __exit__(self, *exception: object) -> None:
        self._holder.pop("thread", None)
