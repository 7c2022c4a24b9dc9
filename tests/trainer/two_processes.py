"""One of two processes with two CPU devices each: trains and evaluates in both modes, and prints what it saw."""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from mlp_oracle import Rows
from mlp_tasks import program_of, sharding_of
from test_modes import BATCHES, SIZES

from feedline._src.trainer.loop import evaluate
from feedline._src.trainer.modes import Mode, mesh_for


def placed(mode: Mode, rows: Rows) -> dict[str, jax.Array]:
    """This process's half of the rows as its part of a global batch."""
    mine = slice(32 * jax.process_index(), 32 * jax.process_index() + 32)
    return {
        name: jax.make_array_from_process_local_data(sharding_of(mode), leaf[mine], leaf.shape)
        for name, leaf in rows.items()
    }


def main(address: str, index: int) -> None:
    jax.distributed.initialize(address, 2, index)
    evaluated: list[list[float]] = []
    seen: dict[str, object] = {"evaluated": evaluated}
    for mode in ("jit_multi", "pmap"):
        program = program_of(mode, SIZES)
        tested = program_of(mode, SIZES, padded=True)
        batches = [placed(mode, batch) for batch in BATCHES]
        test = [placed(mode, {**batch, "valid": np.arange(64) < 32}) for batch in BATCHES[:2]]
        with jax.transfer_guard("disallow"):
            state, losses = program.start(), []
            for batch in batches:
                state, metrics = program.step(state, batch)
                losses.append(metrics)
            seen[mode] = [float(metrics[0]) for metrics in jax.device_get(losses)]
            result = evaluate(tested.measure, state.params, test)
        evaluated += [[result.rows, *(round(mean, 4) for mean in result.metrics.values())]]
    try:
        mesh_for("jit_single")
    except ValueError as error:
        seen["jit_single"] = str(error)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
