"""How a step is compiled and run: the choices that `feedline bench practices` measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

import jax

Compute = Literal["float32", "bfloat16"]
Remat = Literal["none", "all", "cheap"]
"""Which results of a layer are computed again for the gradient: "none"; "all", so that only the layer's input is
kept; "cheap", so that its matrix product is kept, too."""


@dataclasses.dataclass(frozen=True)
class Practices:
    """How a step is compiled and run. The defaults are what measured better; docs/benchmarks.md shows the figures.

    Attributes:
      donate_state: the new state takes the memory of the old one. False: both exist at the same time.
      donate_batch: a batch is deleted once its step is dispatched, so that its device memory is free when the step
        is done, even if something still refers to it.
      compute: "bfloat16": parameters and batch are cast for the loss function, in evaluations, too; parameters,
        gradients and optimizer stay float32.
      shard_state: parameters and optimizer are split over the devices of the batch's first axis (FSDP), leaf by
        leaf along the largest axis that can be divided; XLA gathers what a layer needs. Only in mode "jit_multi".
      guard_transfers: after its first step, the loop runs under `jax.transfer_guard("disallow")`: an array that
        would be moved between host and devices without being asked for is an error.
      save_asynchronously: a checkpoint is written while training continues. False: training waits.
      evaluate_asynchronously: training continues once the batches of an evaluation are dispatched. False: it
        waits.

    Example:
      >>> Practices(compute="bfloat16").donate_state
      True
    """

    donate_state: bool = True
    donate_batch: bool = False
    compute: Compute = "float32"
    shard_state: bool = False
    guard_transfers: bool = True
    save_asynchronously: bool = True
    evaluate_asynchronously: bool = True

    def __post_init__(self) -> None:
        if self.compute not in get_args(Compute):
            raise ValueError(
                f"Practices.compute must be one of {', '.join(get_args(Compute))}, got {self.compute!r}"
            )


def rematerialised(layer: Callable[..., jax.Array], remat: Remat) -> Callable[..., jax.Array]:
    """A layer of a model, of which some results are computed again for the gradient instead of being kept.

    Args:
      layer: a pure function of arrays.

    Raises:
      ValueError: `remat` is unknown.

    Example:
      >>> rematerialised(jax.numpy.sin, "none") is jax.numpy.sin
      True
    """
    if remat not in get_args(Remat):
        raise ValueError(f"remat must be one of {', '.join(get_args(Remat))}, got {remat!r}")
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if remat == "cheap" else None
    done: Callable[..., jax.Array] = jax.checkpoint(layer, policy=policy)
    return done
