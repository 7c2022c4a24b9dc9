"""Options that several subcommands take: SOURCE and how it is opened, and --cpu-devices."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from typing import Any

from feedline._src.options import checked_integer

MAX_CPU_DEVICES = 4096
"""The largest --cpu-devices. JAX's CPU client takes 8 s to create this many, and much longer for more."""
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def is_name(source: str) -> bool:
    """Whether `source` is module:name, and not a path."""
    return re.fullmatch(r"[\w.]+:\w+", source) is not None and not os.path.exists(source)


def load_name(source: str) -> Any:
    """The object that module:name names. The module is imported from the current folder."""
    module, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"a source is a path, a glob or module:name, and loading {source} failed with {type(error).__name__}: "
            f"{error}; run the command in the folder of the module, and check both names"
        ) from error


def open_options(source: str, columns: str | None, dtype: str | None, window: int | None) -> dict[str, Any]:
    """The options of `feedline.open_source` that were given on the command line; module:name takes none."""
    options = {
        "columns": None if columns is None else columns.split(","),
        "dtype": None if dtype is None else _parsed_dtype(dtype),
        "window": window,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if given and is_name(source):
        raise ValueError(
            f"--{next(iter(given))} is for a path, and {source} is a source that is open already; pass the "
            "option to feedline.open_source in that module"
        )
    return given


def _parsed_dtype(text: str) -> Any:
    import ml_dtypes  # noqa: F401  # registers bfloat16 with NumPy
    import numpy as np

    try:
        return np.dtype(ast.literal_eval(text) if text.startswith(("[", "(", "{")) else text)
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"--dtype must be a dtype of NumPy, got {text!r}: {error}; write uint16, or "
            "\"[('image', 'uint8', (32, 32, 3)), ('label', 'int32')]\" for records of several fields"
        ) from error


def use_cpu_devices(count: int) -> None:
    """Make JAX run on `count` CPU devices. ValueError: `count` is out of range, or jax is already imported."""
    checked_integer("--cpu-devices", count, at_least=1, at_most=MAX_CPU_DEVICES)
    if "jax" in sys.modules:
        raise ValueError(
            "--cpu-devices must be set before jax is imported, and jax already is; start feedline from "
            f"the shell, or set JAX_PLATFORMS=cpu and XLA_FLAGS={_DEVICE_COUNT_FLAG}={count} yourself"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = flags_for_cpu_devices(os.environ.get("XLA_FLAGS", ""), count)


def flags_for_cpu_devices(flags: str, count: int) -> str:
    """Set the number of CPU devices in `flags`, a value of XLA_FLAGS."""
    others = [flag for flag in flags.split() if not flag.startswith(_DEVICE_COUNT_FLAG)]
    return " ".join([*others, f"{_DEVICE_COUNT_FLAG}={count}"])
