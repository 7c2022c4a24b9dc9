"""The checks of a machine: each with the trouble planted, and without it."""

import math
import os
import resource
import sys
from pathlib import Path

import programs
import pytest

from feedline._src.cluster.cgroups import GroupLimits, limits
from feedline._src.cluster.topology import Topology, topology
from feedline._src.tools.doctor import devices, machine

MANY = frozenset(range(64))
TWO_NODES = {0: frozenset(range(32)), 1: frozenset(range(32, 64))}


def tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


FAST = devices.Rates(pageable=20e9, pinned=25e9)  # figures of accelerators that do not exist
GPUS = {"jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"}
LINKS = devices.parsed_links
NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("check", "arguments", "expected", "words"),
    [
        (machine.check_threads, (64, 64, 4.0, 16), "warning", "grants 4 processors, but libraries count 64"),
        (machine.check_threads, (64, 1, None, 2), "warning", "1 of 64 processors"),
        (machine.check_threads, (64, 64, None, 16), "ok", "64 processors"),
        (machine.check_threads, (64, 64, 64.0, 16), "ok", "64 processors"),
        (machine.check_shared_memory, (64 << 20, 64 << 20), "warning", "64 MiB"),
        (machine.check_shared_memory, (8 << 30, 8 << 30), "ok", "8 GiB"),
        (machine.check_open_files, (256, 256), "warning", "256 files"),
        (machine.check_open_files, (1024, 1 << 20), "note", "1,024 files"),
        (machine.check_open_files, (65536, 65536), "ok", "65,536 files"),
        (machine.check_open_files, (NO_LIMIT, NO_LIMIT), "ok", "any number of files"),
        (machine.check_page_cache, (200 << 30, 48 << 30), "note", "do not fit"),
        (machine.check_page_cache, (20 << 30, 48 << 30), "ok", "data fit"),
        (machine.check_read_rate, (500e6, 5.0, 0), "warning", "100 MB/s"),
        (machine.check_read_rate, (500e6, 1.0, 1), "ok", "500 MB/s"),
        (machine.check_read_rate, (500e6, 1.0, 8), "warning", "on 8 H100 reads 1,640 MB/s"),
        (machine.check_read_rate, (1e5, 0.1, 1), "unknown", "too little"),
        (machine.check_preallocation, ({"HOME": "/root"},), "ok", "the defaults"),
        (machine.check_preallocation, ({"XLA_CLIENT_MEM_FRACTION": "0.9"},), "ok", "FRACTION=0.9"),
        (machine.check_preallocation, ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},), "note", "CATE=false"),
        (machine.check_preallocation, ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},), "warning", "=platform"),
        (machine.check_preallocation, ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.99"},), "warning", "=0.99"),
        (machine.check_preallocation, ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "90%"},), "warning", "=90%"),
        (machine.check_x64, (True,), "note", "is on"),
        (machine.check_x64, (False,), "ok", "is off"),
        (machine.check_devices, ("gpu", 8, GPUS, ""), "ok", "8 NVIDIA GPUs"),
        (machine.check_devices, ("cpu", 0, {"jaxlib": "0.10.2"}, ""), "ok", "0 NVIDIA GPUs"),
        (machine.check_devices, ("cpu", 1, {"jaxlib": "0.10.2"}, ""), "error", "no CUDA plugin"),
        (machine.check_devices, ("cpu", 8, {**GPUS, "jaxlib": "0.10.1"}, ""), "error", "and jaxlib 0.10.1"),
        (machine.check_devices, ("cpu", 8, GPUS, "cpu"), "error", "JAX_PLATFORMS is cpu"),
        (machine.check_devices, ("cpu", 8, GPUS, ""), "error", "could not start"),
        (machine.check_versions, ({"grain": "0.2.18"},), "note", "grain 0.2.18"),
        (machine.check_versions, ({"grain": "0.2.19"},), "ok", "none"),
        (machine.check_driver, ("525.60.13", {"jax-cuda12-plugin": ""}), "ok", "CUDA 12"),
        (machine.check_driver, ("470.82.01", {"jax-cuda12-plugin": ""}), "error", "older than 525.60.13"),
        (machine.check_driver, ("535.104", {"jax-cuda13-plugin": ""}), "error", "older than 580"),
        (machine.check_driver, ("580.65.06", {"jax-cuda13-plugin": ""}), "ok", "CUDA 13"),
        (machine.check_driver, (None, {"jax-cuda13-plugin": ""}), "unknown", "no NVIDIA driver"),
        (machine.check_driver, ("580.65.06", {}), "unknown", "no CUDA plugin"),
        (machine.check_constant_operand, (True, "0.10.2", "cpu"), "ok", "right"),
        (machine.check_constant_operand, (False, "0.10.2", "cpu"), "error", "wrong"),
        (machine.check_constant_operand, (False, "0.10.2", "gpu"), "note", "wrong"),
        (devices.check_pageable, (FAST,), "ok", "20.0 GB/s"),
        (devices.check_pageable, (devices.Rates(5e9, 25e9),), "warning", "5.0 GB/s"),
        (devices.check_link, (FAST, LINKS("4, 16, 16\n4, 16, 16\n")), "ok", "reaches 25.0 GB/s"),
        (devices.check_link, (FAST, LINKS("4, 16, 16\n4, 8, 16\n")), "warning", "8 of 16 lanes"),
        (devices.check_link, (FAST, LINKS("5, 16, 16\n")), "warning", "63.0 GB/s"),
        (devices.check_link, (FAST, LINKS("[N/A], [N/A], [N/A]\n")), "unknown", "does not report"),
        (devices.check_all_devices, (FAST, devices.Rates(1.0, 190e9), 8), "ok", "to 8 devices"),
        (devices.check_all_devices, (FAST, devices.Rates(1.0, 50e9), 8), "note", "to 8 devices"),
        (devices.check_all_devices, (FAST, devices.Rates(1.0, 25e9), 1), "ok", "to 1 devices"),
        (devices.check_overlap, ({0: 2.1, 1: 1.1, 2: 1.05}, "gpu"), "ok", "1.05 ×"),
        (devices.check_overlap, ({0: 2.1, 1: 1.1, 2: 1.6}, "gpu"), "warning", "1.60 ×"),
        (devices.check_overlap, ({0: 2.1, 1: 1.1, 2: 1.6}, "cpu"), "note", "1.60 ×"),
    ],
)
def test_a_check_judges_what_was_measured(check, arguments, expected, words):
    found = check(*arguments)
    assert found.severity == expected
    assert words in found.finding
    assert bool(found.fix and found.why) == (expected not in ("ok", "unknown"))


