"""`feedline launch` with real processes: output, failures and signals, and that no process is left.

A process prints a line when it is ready. When it has ended, the kernel makes its pidfd (a file descriptor)
readable. So these tests wait for events, not for a fixed time.
"""

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import programs
import pytest

DEADLINE_S = 120
LAUNCHER = """
import json, sys
from feedline._src.tools.launch import Launch
sys.exit(Launch(**json.loads(sys.argv[1])).run())
"""
FEEDLINE = [sys.executable, "-m", "feedline._src.tools.main"]


@contextlib.contextmanager
def started(command, *, before=(), stderr=subprocess.PIPE, **options):
    """Starts a launcher as a process, and ends it at the end of the block, or at the deadline."""
    options = {"command": command, "processes": 2, **options}
    with programs.started(
        [*before, sys.executable, "-c", LAUNCHER, json.dumps(options)],
        limit_s=DEADLINE_S,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ) as launcher:
        yield launcher


def finished(command, **options):
    """The output of a launcher, and its exit code."""
    with started(command, **options) as launcher:
        out, err = launcher.communicate()
        return subprocess.CompletedProcess(command, launcher.returncode, out, err)


@contextlib.contextmanager
def pipe():
    """The paths of the two ends of a pipe, which other processes may open."""
    ends = os.pipe()
    try:
        yield tuple(f"/proc/{os.getpid()}/fd/{end}" for end in ends)
    finally:
        for end in ends:
            os.close(end)


def sh(script):
    return ["sh", "-c", script]


def lines_until(launcher, count, pattern):
    """The first `count` lines of output, which all match."""
    lines = [launcher.stdout.readline() for _ in range(count)]
    assert all(re.fullmatch(pattern, line) for line in lines), [*lines, launcher.stderr.read()]
    return lines


@contextlib.contextmanager
def watched(pids):
    """Yields a function that returns the processes that have not ended by the deadline."""
    files = {os.pidfd_open(pid): pid for pid in pids}

    def left():
        end, alive = time.monotonic() + DEADLINE_S, dict(files)
        while alive and (wait_s := end - time.monotonic()) > 0:
            for file in select.select(list(alive), [], [], wait_s)[0]:
                del alive[file]
        return list(alive.values())

    try:
        yield left
    finally:
        for file in files:
            os.close(file)


def test_lines_are_prefixed_and_keep_their_stream():
    script = "cat; echo out $FEEDLINE_PROCESS of $FEEDLINE_PROCESSES; echo err >&2"  # there is no input
    done = finished(sh(script), processes=3)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{p}] out {p} of 3" for p in range(3)]
    assert sorted(done.stderr.splitlines()) == [f"[{p}] err" for p in range(3)]


def test_a_very_long_line_is_split():
    out = finished(sh("head -c 400000 /dev/zero | tr '\\0' x; echo; echo end"), processes=1).stdout
    *pieces, end = (line.removeprefix("[0] ") for line in out.splitlines())
    assert ("".join(pieces), end) == ("x" * 400000, "end")
    assert len(pieces) > 1


def test_lines_written_in_pieces_are_not_mixed():
    program = (
        "import os\n"
        "for i in range(500):\n"
        "    for piece in (b'line ', b'%d ' % i, b'x' * (i % 97), b'\\n'):\n"
        "        os.write(1 + i % 2, piece)"
    )
    done = finished([sys.executable, "-c", program], processes=4)
    for stream, odd in ((done.stdout, 0), (done.stderr, 1)):
        of_each = {f"[{p}]": [] for p in range(4)}
        for line in stream.splitlines():
            of_each[line[:3]].append(line[4:])
        expected = [f"line {i} {'x' * (i % 97)}" for i in range(odd, 500, 2)]
        assert all(lines == expected for lines in of_each.values())


