"""Processes are bound to the processors near their GPUs, never to others than they were given."""

import json
import os
import sys

import programs
import pytest
from test_machine import tree

from feedline._src.cluster.binding import bind, near_processors, nodes_of, own_gpus
from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.machine import as_list, numbers, topology, usable_gpus

NODES = {0: "0-55,112-167", 1: "56-111,168-223"}
GPUS = [("1b", 0), ("43", 0), ("52", 0), ("61", 0), ("9d", 1), ("c3", 1), ("d1", 1), ("df", 1)]
"""A DGX H100: two sockets of 56 cores with two threads each, four GPUs at each."""
ALL = numbers("0-223")


def planted(root, nodes=NODES, gpus=GPUS):
    """A folder with the files in which Linux and the NVIDIA driver describe such a machine."""
    files = {f"sys/devices/system/node/node{node}/cpulist": text + "\n" for node, text in nodes.items()}
    files["proc/self/status"] = f"Name:\tpython\nMems_allowed_list:\t{as_list(set(nodes))}\n"
    for i, (bus, node) in enumerate(gpus):
        folder = f"sys/bus/pci/devices/0000:{bus}:00.0"
        files |= {f"{folder}/class": "0x030200", f"{folder}/vendor": "0x10de", f"{folder}/numa_node": str(node)}
        files[f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information"] = (
            f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-{bus}e0\nDevice Minor: \t {i}\n"
        )
        files[f"dev/nvidia{i}"] = ""
    return tree(root, files)


@pytest.fixture(scope="module")
def dgx(tmp_path_factory):
    return planted(tmp_path_factory.mktemp("dgx"))


def planned(root, devices, allowed=ALL, **environ):
    machine = topology(root)
    nodes = nodes_of(own_gpus(environ, devices, usable_gpus(root)), machine)
    return as_list(near_processors(machine, nodes, allowed))


def test_a_process_gets_the_processors_of_the_socket_of_its_gpus(dgx):
    assert planned(dgx, (0,)) == "0-55,112-167"
    assert planned(dgx, (5,)) == "56-111,168-223"
    assert planned(dgx, tuple(range(8))) == "0-223"


def test_the_gpus_that_the_launcher_has_divided(dgx, tmp_path):
    by_number = planned(dgx, None, CUDA_VISIBLE_DEVICES="5")
    by_name = planned(dgx, None, CUDA_VISIBLE_DEVICES="GPU-c3e0")
    hidden = planted(tmp_path)  # as under Slurm: a task may open only its own GPU, as number 0
    for i in set(range(8)) - {5}:
        (hidden / f"dev/nvidia{i}").unlink()
    by_group = planned(hidden, None, CUDA_VISIBLE_DEVICES="0")
    assert by_number == by_name == by_group == planned(dgx, (5,))


def test_never_wider_than_what_was_given(dgx):
    given = numbers("10-69")
    assert planned(dgx, (0,), given) == "10-55"
    assert planned(dgx, (7,), given) == "56-69"
    assert planned(dgx, (7,), numbers("3,4")) == ""


def test_a_machine_without_gpus_nodes_or_files(dgx, tmp_path):
    info = ProcessInfo("a test", "PROCESS", "node1:1234", 2, 0, local_devices=(0,))
    assert bind(info, tmp_path) is None
    assert bind(info, planted(tmp_path, {0: "0-223"}, [("1b", 0)])) is None
    assert bind(info, planted(tmp_path, gpus=[("1b", -1)])) is None
    assert bind(info, planted(tmp_path, gpus=[])) is None
    assert bind(None, dgx) is None  # a single process uses the GPUs of all nodes
    assert own_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"}, None, usable_gpus(dgx)) == []
    assert own_gpus({"CUDA_VISIBLE_DEVICES": "1,0"}, (0,), usable_gpus(dgx)) == ["0000:43:00.0"]


def bound(root, **given):
    """What `bind` returns in a new process, and the processors of the process, an older thread, and a child."""
    program = (
        "import json, os, subprocess, sys, threading\n"
        "from pathlib import Path\n"
        "given = json.loads(sys.argv[1])\n"
        "if given['allowed']: os.sched_setaffinity(0, given['allowed'])\n"
        "before, release = [], threading.Event()\n"
        "thread = threading.Thread(target=lambda: (release.wait(), before.extend(os.sched_getaffinity(0))))\n"
        "thread.start()\n"
        "from feedline._src.cluster.binding import bind\n"
        "from feedline._src.cluster.launchers.launcher import ProcessInfo\n"
        "(device,) = given['devices']\n"
        "info = ProcessInfo('a test', 'PROCESS', 'node1:1', 2, device, device, 2, (device,))\n"
        "told = bind(info, Path(given['root']))\n"
        "release.set(); thread.join()\n"
        "child = subprocess.run([sys.executable, '-c', 'import os; print(*os.sched_getaffinity(0))'],\n"
        "                       capture_output=True, text=True, check=True).stdout.split()\n"
        "print(json.dumps([told, sorted(os.sched_getaffinity(0)), before, [int(each) for each in child]]))\n"
    )
    arguments = json.dumps({"root": str(root), "devices": (0,), "allowed": None, **given})
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = programs.run(
        [sys.executable, "-c", program, arguments], capture_output=True, text=True, env=environ, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one processor there is nothing to choose")
def test_threads_and_processes_are_bound(tmp_path):
    first, second = sorted(os.sched_getaffinity(0))[:2]
    root = planted(tmp_path, {0: str(first), 1: str(second)}, [("1b", 0), ("9d", 1)])
    for device, processor in enumerate((first, second)):
        told, own, thread, child = bound(root, devices=(device,))
        assert told == f"processors {processor} of memory node {device}"
        assert own == thread == child == [processor]
    told, own, thread, child = bound(root, devices=(0,), allowed=[second])
    assert told.startswith(f"not bound: its GPUs are on memory node 0, but it may only use processors {second}, ")
    assert own == thread == child == [second]
