"""Limits of control groups, versions 1 and 2: processors and memory."""

import pytest

from feedline._src.machine import memory, quota


def tree(root, files):
    """A folder with these files, by their paths in it."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


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
    assert quota(tree(tmp_path, files)) == expected


INFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\nHugePages_Total: 0\n"


def test_memory_of_version_1(tmp_path):
    group = {
        "proc/meminfo": INFO,
        "proc/self/cgroup": "3:memory:/job\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 << 30),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(3 << 30),
        "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\ntotal_inactive_file {1 << 30}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(9 << 30),
    }
    assert memory(tree(tmp_path, group)) == (4 << 30, 2 << 30)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (64, 48)),
        ({"job/memory.max": 8 << 30, "job/memory.current": 8 << 30}, (8, 0)),
        (
            {
                "job/memory.max": 8 << 30,
                "job/memory.current": 8 << 30,
                "job/memory.stat": f"anon 5\ninactive_file {4 << 30}\n",
            },
            (8, 4),
        ),
        ({"job/memory.max": "max", "job/memory.current": 8 << 30}, (64, 48)),
        (  # other groups use the outer group's memory
            {
                "job/memory.max": 4 << 30,
                "job/memory.current": 1 << 30,
                "memory.max": 16 << 30,
                "memory.current": 15 << 30,
            },
            (4, 1),
        ),
    ],
)
def test_memory_of_the_machine_or_its_group(limits, expected, tmp_path):
    files = {"proc/meminfo": INFO, "proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/none": ""}
    files |= {f"sys/fs/cgroup/{name}": str(value) for name, value in limits.items()}
    total, free = memory(tree(tmp_path, files))
    assert (total >> 30, free >> 30) == expected