def test_long_lines_are_not_mixed_when_both_streams_are_one_file():
    """After each 4 KiB that a thread writes to a pipe, bytes of another thread may come between."""
    program = "import os\nfor i in range(200): os.write(1 + i % 2, b'x' * 30000 + b'\\n')"
    with started([sys.executable, "-c", program], processes=1, stderr=subprocess.STDOUT) as launcher:
        out, _ = launcher.communicate()
    assert set(out.splitlines()) == {f"[0] {'x' * 30000}"}
    assert len(out.splitlines()) == 200


ENDLESS = "trap 'exit 0' TERM; echo $$ >&2; yes $FEEDLINE_PROCESS & %s; wait; wait"


def await_full(pipe):
    """Wait until nothing more fits into a pipe that nobody reads. No event tells this."""
    end, before = time.monotonic() + DEADLINE_S, -1
    while True:
        waiting = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"1234"))[0]
        if waiting > 1 << 15 and waiting == before:
            return
        assert time.monotonic() < end
        before = waiting
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["signal", "failure", "two signals"])
def test_a_launcher_whose_output_nobody_reads_obeys_signals(end):
    """As in `feedline launch ... | less`: a write blocks until somebody reads, or a signal ends the launcher."""
    fails = "[ $FEEDLINE_PROCESS = 1 ] && { sleep 1; echo the cause >&2; exit 3; }" if end == "failure" else ":"
    with started(sh(ENDLESS % fails)) as launcher:
        pids = [int(launcher.stderr.readline().split()[1]) for _ in range(2)]
        with watched(pids) as left:
            await_full(launcher.stdout)
            if "signal" in end:
                launcher.send_signal(signal.SIGTERM)
            assert left() == []
        if end == "two signals":
            while launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):  # the launcher may need another signal
                    launcher.wait(3)
        _, err = launcher.communicate()
        code = launcher.returncode
    assert code == {"failure": 3, "signal": 0, "two signals": 128 + signal.SIGTERM}[end]
    assert "Traceback" not in err
    if end == "failure":
        assert "process 1 of 2 exited with code 3; the others were stopped. Its last lines:\n" in err
        assert "[1] the cause\n" in err


@pytest.mark.slow
def test_a_launcher_whose_last_message_nobody_reads_obeys_signals():
    """The message repeats the last lines of the process that failed, and a pipe holds 64 KiB."""
    long_lines = "for i in $(seq 20); do head -c 4000 /dev/zero | tr '\\0' x; echo; done"
    with (
        started(sh(f"[ $FEEDLINE_PROCESS = 0 ] || {{ {long_lines}; exit 3; }}")) as launcher,
        watched([launcher.pid]) as left,
    ):
        lines_until(launcher, 20, r"\[1\] x{4000}\n")
        await_full(launcher.stderr)
        launcher.send_signal(signal.SIGTERM)
        assert left() == []
        assert launcher.wait() == 3


@pytest.mark.slow
def test_a_full_disk_under_the_output_is_an_error():
    command = [*FEEDLINE, "launch", "--processes", "2", "--cpu", "--", "sh", "-c", "echo hi; sleep 1000"]
    with open("/dev/full", "wb") as full:
        done = programs.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "feedline: the output of the processes must be written, and that failed (No space" in done.stderr


def test_output_that_is_read_late_is_complete():
    done_by_one, line = "yes $FEEDLINE_PROCESS | head -c 60000; echo done >&2", r"\[[01]\] done\n"
    with started(sh(done_by_one)) as launcher:
        told = [launcher.stderr.readline() for _ in range(2)]
        assert all(re.fullmatch(line, each) for each in told)
        out = launcher.stdout.read()
        assert launcher.wait() == 0
    assert [out.count(f"[{process}] {process}\n") for process in range(2)] == [30000, 30000]


@pytest.mark.slow
def test_output_is_complete_although_the_thread_that_copies_it_stands_still():
    still = (
        "import time\nfrom feedline._src.tools import launch\nlaunch.blamed_process = lambda line: time.sleep(2)"
    )
    options = json.dumps({"command": sh("echo out"), "processes": 1})
    done = programs.run([sys.executable, "-c", still + LAUNCHER, options], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] out\n", "")


