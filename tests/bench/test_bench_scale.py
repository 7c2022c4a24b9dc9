"""Thousands of processes: plan and rows are those of a direct computation, and a process's calls do not grow."""

import sys
from pathlib import Path

import numpy as np
import programs
import pytest
from claims import scale
from claims.scale_messages import messages
from claims.scale_plan import LOCAL_ROWS, ROW_BYTES, sharding_of, stages_of
from simulated_service import Costs, simulate

from feedline import Order
from feedline._src.agreement.agree import CollectiveBuild
from feedline._src.order.schedule import Cursor
from feedline._src.plan.shardings import local_rows
from feedline._src.sources.arrays import ArraySource

sys.path.append(str(Path(__file__).parents[1] / "order"))
from order_statistics import documented_row

MANY = 16_384
VAST = 10**12
LAUNCH = [
    sys.executable, "-m", "feedline", "launch", "--processes", "2", "--cpu", "--devices-per-process", "1",
]  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 4])
@pytest.mark.parametrize("process", [0, 1, 9_999, MANY - 1])
def test_the_plan_of_one_of_thousands_is_that_of_brute_force(process, replicas):
    """Each part of the batch, 24 rows, lies on `replicas` consecutive processes."""
    rows_of_part = 24
    batch = rows_of_part * MANY // replicas
    owner = np.arange(batch) // rows_of_part
    expected = np.flatnonzero(owner == process // replicas)
    found = local_rows(sharding_of(MANY, process, replicas), batch)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("process", [0, 12_345, MANY - 1])
def test_rows_at_the_end_of_a_trillion_are_those_of_pythons_integers(process):
    """The bytes of a row tell in which of three arrays it was found."""
    sizes = [VAST // 3, VAST // 3, VAST - 2 * (VAST // 3)]
    rows = [np.frombuffer(str(i).encode().ljust(ROW_BYTES), np.uint8) for i in range(len(sizes))]
    source = ArraySource([np.broadcast_to(row, (size, ROW_BYTES)) for row, size in zip(rows, sizes, strict=True)])
    stages = stages_of(source, MANY, process)
    batch = LOCAL_ROWS * MANY
    start = VAST // batch * batch - batch  # of the last batch
    buffers = stages.access.buffers.lease()
    stages.access.fill(Cursor(3, start), 0, 1, buffers)
    local = range(start + process * LOCAL_ROWS, start + (process + 1) * LOCAL_ROWS)
    expected = [documented_row(VAST, 7, 3, position) for position in local]
    offsets = np.arange(LOCAL_ROWS) + process * LOCAL_ROWS
    assert stages.access.locate(Cursor(3, start), offsets).tolist() == expected
    assert stages.access.order.shown == Order(seed=7)
    arrays = [sum(row >= bound for bound in (sizes[0], sizes[0] + sizes[1])) for row in expected]
    assert buffers.leaves[0].tobytes() == b"".join(rows[i].tobytes() for i in arrays)


@pytest.fixture(scope="module")
def counted():
    """{processes: {case: figures}}"""
    return {processes: messages(processes, {"rows": VAST}, Costs()) for processes in (16, 1024)}


@pytest.mark.slow
@pytest.mark.parametrize("case", scale.FLAT)
def test_neither_the_calls_nor_the_bytes_of_a_process_grow(case, counted):
    few, many = counted[16][case], counted[1024][case]
    assert many["calls"] <= few["calls"]
    assert many["most_calls"] <= few["most_calls"]
    assert many["bytes"] < 1.1 * few["bytes"]


def test_what_grows_is_the_directory_that_one_process_reads(counted):
    """The last process to come reads one entry of each process, so the total grows in proportion."""
    for case in ("build", "window of lanes"):
        assert counted[1024][case]["most_bytes"] < 70 * 1024
        assert counted[1024][case]["all_bytes"] < 70 * counted[16][case]["all_bytes"]


@pytest.mark.slow
def test_while_one_is_late_process_0_is_not_kept_busy():
    processes, late_s = 4096, 6

    def work(service):
        CollectiveBuild(service, "group/1", range(processes), 30, 300).agree({})

    outcome = simulate([work] * processes, Costs(), starts_s=[0] * (processes - 1) + [late_s])
    waits = sum(each.calls - 4 for each in outcome.traffic)
    assert late_s < outcome.seconds < late_s + 1
    assert 0 < waits < 2100 * late_s  # process 0 can answer about 10,000 a second


@pytest.mark.slow
def test_real_processes_make_as_many_calls_as_the_simulated_ones(tmp_path):
    job = [sys.executable, Path(__file__).with_name("counted_build.py"), tmp_path]
    done = programs.run([*LAUNCH, "--", *job], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    calls = [int((tmp_path / str(process)).read_text()) for process in range(2)]
    build = messages(2, {"rows": VAST}, Costs())["build"]
    assert (sum(calls), max(calls)) == (build["all_calls"], build["most_calls"])
