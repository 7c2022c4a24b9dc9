"""The share of a process in the cores of its host."""

import pytest

from feedline._src.cluster.cores import processes_on_host, share_of
from feedline._src.tools.launch.environments import process_environments

SLURM = {
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("environ", "processes"),
    [
        ({}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 8),
        (SLURM, 2),
        ({**SLURM, "SLURM_NODEID": "0"}, 4),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "6"}, 1),  # a batch script is no task
        (process_environments({}, processes=4, coordinator="localhost:61500", cpu=True)[3], 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, 1),
    ],
)
def test_processes_on_host_is_what_the_launcher_reports(environ, processes):
    assert processes_on_host(environ) == processes


@pytest.mark.parametrize(
    ("usable", "quota", "share"),
    [(64, None, 32), (64, 3.5, 2), (64, 100.0, 32), (64, 0.5, 1), (6, 4.0, 2), (2, 8.0, 2)],
)
def test_the_quota_of_a_container_is_divided_too(usable, quota, share):
    assert share_of({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, usable, 64, quota) == share


@pytest.mark.parametrize(
    ("usable", "present", "share"),
    [(128, 128, 16), (12, 128, 12), (4, 4, 1), (1, 1, 1), (128, 64, 16)],
)
def test_cores_are_divided_unless_the_process_is_bound(usable, present, share):
    assert share_of({"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, usable, present) == share