def test_the_first_failure_ends_the_others_and_is_reported():
    """The others wait for a child process, which must get the signal too. The cause is shown last."""
    script = (
        "trap 'echo asked to end; echo noise >&2; exit' TERM\n"
        "echo ready\n"
        "if [ $FEEDLINE_PROCESS = 1 ]; then { read -r a; read -r b; } <%s; echo the cause >&2; exit 3; fi\n"
        "echo >%s; sleep 1000 & wait"
    )
    with pipe() as (reading, writing):
        done = finished(sh(script % (reading, writing)), processes=3, grace_s=1000)
    assert done.returncode == 3
    assert "[1] asked to end" not in done.stdout
    told = "feedline launch: process 1 of 3 exited with code 3; the others were stopped. Its last lines:\n"
    noise, heading, last = done.stderr.partition(told)
    assert heading
    assert noise.splitlines().count("[0] noise") == noise.splitlines().count("[2] noise") == 1
    assert sorted(last.splitlines()) == ["[1] ready", "[1] the cause"]


def test_a_process_that_ignores_sigterm_is_killed():
    script = "if [ $FEEDLINE_PROCESS = 1 ]; then exit 3; fi; trap '' TERM HUP INT; sleep 1000; echo late"
    done = finished(sh(script), grace_s=0.1)
    assert (done.returncode, done.stdout) == (3, "")


def test_the_hint_about_memory_is_about_the_process_that_failed_first():
    script = "if [ $FEEDLINE_PROCESS = 1 ]; then kill -KILL $$; fi; trap '' TERM HUP INT; sleep 1000"
    assert "(Killed); the kernel sends this signal when memory" in finished(sh(script), grace_s=0.1).stderr


def test_a_process_killed_by_a_signal_is_reported():
    done = finished(sh("kill -KILL $$"), processes=1)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr == (
        "feedline launch: process 0 of 1 was killed by signal 9 (Killed); the kernel sends this signal when "
        "memory runs out\n"
    )
    assert finished(sh("kill -SEGV $$"), processes=1).returncode == 128 + signal.SIGSEGV


@pytest.mark.slow
def test_a_process_without_heartbeats_is_named_not_the_one_that_jax_ends():
    program = (
        "import os, signal, threading, feedline\n"
        "feedline.cluster.initialize(abort_after_s=1)\n"
        "if os.environ['FEEDLINE_PROCESS'] == '1':\n"
        "    print('about to stop', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "threading.Event().wait()\n"
    )
    done = finished([sys.executable, "-c", program], processes=2, cpu=True, grace_s=0.1)
    assert done.returncode == 128 + signal.SIGKILL
    assert "feedline launch: process 1 of 2 was killed by signal 9 (Killed); the others were" in done.stderr
    assert done.stderr.rstrip().endswith("[1] about to stop")


def test_the_process_that_another_one_names_is_shown_though_it_ends_later():
    """A process 0 that failed first ends last, because the others read from it why they end."""
    script = (
        "trap '' TERM; [ $FEEDLINE_PROCESS = 0 ] && { echo >%s; sleep 0.5; echo cause >&2; exit 3; }\n"
        "read -r a <%s; echo 'feedline: process 0 failed: OSError: no space' >&2; exit 1"
    )
    with pipe() as (reading, writing), started(sh(script % (writing, reading)), grace_s=1000) as launcher:
        _, err = launcher.communicate()
    assert launcher.returncode == 3
    told = (
        "feedline launch: process 0 of 2 exited with code 3; the others were stopped. Its last lines:\n[0] cause\n"
    )
    assert err.endswith(told)


def test_a_process_that_succeeds_early_does_not_end_the_others():
    script = "[ $FEEDLINE_PROCESS = 0 ] || { read -r line <%s; echo $line; }"
    with pipe() as (reading, writing), started(sh(f"echo ready; {script % reading}")) as launcher:
        lines_until(launcher, 2, r"\[\d\] ready\n")
        Path(writing).write_text("goes on\n")
        assert launcher.stdout.readline() == "[1] goes on\n"
        assert launcher.wait() == 0


