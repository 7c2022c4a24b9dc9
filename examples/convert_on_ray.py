"""Converts rows to .npy files on all machines of a Ray cluster. Here, Ray runs on this machine only.

Each file is a task of a Ray Data job. All machines must see the source and the destination under the same paths.
If the job is stopped, run it again: finished files are kept.

    pip install 'ray[data]'
    python examples/convert_on_ray.py
"""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np

import feedline

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
import ray


def on_ray(function, shards):
    """Like the builtin `map`, by tasks of a Ray Data job. Yields each result as soon as it is ready."""
    if not shards:
        return
    numbered = ray.data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
    yield from numbered.map(lambda row: function(row["shard"]), num_cpus=1).iter_rows()


def main(folder: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (1000, 8, 8)).astype(np.uint8)
    np.savez(folder / "raw.npz", image=images, label=np.arange(1000))

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)  # on a cluster: ray.init()
    rows = feedline.convert(folder / "raw.npz", folder / "by_ray", format="npy", rows_per_shard=250, map=on_ray)
    ray.shutdown()

    feedline.convert(folder / "raw.npz", folder / "here", format="npy", rows_per_shard=250)
    files = sorted(path.name for path in (folder / "here").glob("*.npy"))
    same = all((folder / "here" / name).read_bytes() == (folder / "by_ray" / name).read_bytes() for name in files)
    print(f"{len(rows)} rows in {len(files)} files, those of one machine: {same}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
