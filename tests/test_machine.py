"""Limits of control groups, versions 1 and 2: processors and memory."""

import pytest

from feedline._src.machine import memory, quota


def tree(root, files):
    """A folder with these files, by their paths in it."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


JOB_OF_1 = "cpu/job/cpu.cfs_"
INSIDE = "cpu,cpuacct/cpu.cfs_"
"""Paths of the limits in version 1: of the group `job`, and of a container as seen from inside."""


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, None),
        ("0::/job", {"job/cpu.max": "max 100000"}, None),
        ("0::/job/a", {"job/cpu.max": "250000 100000"}, 2.5),
        ("0::/job", {"job/cpu.max": "800000 100000", "cpu.max": "400000 100000"}, 4),
        (
            "4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/",
            {f"{INSIDE}quota_us": "150000", f"{INSIDE}period_us": "100000"},
            1.5,
        ),
        ("4:cpu:/job", {f"{JOB_OF_1}quota_us": "-1", f"{JOB_OF_1}period_us": "100000"}, None),
    ],
)
def test_quota_of_processors(group, files, expected, tmp_path):
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    files = {f"sys/fs/cgroup/{path}": f"{text}\n" for path, text in files.items()}
    assert quota(tree(tmp_path, {"proc/self/cgroup": f"{group}\n", **files})) == expected


INFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\nHugePages_Total: 0\n"
STATISTICS = f"anon 5\ninactive_file {4 << 30}\n"


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
        ({"job/memory.max": 8, "job/memory.current": 8}, (8, 0)),
        ({"job/memory.max": 8, "job/memory.current": 8, "job/memory.stat": STATISTICS}, (8, 4)),
        ({"job/memory.max": "max", "job/memory.current": 8}, (64, 48)),
        (  # other groups use the outer group's memory
            {"job/memory.max": 4, "job/memory.current": 1, "memory.max": 16, "memory.current": 15},
            (4, 1),
        ),
    ],
)
def test_memory_of_the_machine_or_its_group(limits, expected, tmp_path):
    """Numbers are in GiB."""
    files = {"proc/meminfo": INFO, "proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/none": ""}
    for name, value in limits.items():
        files[f"sys/fs/cgroup/{name}"] = value if isinstance(value, str) else str(value << 30)
    total, free = memory(tree(tmp_path, files))
    assert (total >> 30, free >> 30) == expected
