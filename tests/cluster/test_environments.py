"""`process_environments`: each process knows its place and has devices of its own."""

import pytest

from feedline.cluster.detect import find
from feedline.cluster.environments import process_environments


def spread_over(processes, environ=None, **options):
    return process_environments(environ or {}, processes=processes, coordinator="127.0.0.1:1234", **options)


def column(environments, name):
    return [environ.get(name) for environ in environments]


def test_each_process_finds_itself_among_the_others():
    found = [find(environ) for environ in spread_over(3, {"SLURM_JOB_ID": "7", "FEEDLINE_PROCESS": "9"})]
    assert [(one.process, one.processes, one.coordinator) for one in found] == [
        (process, 3, "127.0.0.1:1234") for process in range(3)
    ]


def test_one_process_finds_itself_alone():
    (only,) = spread_over(1)
    assert find(only) is None


def test_python_does_not_keep_its_output_back_unless_told_to():
    assert column(spread_over(1), "PYTHONUNBUFFERED") == ["1"]
    assert column(spread_over(1, {"PYTHONUNBUFFERED": ""}), "PYTHONUNBUFFERED") == [""]


def test_the_cpu_is_split_as_asked():
    before = {
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2",
        "JAX_NUM_CPU_DEVICES": "8",
    }
    (split,) = spread_over(1, before, cpu=True, devices_per_process=2)
    assert split["JAX_PLATFORMS"] == "cpu"
    assert split["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=2"
    assert "JAX_NUM_CPU_DEVICES" not in split
    (left,) = spread_over(1, before, cpu=True)
    assert left.items() >= before.items()


def test_the_cpu_may_be_asked_for_by_jaxs_own_variable():
    (split,) = spread_over(1, {"JAX_PLATFORMS": "cpu"}, devices_per_process=2, gpus=["0"])
    assert split["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert "CUDA_VISIBLE_DEVICES" not in split


@pytest.mark.parametrize(
    ("processes", "devices", "gpus", "own"),
    [
        (2, None, "0123", ["0,1", "2,3"]),
        (4, None, "0123", ["0", "1", "2", "3"]),
        (3, None, "0123", ["0", "1", "2"]),
        (2, 1, "0123", ["0", "1"]),
        (2, 1, ["GPU-5ebe", "GPU-a01c"], ["GPU-5ebe", "GPU-a01c"]),
        (1, 3, "0123", ["0,1,2"]),
        (1, None, "0123", [None]),
        (2, None, "", [None, None]),
        (2, 2, "", ["0,1", "2,3"]),  # As many as there are is not known everywhere.
    ],
)
def test_gpus_are_shared_out(processes, devices, gpus, own):
    environments = spread_over(processes, devices_per_process=devices, gpus=list(gpus))
    assert column(environments, "CUDA_VISIBLE_DEVICES") == own


def test_numbers_of_all_gpus_are_not_taken_for_numbers_of_the_share():
    environ = {"JAX_LOCAL_DEVICE_IDS": "0,1,2,3"}
    assert column(spread_over(2, environ, gpus="0123"), "JAX_LOCAL_DEVICE_IDS") == [None, None]
    assert column(spread_over(1, environ, gpus="0123"), "JAX_LOCAL_DEVICE_IDS") == ["0,1,2,3"]


@pytest.mark.parametrize(
    ("processes", "devices", "message"),
    [
        (3, None, r"3 processes were asked for, found 2 GPUs \(0,1\); ask for fewer, or .* --cpu"),
        (2, 2, r"2 processes with 2 GPUs each were asked for, found 2 GPUs \(0,1\)"),
    ],
)
def test_too_few_gpus(processes, devices, message):
    with pytest.raises(ValueError, match=message):
        spread_over(processes, devices_per_process=devices, gpus="01")
