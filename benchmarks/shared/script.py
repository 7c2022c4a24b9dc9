"""What the benchmarks of claims share: eight CPU devices, the option --out, and the saved result."""

import argparse
import json
import os
from pathlib import Path

import jax

try:
    from feedline._src.tools.bench.machine import describe
except ImportError:  # another version of feedline, see core.py
    describe = dict

MACHINE = describe()
"""Described before any measurement, so that the load is that of other programs."""


def parser(doc):
    """A parser of options with --out. Its description is the first line of `doc`, a script's docstring.

    Also makes JAX run on eight CPU devices, unless the environment says otherwise.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
    found = argparse.ArgumentParser(description=doc.partition("\n")[0])
    found.add_argument("--out", type=Path, help="file for the result: machine, versions, options, raw samples")
    return found


def save(name, options, **result):
    """Write the result of a benchmark to --out, as one object; also return it."""
    # paths are left out, because they may contain the home directory
    asked = {key: value for key, value in vars(options).items() if not isinstance(value, Path)}
    whole = {"benchmark": name, "machine": MACHINE, "options": asked, **result}
    if options.out is not None:
        options.out.write_text(json.dumps(whole, default=str) + "\n")
    return whole