@pytest.mark.parametrize("name", ["HUP", "INT", "TERM"])
def test_signals_are_forwarded(name):
    """Children and grandchildren get the signal once; if all of them exit with 0, so does the launcher."""
    ready = f"trap 'echo {name}; exit 0' {name}; echo ready; "
    child = ["env", f"CHILD={ready} sleep 1000 & wait", *sh(f'{ready} sh -c "$CHILD"')]
    with started(child) as launcher:
        lines_until(launcher, 4, r"\[\d\] ready\n")
        launcher.send_signal(getattr(signal, f"SIG{name}"))
        out, err = launcher.communicate()
        assert (launcher.returncode, err) == (0, "")
        assert sorted(out.splitlines()) == [f"[{p}] {name}" for p in (0, 0, 1, 1)]


def test_a_second_signal_kills_at_once():
    script = "trap 'echo again' INT; echo ready; sleep 1000 & while :; do wait; done"
    with started(sh(script), stop_s=1000, grace_s=1000) as launcher:
        lines_until(launcher, 2, r"\[\d\] ready\n")
        launcher.send_signal(signal.SIGINT)
        lines_until(launcher, 2, r"\[\d\] again\n")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait() == 128 + signal.SIGKILL


def test_processes_that_do_not_end_after_a_signal_are_killed():
    script = "trap '' INT TERM; echo ready; sleep 1000 & while :; do wait; done"
    with started(sh(script), stop_s=0.1) as launcher:
        lines_until(launcher, 2, r"\[\d\] ready\n")
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate()
        assert launcher.returncode == 128 + signal.SIGKILL
        # killed by the launcher, not by the kernel for want of memory
        assert "signal 9 (Killed), after SIGTERM had been forwarded and 0.1 s had passed; --stop-s allows" in err


def test_processes_get_stop_s_to_end_after_a_signal():
    """The first process that ends, with the exit code of a signal, does not make the launcher end the others."""
    script = (
        "trap '[ $FEEDLINE_PROCESS = 0 ] && exit 143; read -r line <%s; echo saved; exit 143' TERM\n"
        "echo $$; sleep 1000 & wait"
    )
    with pipe() as (reading, writing), started(sh(script % reading), grace_s=0.0) as launcher:
        lines = sorted(lines_until(launcher, 2, r"\[\d\] \d+\n"))
        with watched([int(lines[0].split()[1])]) as left:
            launcher.send_signal(signal.SIGTERM)
            assert left() == []
        Path(writing).write_text("now\n")
        out, _ = launcher.communicate()
        assert (launcher.returncode, out) == (143, "[1] saved\n")


def test_a_signal_that_nohup_ignores_is_not_forwarded():
    with started(sh("echo ready; exec sleep 1000"), before=["nohup"]) as launcher:
        lines_until(launcher, 2, r"\[\d\] ready\n")
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate()
        assert "after SIGTERM had been forwarded" in err
        assert launcher.returncode == 128 + signal.SIGTERM


def test_a_launcher_that_was_started_with_sigchld_ignored_sees_how_processes_end():
    ignoring = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    done = finished(sh("exit 3"), processes=1, before=[sys.executable, "-c", ignoring])
    assert done.returncode == 3
    assert "process 0 of 1 exited with code 3" in done.stderr


# A process with a child of its own; both print their pid, and both ignore SIGTERM.
FAMILY = "trap '' HUP INT TERM; sh -c 'echo $$; exec sleep 1000' & echo $$; wait"


def pids_of_families(launcher, processes):
    lines = lines_until(launcher, 2 * processes, r"\[\d\] \d+\n")
    pids = [int(line.split()[1]) for line in lines]
    group = os.getpgid(pids[0])  # A group's number is the pid of its first process, the guard.
    assert group not in (os.getpgid(0), *pids)
    return [group, *pids]


def test_no_process_outlives_a_killed_launcher():
    with started(sh(FAMILY), processes=3) as launcher:
        pids = pids_of_families(launcher, 3)
        with watched(pids) as left:
            launcher.kill()
            assert left() == []


