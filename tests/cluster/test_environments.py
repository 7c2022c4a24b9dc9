"""`process_environments`: the index and the devices of each process."""

import pytest

from feedline._src.cluster.detect import find
from feedline._src.tools.launch import process_environments


def environments_of(processes, environ=None, gpus=None, **options):
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    options = {"cpu": False, "devices_per_process": None, **options}
    return process_environments({**(environ or {}), **visible}, processes, "127.0.0.1:1234", **options)


def column(environments, name):
    return [environ.get(name) for environ in environments]


def test_each_process_gets_its_index_and_the_coordinator():
    found = [find(environ) for environ in environments_of(3, {"SLURM_JOB_ID": "7", "FEEDLINE_PROCESS": "9"})]
    assert [(one.process, one.processes, one.coordinator) for one in found] == [
        (process, 3, "127.0.0.1:1234") for process in range(3)
    ]
    assert [(one.local_process, one.local_processes) for one in found] == [(0, 3), (1, 3), (2, 3)]
    (only,) = environments_of(1)
    assert find(only) is None
    assert only["PYTHONUNBUFFERED"] == "1"
    assert environments_of(1, {"PYTHONUNBUFFERED": ""})[0]["PYTHONUNBUFFERED"] == ""


def test_the_cpu_gets_the_requested_number_of_devices():
    before = {
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    (split,) = environments_of(1, before, cpu=True, devices_per_process=2)
    assert split["JAX_PLATFORMS"] == "cpu"
    assert split["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=2"
    assert "JAX_NUM_CPU_DEVICES" not in split
    (left,) = environments_of(1, before, cpu=True)
    assert left.items() >= before.items()


def test_the_cpu_can_be_requested_with_JAX_PLATFORMS():
    (split,) = environments_of(1, {"JAX_PLATFORMS": "cpu"}, devices_per_process=2, gpus=["0"])
    assert split["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert split["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize(
    ("processes", "devices", "gpus", "own"),
    [
        (2, None, "0123", ["0,1", "2,3"]),
        (4, None, "0123", ["0", "1", "2", "3"]),
        (3, None, "0123", ["0", "1", "2"]),
        (2, 1, "0123", ["0", "1"]),
        (2, 1, ["GPU-5ebe", "GPU-a01c"], ["GPU-5ebe", "GPU-a01c"]),
        (1, 3, "0123", ["0,1,2"]),
        (1, None, "0123", ["0,1,2,3"]),
        (2, None, "", ["", ""]),
    ],
)
def test_gpus_are_divided_among_the_processes(processes, devices, gpus, own):
    environments = environments_of(processes, devices_per_process=devices, gpus=gpus)
    assert column(environments, "CUDA_VISIBLE_DEVICES") == own


def test_JAX_LOCAL_DEVICE_IDS_is_removed_where_gpus_are_divided():
    environ = {"JAX_LOCAL_DEVICE_IDS": "0,1,2,3"}
    assert column(environments_of(2, environ, gpus="0123"), "JAX_LOCAL_DEVICE_IDS") == [None, None]
    assert column(environments_of(1, environ, gpus="0123"), "JAX_LOCAL_DEVICE_IDS") == ["0,1,2,3"]


@pytest.mark.parametrize(
    ("processes", "devices", "message"),
    [
        (3, None, r"3 processes with 1 GPUs each were asked for, found 2 GPUs \(0,1\); ask for fewer .* --cpu"),
        (2, 2, r"2 processes with 2 GPUs each were asked for, found 2 GPUs \(0,1\)"),
    ],
)
def test_too_few_gpus(processes, devices, message):
    with pytest.raises(ValueError, match=message):
        environments_of(processes, devices_per_process=devices, gpus="01")