def test_the_hard_limit_of_open_files_is_named_where_it_is_too_low():
    assert "limits.conf" in machine.check_open_files(256, 256).fix
    assert "limits.conf" not in machine.check_open_files(1024, 1 << 20).fix


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/job/a\n", "sys/fs/cgroup/job/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/cpu.max": "400000 100000\n",
            },
            4,
        ),
        (  # version 1, seen from inside of a container
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quota_of_processors(files, expected, tmp_path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert limits(tree(tmp_path, files)).processors == expected


@pytest.mark.slow
@pytest.mark.skipif(os.cpu_count() == 1, reason="one processor")
def test_a_process_that_is_bound_to_one_processor():
    bound = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from feedline._src.tools.doctor import machine; print(next(machine.machine_checks({}, None)).severity)"
    )
    done = programs.run([sys.executable, "-c", bound], capture_output=True, text=True, check=True)
    assert done.stdout == "warning\n"


def pci(address, node, kind="0x030200", vendor="0x10de"):
    folder = f"sys/bus/pci/devices/{address}"
    return {f"{folder}/class": kind, f"{folder}/vendor": vendor, f"{folder}/numa_node": str(node)}


def numa(root, memory, *gpus):
    files = {f"sys/devices/system/node/node{n}/cpulist": f"{32 * n}-{32 * n + 31}\n" for n in (0, 1)}
    files["proc/self/status"] = f"Name:\tpython\nMems_allowed_list:\t{memory}\n"
    for i, node in enumerate(gpus):
        files |= pci(f"0000:{i}1:00.0", node)
    files |= pci("0000:f1:00.0", 1, kind="0x020000")  # a network card
    return topology(tree(root, files))


@pytest.mark.parametrize(
    ("allowed", "memory", "gpus", "expected"),
    [
        (range(32), "0-1", [1, 1], "warning"),
        (range(32), "1", [], "warning"),
        (range(32), "0", [0, 1], "note"),
        (range(32), "0-1", [0], "ok"),
        (range(64), "0-1", [0, 1], "ok"),
        (range(32), "0-1", [-1], "ok"),
    ],
)
def test_affinity(allowed, memory, gpus, expected, tmp_path):
    found = numa(tmp_path, memory, *gpus)
    assert found.processors == TWO_NODES
    assert len(found.accelerators) == len(gpus)
    assert machine.check_affinity(frozenset(allowed), found).severity == expected


def test_one_memory_node():
    found = Topology({0: MANY}, {0}, {})
    assert machine.check_affinity(MANY, found).severity == "ok"


@pytest.mark.slow
def test_a_low_limit_of_open_files():
    low = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (128, 128))\n"
        "from feedline._src.tools.doctor.machine import check_open_files\n"
        "print(check_open_files(*r.getrlimit(r.RLIMIT_NOFILE)).finding)"
    )
    done = programs.run([sys.executable, "-c", low], capture_output=True, text=True, check=True)
    assert done.stdout == "this process may open 128 files\n"


