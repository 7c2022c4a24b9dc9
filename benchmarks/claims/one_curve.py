"""If a run is killed and resumed on 1, 2, 4 and 8 processes, do its losses form one curve?

A small network learns handwritten digits. One run is never stopped. The other begins on one process, is
killed with SIGKILL, and continues from its newest checkpoint on two processes; then in the same way on four
and on eight. Refuted if the two runs' losses of any step differ by more than 0.01 %. On other devices, sums over
a batch are taken in another order, which changes the last digits; a lost or repeated row would change the
first ones.

    python benchmarks/claims/one_curve.py --out one_curve.json
    python benchmarks/plot.py one_curve.json docs/one_curve.svg
"""

import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

STEPS, SAVE_EVERY, BATCH = 40, 20, 128  # steps for each number of processes
KILLED_AFTER = 15  # steps that are lost and repeated
STEP_S = 0.05  # at least, so that a checkpoint is complete before the kill
LARGEST_DIFFERENCE = 1e-4


def train(checkpoints, log, steps, killed):
    """Run one process of a part: train to the last step, or until this process is killed."""
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    import feedline
    from feedline.trainer import CSVLog, digits, fit, mesh_for

    feedline.cluster.initialize()

    def init(key):
        first, last = jax.random.split(key)
        return {
            "first": jax.random.normal(first, (64, 64)) / 8,
            "last": jax.random.normal(last, (64, 10)) / 8,
        }

    def loss(params, batch):
        x = batch["image"].reshape(-1, 64) / 255.0
        scores = jax.nn.relu(x @ params["first"]) @ params["last"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"]).mean(), {}

    def after_step(step):
        time.sleep(STEP_S)
        if step == killed and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    sharding = NamedSharding(mesh_for("jit_multi"), PartitionSpec("data"))
    with feedline.Feed(digits().train, BATCH, sharding) as feed, CSVLog(log) as written:
        fit(
            feed,
            init,
            loss,
            optax.adam(3e-3),
            steps=steps,
            callbacks=[written],
            report_every=1,
            checkpoint_dir=checkpoints,
            save_every=SAVE_EVERY,
            after_step=after_step,
        )


def part(folder, processes, steps, killed):
    """Run one part, from the newest checkpoint in `folder` on. Returns {step: loss}."""
    log = folder / f"{processes}.csv"
    numbers = [str(steps), str(killed or 0)]
    command = [sys.executable, __file__, "--train", str(folder / "checkpoints"), str(log), *numbers]
    launch = ["launch", "--processes", str(processes), "--cpu", "--devices-per-process", "1", "--", *command]
    ended = subprocess.run(
        [sys.executable, "-m", "feedline", *launch], capture_output=True, text=True, timeout=900
    )
    if ended.returncode != (128 + signal.SIGKILL if killed else 0):
        raise RuntimeError(f"{processes} processes ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    with log.open() as lines:
        losses = {int(line["step"]): float(line["loss"]) for line in csv.DictReader(lines)}
    print(f"{processes} processes: steps {min(losses)} to {max(losses)}{', killed' if killed else ''}", flush=True)
    return losses


def main(options):
    from shared.script import save

    with tempfile.TemporaryDirectory() as temporary:
        last = len(options.processes) * STEPS
        whole = part(Path(temporary, "whole"), 1, last, None)
        parts = {}
        for processes in options.processes:
            end = (len(parts) + 1) * STEPS
            killed = end + KILLED_AFTER if end < last else None
            parts[processes] = part(Path(temporary, "killed"), processes, last, killed)
    largest = max(abs(loss / whole[step] - 1) for losses in parts.values() for step, loss in losses.items())
    print(f"largest relative difference of a loss: {largest:.1e}")
    save("one_curve", options, results={"whole": whole, "parts": parts, "largest_difference": largest})
    if largest > LARGEST_DIFFERENCE:
        sys.exit("refuted")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        from shared.script import parser

        asked = parser(__doc__)
        asked.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="of each part")
        main(asked.parse_args())
