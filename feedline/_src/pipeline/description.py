"""What a process says of a feed, so that the processes that build it together can compare. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax

from feedline._src import state as states
from feedline._src.options import Reading
from feedline._src.order.schedule import Remainder
from feedline._src.version import __version__

_PACKAGES = ("jax", "jaxlib", "grain", "numpy")


def processes_of(sharding: Any) -> set[int]:
    """The processes that own a device of a sharding, or of a tree of them.

    Raises:
      ValueError: the mesh of a sharding has no devices.
    """
    # what is no sharding is refused elsewhere
    shardings = [leaf for leaf in jax.tree.leaves(sharding) if isinstance(leaf, jax.sharding.Sharding)]
    for leaf in shardings:
        if isinstance(getattr(leaf, "mesh", None), jax.sharding.AbstractMesh):
            raise ValueError(
                f"a feed places batches on devices, and the mesh of {leaf} is abstract; build it over a "
                "jax.sharding.Mesh, or let feedline.FeedOptions.plan say what a feed would do"
            )
    devices: set[Any] = set().union(*(leaf.device_set for leaf in shardings))
    return {device.process_index for device in devices}


def described(
    *,
    fingerprint: Mapping[str, Any],
    batch_size: Any,
    epochs: int | None,
    remainder: Remainder,
    reading: Reading,
    prefetch: int | None,
    spec: Any,
    place: list[int] | None = None,
) -> dict[str, Any]:
    """JSON values by field: all that must be the same in every process for batch k to be the same.

    Args:
      fingerprint: of the data, as in a state: for a Grain dataset with digests of its first, middle and last
        element, so that one that was sliced per process is told apart.
      batch_size: an integer, or sizes and the steps from which on they hold.
      prefetch: where the processes agree on the ends of lanes, in windows of it; None: it may differ.
      spec: of the global batch, with shardings: dtype, shape, and which part lies on which device.
      place: of a feed that moves to another mesh: step, epoch and position; None: it is built.
    """
    leaves = {
        f"batch{jax.tree_util.keystr(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(spec)
    }
    return {
        "version": {"feedline": __version__, **{package: version(package) for package in _PACKAGES}},
        **fingerprint,
        "batch_size": batch_size,
        "epochs": epochs,
        "remainder": remainder,
        "bad_rows": reading.bad_rows,
        "check_replicas_every": reading.check_replicas_every,
        "prefetch": prefetch,
        "place": place,
        "leaf": {name: f"{leaf.dtype.name}{list(leaf.shape)}" for name, leaf in leaves.items()},
        "sharding": {name: _layout(leaf.sharding, leaf.shape) for name, leaf in leaves.items()},
    }


def _layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Where the parts of a leaf lie: the devices in the order of their parts, and a digest of all of it."""
    indices: dict[Any, tuple[slice, ...]] = sharding.devices_indices_map(shape)  # type: ignore[assignment]
    parts = sorted(
        ([range(size)[cut].start for cut, size in zip(index, shape, strict=True)], device.id)
        for device, index in indices.items()
    )
    devices = ", ".join(str(device) for _, device in parts[:8]) + (", …" if len(parts) > 8 else "")
    spec = getattr(sharding, "spec", type(sharding).__name__)
    return f"{spec} on devices {devices} (map {states.digest(parts)[:8]})"
