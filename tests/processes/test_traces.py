"""Each process traces its part of a run; the files have the same steps, and can be merged."""

import json
import re
import sys
from pathlib import Path

import pytest
from launched import launched

DOCS = Path(__file__).parents[2] / "docs" / "waiting.md"
PROGRAM = """
import sys, time, jax, numpy as np, feedline
from jax.sharding import Mesh, NamedSharding, PartitionSpec

feedline.cluster.initialize()
sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
total = jax.jit(lambda x: x.sum())
with feedline.Feed({"x": np.zeros((640, 4), np.float32)}, 64, sharding, epochs=1) as feed:
    with feed.trace(sys.argv[1] + "/trace.json") as path:
        for batch in feed:
            total(batch["x"]).block_until_ready()
            time.sleep(0.05)
"""


@pytest.mark.slow
def test_two_processes_write_two_traces(tmp_path):
    launched(sys.executable, "-c", PROGRAM, str(tmp_path))
    paths = [tmp_path / f"trace-process{process}.json" for process in range(2)]
    assert sorted(tmp_path.iterdir()) == paths
    names = {}
    (merge,) = re.findall(r"^```python\n(import json\n.*?)^Path\(", DOCS.read_text(), re.DOTALL | re.MULTILINE)
    exec(merge, names)
    for clock in ("origin_unix_s", "origin_monotonic_s"):
        events = names["merged"](paths, clock)["traceEvents"]
        spans = {(e["pid"], e["args"]["step"]): e for e in events if e["name"] == "step"}
        assert sorted(spans) == [(process, step) for process in range(2) for step in range(1, 11)]
        for step in range(1, 10):  # a step needs both processes, so their spans of it overlap
            first, second = spans[0, step], spans[1, step]
            assert max(first["ts"], second["ts"]) < min(first["ts"] + first["dur"], second["ts"] + second["dur"])
        assert {e["args"]["bytes"] for e in spans.values()} == {32 * 16}
        threads = [e for e in events if e["name"] == "thread_name"]
        assert len({e["tid"] for e in threads}) == len(threads)
    processes = [json.loads(path.read_text())["otherData"] for path in paths]
    assert [(facts["process"], facts["processes"]) for facts in processes] == [(0, 2), (1, 2)]
