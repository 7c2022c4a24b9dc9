"""One of two processes with two CPU devices each: trains and evaluates in both modes, and prints what it saw."""

import json
import os
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np
from mlp_oracle import Rows
from test_modes import BATCHES, program_of

from feedline.trainer.evaluate import evaluate
from feedline.trainer.learner import Batch
from feedline.trainer.modes import Compiled, mesh_for


def placed(program: Compiled, rows: Rows) -> Batch:
    """This process's half of the rows as its part of a global batch."""
    mine = slice(32 * jax.process_index(), 32 * jax.process_index() + 32)
    return {
        name: jax.make_array_from_process_local_data(program.sharding, leaf[mine], leaf.shape)
        for name, leaf in rows.items()
    }


def main(address: str, index: int) -> None:
    jax.distributed.initialize(address, 2, index)
    seen: dict[str, object] = {"evaluated": []}
    for mode in ("jit_multi", "pmap"):
        program = program_of(mode)
        losses: list[float] = []
        batches = [placed(program, batch) for batch in BATCHES]
        test = [placed(program, {**batch, "valid": np.arange(64) < 32}) for batch in BATCHES[:2]]
        with jax.transfer_guard("disallow"):
            state = program.init()
            for batch in batches:
                state, loss = program.step(state, batch)
                losses.append(float(jax.device_get(loss)))
            result = evaluate(program.sums, state.parameters, test)
        seen[mode] = losses
        seen["evaluated"] += [[result.rows, result.correct, round(result.loss, 4)]]
    try:
        mesh_for("jit_single")
    except ValueError as error:
        seen["jit_single"] = str(error)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
