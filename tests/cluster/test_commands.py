"""`feedline launch --print`: what other launchers read to start the same processes on several hosts."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import yaml

from feedline._src.cluster.detect import find
from feedline._src.tools.launch import Launch

FEEDLINE = [sys.executable, "-m", "feedline._src.tools.main"]
EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "cluster"


def printed(capsys, *command, **options):
    assert Launch(command=command, **options).run() == 0
    return capsys.readouterr().out


def test_the_srun_command(capsys):
    words = shlex.split(printed(capsys, "python", "my train.py", processes=8, hosts="4", print_for="slurm"))
    assert words == [
        *("env", "PYTHONUNBUFFERED=1", "srun", "--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8"),
        *("--exclusive", "--cpu-bind=none", "--kill-on-bad-exit=1", "--label", "python", "my train.py"),
    ]
    named = printed(
        capsys, "true", processes=1, devices_per_process=8, hosts="dgx1,dgx2", print_for="slurm"
    ).split()
    assert {"--nodes=2", "--nodelist=dgx1,dgx2", "--ntasks-per-node=1", "--gpus-per-node=8"} <= set(named)


def test_the_mpirun_command(capsys):
    words = shlex.split(printed(capsys, "true", "a b", processes=8, hosts="dgx1,dgx2", print_for="mpirun"))
    assert words[:7] == ["mpirun", "-n", "16", "--host", "dgx1:8,dgx2:8", "--map-by", "ppr:8:node"]
    assert words[-4:] == ["-x", "PYTHONUNBUFFERED=1", "true", "a b"]
    assert "--host" not in printed(capsys, "true", processes=8, hosts="2", print_for="mpirun").split()


def test_the_jobset_has_a_pod_for_each_process(capsys):
    options = {"processes": 2, "hosts": "3", "cpu": True, "devices_per_process": 2, "print_for": "jobset"}
    manifest = yaml.safe_load(printed(capsys, "echo", 'say "$(HOME)" für', **options))
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == 6
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["echo", 'say "$$(HOME)" für']  # Kubernetes replaces $(NAME), and not $$(NAME)
    assert {"name": "XLA_FLAGS", "value": "--xla_force_host_platform_device_count=2"} in container["env"]
    assert "resources" not in container


def test_the_pbs_script_starts_a_process_on_each_host(capsys, tmp_path):
    """bash runs the script. A stub of pbsdsh starts the processes one after the other."""
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    command = sys.executable, "-c", program
    script = printed(capsys, *command, processes=1, hosts="2", devices_per_process=8, print_for="pbs")
    assert "\n#PBS -l select=2:mpiprocs=1:ngpus=8\n" in script
    (tmp_path / "pbsdsh").write_text('#!/bin/sh\nshift\nfor i in 0 1; do PBS_NODENUM=$i "$@"; done\n')
    (tmp_path / "pbsdsh").chmod(0o700)
    (tmp_path / "nodes").write_text("node7\nnode8\n")
    job = {"PBS_JOBID": "12.server", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
    job["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    out = programs.run(["bash", "-c", script], env=job, check=True, capture_output=True).stdout
    found = [find(json.loads(line)) for line in out.splitlines()]
    assert [(each.launcher, each.process, each.processes) for each in found] == [("PBS", 0, 2), ("PBS", 1, 2)]
    assert {each.coordinator for each in found} == {"node7:61452"}


def test_the_manifest_of_the_example_is_what_is_printed(capsys):
    head, _, manifest = (EXAMPLES / "jobset.yaml").read_text().partition("apiVersion")
    command = re.search(r"#   (feedline launch (?:.|\n)*?)\n#\n", head)[1].replace("\\\n#", "")
    _, _, *words = shlex.split(command)
    options = words[: words.index("--")]
    chosen = dict(zip(options[::2], options[1::2], strict=True))
    out = printed(
        capsys,
        *words[words.index("--") + 1 :],
        processes=int(chosen["--processes"]),
        hosts=chosen["--hosts"],
        devices_per_process=int(chosen["--devices-per-process"]),
        print_for=chosen["--print"],
    )
    assert out == f"apiVersion{manifest}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": "2", "print_for": None}, r"this machine only, found --hosts 2; --print slurm, mpirun"),
        ({"hosts": "0"}, "--hosts must be a number above 0, or names such as dgx1,dgx2, found '0'"),
        ({"hosts": "a,,b"}, "found 'a,,b'"),
        ({"hosts": "a;rm"}, "found 'a;rm'"),
        ({"hosts": "a,b", "print_for": "jobset"}, "names a,b; give their number: --hosts 2"),
        ({"print_for": "pbs", "processes": 2}, "--hosts 1 --processes 1 --devices-per-process 8"),
        ({"command": ()}, "needs a command after --, found none; for example -- python train.py"),
        ({"processes": 0}, "--processes must be at least 1, got 0"),
        ({"devices_per_process": 0}, "--devices-per-process must be at least 1, got 0"),
        ({"stop_s": float("inf")}, "--stop-s must be above 0 .*, got inf"),
        ({"grace_s": -1.0}, "--grace-s must be above 0 .*, got -1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Launch(**{"processes": 1, "command": ("true",), "print_for": "slurm", **options}).run()


def printed_for_cpus(launcher, tool, hosts, processes=2):
    options = ["--processes", processes, "--hosts", hosts, "--cpu", "--devices-per-process", "2"]
    return launcher.run(*FEEDLINE, "launch", *options, "--print", tool, "--", *launcher.member).stdout


def unlabelled(text):
    return re.sub(r"^(\d+: |\[\d+,\d+\]<\w+>: ?)", "", text, flags=re.MULTILINE)


def members(launcher, out):
    return launcher.members(subprocess.CompletedProcess("", 0, unlabelled(out)))


AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
           "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # fmt: skip


@pytest.mark.cluster
def test_the_printed_srun_command_runs(launcher, joined_members):
    command = printed_for_cpus(launcher, "slurm", "node1,node2")
    done = launcher.run("sh", "-c", command, JAX_PLATFORMS="", XLA_FLAGS="")
    assert re.search(r"^3: ", done.stdout, re.MULTILINE)
    assert members(launcher, done.stdout) == joined_members(4)


@pytest.mark.cluster
def test_the_printed_mpirun_command_runs_in_a_job_of_slurm(launcher, joined_members, tmp_path):
    command = printed_for_cpus(launcher, "mpirun", "2")
    # standard output goes to its own file: in a shared one, mpirun writes standard error into its lines
    (tmp_path / "script").write_text(f"#!/bin/sh\nexec >{tmp_path}/printed\n{command}")
    options = ["--wait", "--nodes=2", "--ntasks-per-node=2", f"--output={tmp_path}/out"]
    launcher.run("sbatch", *options, tmp_path / "script", JAX_PLATFORMS="", XLA_FLAGS="", **AS_ROOT)
    assert members(launcher, (tmp_path / "printed").read_text()) == joined_members(4)


@pytest.mark.cluster
def test_the_printed_mpirun_command_runs_with_open_mpi_5(launcher, joined_members):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = printed_for_cpus(launcher, "mpirun", "localhost")
    done = launcher.run("sh", "-c", command, JAX_PLATFORMS="", XLA_FLAGS="", PATH=path, **AS_ROOT)
    assert members(launcher, done.stdout) == joined_members(2)
