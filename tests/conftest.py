"""Settings for every test: eight CPU devices, JAX's compilation cache, signals, slow tests, garbage collection."""

import gc
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from programs import restore_signals

pytest_plugins = ("fault_times", "feed_fixtures", "store_fixtures")

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # programs this small take longer to optimise than to run

COMPILED = tempfile.TemporaryDirectory(prefix="feedline-compiled-")
"""JAX's compilation cache for this process: most tests compile what another test has compiled. Child processes do
not share it: JAX writes an entry in place, and a process that is killed would leave half of one.
"""
ONLY_SLOW_TESTS = re.compile(r"^pytestmark = pytest.mark.(slow|nightly)$", re.MULTILINE)

restore_signals()

# a test that is slow on a busy machine does not fail
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_configure(config: pytest.Config) -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", COMPILED.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_unconfigure(config: pytest.Config) -> None:
    COMPILED.cleanup()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m "not slow"`, import no file of slow tests only, which may need what only `[test-all]` installs."""
    fast = config.option.markexpr == "not slow" and collection_path.suffix == ".py"
    return True if fast and ONLY_SLOW_TESTS.search(collection_path.read_text()) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cluster and nightly tests as slow, and group the tests that one worker of pytest-xdist must run."""
    for item in items:
        if item.get_closest_marker("cluster") or item.get_closest_marker("nightly"):
            item.add_marker("slow")
        if item.path.parent.name == "processes":
            item.add_marker(pytest.mark.xdist_group("processes"))  # they share what their processes return
        elif item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group(item.path.name))  # they may share fixtures that take long


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collections skip what is loaded by now: it never becomes garbage, but costs 0.4 s each time."""
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        raise pytest.UsageError("pytest-xdist does not group tests with this version of pytest")
    gc.collect()
    gc.freeze()