def memory(root, available_gib, **group):
    info = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n"
    files = {"proc/meminfo": info, "proc/self/cgroup": "0::/\n"}
    files |= {f"sys/fs/cgroup/memory.{name}": str(value) for name, value in group.items()}
    return machine.memory(tree(root, files))


@pytest.mark.parametrize(
    ("available", "group", "expected"),
    [
        (48, {}, "ok"),
        (1, {}, "warning"),
        (48, {"max": 8 << 30, "current": 8 << 30}, "warning"),
        (48, {"max": 8 << 30, "current": 8 << 30, "stat": f"anon 5\ninactive_file {4 << 30}\n"}, "ok"),
        (48, {"max": "max", "current": 8 << 30}, "ok"),
    ],
)
def test_free_memory(available, group, expected, tmp_path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    assert machine.check_memory(memory(tmp_path, available, **group)).severity == expected


def test_memory_of_version_1(tmp_path):
    group = {
        "proc/self/cgroup": "3:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 << 30),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 << 30),
        "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\ntotal_inactive_file {1 << 30}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(9 << 30),
    }
    assert limits(tree(tmp_path, group)) == GroupLimits(None, 4 << 30, 2 << 30)


def test_reading_is_bounded(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.bin").write_bytes(bytes(20 << 20))
    files = machine.files_below(tmp_path)
    assert len(files) == 3
    assert machine.read_rate(files, seconds=math.inf)[0] == 60 << 20
    most = machine.read_rate(files, most=24 << 20, seconds=math.inf)
    assert most[0] == 28 << 20  # the block that passes the limit is the last
    assert machine.read_rate(files, seconds=0)[0] == 8 << 20
    with pytest.raises(FileNotFoundError, match="--data"):
        machine.files_below(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6\nGCC version: 12", "535.54.03"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        (None, None),
    ],
)
def test_version_of_the_driver(text, expected, tmp_path):
    root = tmp_path if text is None else tree(tmp_path, {"proc/driver/nvidia/version": text})
    assert machine.driver_version(root) == expected


def test_the_driver_lists_its_gpus(tmp_path):
    assert machine.gpu_count(tmp_path) == 0
    tree(tmp_path, {f"proc/driver/nvidia/gpus/0000:{i}1:00.0/information": "Model: H100" for i in range(8)})
    assert machine.gpu_count(tmp_path) == 8


@pytest.mark.slow
def test_without_the_fusion_a_constant_operand_is_right():
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type="}
    told = "from feedline._src.tools.doctor import machine; print(machine.constant_operand_is_right())"
    done = programs.run(
        [sys.executable, "-c", told], capture_output=True, text=True, check=True, env=os.environ | flags
    )
    assert done.stdout == "True\n"


def test_a_disturbed_measurement_of_the_overlap_is_made_again(monkeypatch):
    measured = iter([1.9, 1.1])

    def overlap(step_s, steps):
        of_the_slower = next(measured)
        return {"depths": [{"prefetch": depth, "of_the_slower": of_the_slower} for depth in range(4)]}

    monkeypatch.setattr(devices, "overlap", overlap)
    assert devices.overlaps()[2] == 1.1


def test_the_measurement_of_transfers_runs():
    import jax

    rates = devices.transfer_rates(jax.devices(), batch_bytes=1 << 18, seconds=0.01)
    assert min(rates) > 0


def test_without_an_accelerator_no_figure_of_one_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "overlaps", lambda: {0: 2.0, 1: 1.0, 2: 1.0, 3: 1.0})
    (tmp_path / "rows.bin").write_bytes(bytes(2 << 20))
    found = {check.name: check for check in machine.machine_checks({}, tmp_path)}
    for name in ("pageable and pinned memory", "link to the devices", "all devices at once"):
        assert found[name].severity == "unknown"
        assert "no accelerator" in found[name].finding
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    assert not [name for name in found if f"| {name} |" not in page]  # each check is in the table
    assert found["disk read rate"].severity in ("ok", "warning")
    assert found["page cache"].severity == "ok"