def test_no_process_outlives_the_reader_of_the_output():
    with started(sh("echo $$; sleep 1000 & echo $!; while :; do echo more; done"), processes=1) as launcher:
        pids = [int(line.split()[1]) for line in lines_until(launcher, 2, r"\[\d\] \d+\n")]
        with watched(pids) as left:
            launcher.stdout.close()
            assert launcher.wait() == 128 + signal.SIGPIPE
            assert left() == []
            assert launcher.stderr.read() == ""


def test_processes_may_still_save_if_the_ctrl_c_has_ended_the_reader_of_the_output():
    """Ctrl-C also ends a reader such as `tee`."""
    saves = "trap 'echo saves; sleep 0.2; echo saved >&2; exit 3' INT; echo ready; while :; do sleep 0.1; done"
    with started(sh(saves)) as launcher:
        lines_until(launcher, 2, r"\[\d\] ready\n")
        launcher.send_signal(signal.SIGINT)
        launcher.stdout.close()
        err = launcher.stderr.read()
        assert launcher.wait() == 3
    assert sorted(err.splitlines()[:2]) == ["[0] saved", "[1] saved"]
    assert "exited with code 3, after SIGINT had been forwarded" in err


def test_children_of_a_finished_process_are_ended():
    done = finished(sh("sleep 1000 & echo $!"), processes=3)
    assert done.returncode == 0
    for line in done.stdout.splitlines():
        with contextlib.suppress(ProcessLookupError), watched([int(line.split()[1])]) as left:
            assert left() == []


def test_a_process_in_another_process_group_gets_signals_too():
    with started(["setsid", "sh", "-c", "echo $$; exec sleep 1000"], processes=2) as launcher:
        pids = [int(line.split()[1]) for line in lines_until(launcher, 2, r"\[\d\] \d+\n")]
        with watched(pids) as left:
            launcher.send_signal(signal.SIGTERM)
            assert left() == []
            assert launcher.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_daemon_that_keeps_the_output_open_does_not_block_the_launcher():
    program = "import subprocess as s; print(s.Popen(['sleep', '1000'], start_new_session=True).pid)"
    with started([sys.executable, "-c", program], processes=1) as launcher:
        (line,) = lines_until(launcher, 1, r"\[0\] \d+\n")
        try:
            assert launcher.wait() == 0
        finally:
            os.kill(int(line.split()[1]), signal.SIGKILL)


def run_feedline(*arguments, before=()):
    command = [*before, *FEEDLINE, *arguments]
    return programs.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("command", "processes", "message"),
    [
        ("/etc/passwd", 2, "cannot run /etc/passwd: Permission denied; check that it runs"),
        ("sleep", 100, "cannot run sleep: Too many open files; check that"),
    ],
)
def test_a_command_that_cannot_be_run(command, processes, message):
    limited = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    done = run_feedline("launch", "--processes", str(processes), "--", command, "1000", before=limited)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_two_processes_join_and_compute_together():
    program = (
        "import feedline\n"
        "feedline.cluster.initialize()\n"
        "feedline.cluster.initialize()\n"
        "import jax, numpy\n"
        "from jax.experimental import multihost_utils\n"
        "total = multihost_utils.process_allgather(numpy.array(jax.process_index() + 1)).sum()\n"
        "told = (jax.process_count(), jax.local_device_count(), jax.device_count(), total)\n"
        "print('%s %s %s %s\\n' % told, end='')\n"  # in one write
    )
    options = ["--processes", "2", "--cpu", "--devices-per-process", "2"]
    done = run_feedline("launch", *options, "--", sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 2 4 3") == 2  # Gloo writes there too, from other threads, and into our lines
    for process in range(2):
        line = (
            rf"\[{process}\] feedline: process {process} of 2, found environment variables "
            rf"\(FEEDLINE_PROCESS={process}\), coordinator 127.0.0.1:\d+, all local devices"
        )
        assert len(re.findall(line, done.stderr)) == 1
