"""All processes of a run arrive at the coordinator's port, and none joins another run there."""

import contextlib
import errno
import itertools
import math
import queue
import random
import re
import selectors
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import as_completed, wait
from types import SimpleNamespace

import programs
import pytest
from background import spawn

from feedline._src.cluster import rendezvous
from feedline._src.cluster.join import initialize
from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.cluster.rendezvous import meet
from feedline._src.errors import FeedError, ProcessError
from feedline._src.tools.launch import reserved_port

LONG_S = 30


def info(port, process, processes=2):
    return ProcessInfo("a test", f"PROCESS={process}", f"127.0.0.1:{port}", processes, process)


def met(port, process, processes=2, within_s=LONG_S):
    return spawn(lambda: meet(info(port, process, processes), time.monotonic() + within_s))


@pytest.fixture
def port():
    with socket.socket() as free:
        while True:
            port = random.randrange(61_000, 65_536)  # a socket that asks for any free port gets none of these
            with contextlib.suppress(OSError):
                free.bind(("127.0.0.1", port))
                return port


def test_processes_arrive_in_any_order_and_the_port_is_free_afterwards(port):
    others = [met(port, process, 4) for process in (3, 1)]
    first = met(port, 0, 4)
    last = met(port, 2, 4)
    for one in (first, last, *others):
        assert one.result(LONG_S) is None
    socket.create_server(("127.0.0.1", port)).close()


@contextlib.contextmanager
def dying(port, process, processes):
    """A process that has arrived, and ends when the block does."""
    with connected(port) as connection:
        connection.send(f"feedline: {processes} {process}".encode())
        yield


def connected(port):
    end = time.monotonic() + LONG_S
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def lines(monkeypatch):
    """The lines that process 0 has received."""
    found, read = queue.Queue(), rendezvous.process_in
    monkeypatch.setattr(rendezvous, "process_in", lambda line, info: (found.put(line), read(line, info))[1])
    return found


def test_missing_processes_are_named_in_every_process(port, monkeypatch, lines):
    """Process 1 never comes; process 3 comes, and then ends."""
    late_s, told = 0, queue.Queue()
    monkeypatch.setattr(rendezvous, "say", told.put)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + late_s))
    first = met(port, 0, 4, within_s=4 * LONG_S)
    with connected(port) as other:
        other.send(b"feedline: 4 2")
        with dying(port, 3, 4):
            assert {lines.get(timeout=LONG_S)[-1:] for _ in range(2)} == {b"2", b"3"}
        for late in (0, 1.5 * LONG_S):
            late_s = late  # by the second round, process 0 has noticed the end of process 3
            with connected(port) as scanner:
                scanner.send(b"GET")
                assert lines.get(timeout=LONG_S) == b"GET"
        late_s = 4 * LONG_S
        with socket.socket() as wakes:
            wakes.connect_ex(("127.0.0.1", port))
            error = first.exception(LONG_S)
        missing = "processes 1 and 3 did not arrive in time, or ended too early; read"
        assert f"feedline: {missing}" in other.recv(4096).decode()
    assert (type(error), error.process, missing in str(error)) == (ProcessError, None, True)
    assert re.fullmatch(
        r"process 0 waits for processes 1 and 3 to join, for at most \d\d s more", told.get_nowait()
    )
    assert told.empty()


def test_a_process_that_ended_may_come_again_and_nothing_else_holds_others_up(port, monkeypatch, lines):
    """Neither a port scanner nor a process that has not sent its line delays the others."""
    monkeypatch.setattr(rendezvous, "_LINE_S", 0.01)
    first = met(port, 0, 3)
    with connected(port) as late:
        with dying(port, 1, 3), connected(port) as other:  # `other` is a port scanner
            other.send(b"GET / HTTP/1.1\r\n\r\n")
            assert {lines.get(timeout=LONG_S)[:6] for _ in range(2)} == {b"feedli", b"GET / "}
        late.send(b"feedline: 3 2")
        assert (met(port, 1, 3).result(LONG_S), first.result(LONG_S)) == (None, None)
        assert late.recv(4096) == b"feedline: all joined"


def test_an_end_is_noticed_before_the_process_that_comes_again(port, monkeypatch):
    """A process ends and comes again while process 0 handles another line, and `select` reports the end last."""
    select, read, held, go = selectors.DefaultSelector.select, rendezvous.process_in, queue.Queue(), queue.Queue()

    def ends_last(self, timeout):
        return sorted(select(self, timeout), key=lambda each: each[0].data is not None)

    def process_in(line, info):
        held.put(line)
        go.get(timeout=LONG_S)
        return read(line, info)

    monkeypatch.setattr(selectors.DefaultSelector, "select", ends_last)
    monkeypatch.setattr(rendezvous, "process_in", process_in)
    first = met(port, 0, 3)
    with connected(port) as again, connected(port) as scanner:
        with dying(port, 1, 3):
            assert held.get(timeout=LONG_S).endswith(b"1")
            go.put(None)
            scanner.send(b"GET")
            assert held.get(timeout=LONG_S) == b"GET"
        again.send(b"feedline: 3 1")
        for _ in range(3):
            go.put(None)
        assert (met(port, 2, 3).result(LONG_S), first.result(LONG_S)) == (None, None)
        assert again.recv(4096) == b"feedline: all joined"


@contextlib.contextmanager
def other_program():
    """Yields a port where another program answers each connection, and closes it."""

    def answer():
        with contextlib.suppress(OSError):
            while True:
                with taken.accept()[0] as connection, contextlib.suppress(OSError):  # the client may be gone
                    connection.send(b"HTTP/1.1 400 Bad Request")

    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:  # as gRPC does
        threading.Thread(target=answer, daemon=True).start()
        yield taken.getsockname()[1]
        taken.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("process", [0, 1])
def test_another_program_on_the_port_is_an_error_at_once(process):
    restarted = ", or this process alone was restarted: .*" if process else ""
    told = rf"another program, perhaps .*has that port.*{restarted}; .* FEEDLINE_COORDINATOR=127.0.0.1:\d+, or JAX"
    with other_program() as port, pytest.raises(FeedError, match=told):
        met(port, process).result(LONG_S)


def test_the_port_that_the_launcher_reserved_can_be_used_by_its_run():
    with reserved_port() as port:
        both = [met(port, 0), met(port, 1)]
        assert [one.result(LONG_S) for one in both] == [None, None]
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("late", [False, True])
def test_a_lack_of_files_is_told_to_those_that_have_arrived(port, monkeypatch, lines, late):
    """The rejected process gets an error, even if process 0 ends before `create_connection` returns."""
    real, connect, accepted = socket.socket.accept, socket.create_connection, []

    def accept(listener):
        if accepted:
            raise OSError(errno.EMFILE, "Too many open files")
        accepted.append(real(listener))
        return accepted[0]

    monkeypatch.setattr(socket.socket, "accept", accept)
    waiting = [met(port, 0, 3), met(port, 1, 3)]
    assert lines.get(timeout=LONG_S) == b"feedline: 3 1"

    def connect_late(address, timeout):
        connection = connect(address, timeout)
        wait(waiting, LONG_S)
        return connection

    if late:
        monkeypatch.setattr(socket, "create_connection", connect_late)
    last = met(port, 2, 3)
    told = r"process 0 could not accept process 2 \(Too many open files\); .*\(ulimit -n\)"
    for one in waiting:
        with pytest.raises(ProcessError, match=told):
            one.result(LONG_S)
    with pytest.raises(ProcessError, match="process 0 ended before all had joined"):
        last.result(LONG_S)


def test_a_second_process_of_the_same_number_does_not_join(port):
    waiting = [met(port, 1, 3), met(port, 1, 3), met(port, 0, 3)]
    told = r"already has the number 1 \(this is process 1 of 3, found a test \(PROCESS=1\)\)"
    with pytest.raises(ProcessError, match=told):
        next(as_completed(waiting[:2], LONG_S)).result()
    met(port, 2, 3).result(LONG_S)
    waiting[2].result(LONG_S)


def test_a_missing_coordinator_is_an_error_at_the_deadline(port, monkeypatch):
    seconds, told = itertools.count(), []
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=str))
    monkeypatch.setattr(rendezvous, "say", told.append)
    with pytest.raises(FeedError, match=rf"127.0.0.1:{port}, but it was not reached in time .*process 1"):
        meet(info(port, process=1), deadline=100)
    assert told == [f"process 1 waits for process 0 to listen at 127.0.0.1:{port}, for at most 69 s more"]


def test_a_connection_of_a_port_with_itself_is_no_answer(monkeypatch, port):
    """TCP connects a port with itself if it happens to choose the same port for both ends."""
    real, probed, tries = socket.create_connection, socket.socket.connect_ex, 0

    def connect(address, timeout):
        nonlocal tries
        tries += 1
        return real(address, timeout, source_address=address if tries == 1 else None)

    monkeypatch.setattr(rendezvous, "_RETRY_S", 0.01)
    monkeypatch.setattr(socket, "create_connection", connect)
    other = met(port, 1)
    while tries < 2:  # until the first connection, to itself, was given up
        time.sleep(0.01)
    monkeypatch.setattr(socket.socket, "connect_ex", lambda probe, at: (probe.bind(at), probed(probe, at))[1])
    first = met(port, 0)
    assert [one.result(LONG_S) for one in (other, first)] == [None, None]


@pytest.mark.parametrize("times", [{"timeout_s": math.inf}, {"timeout_s": 0}, {"abort_after_s": -1}])
def test_a_time_that_is_none_is_refused(times):
    with pytest.raises(ValueError, match=f"{next(iter(times))} must be above 0 and at most 1e"):
        initialize(**times)


def test_a_host_name_that_does_not_resolve_yet_is_tried_again(monkeypatch, port):
    """In Kubernetes, the host name of a pod resolves only once the pod has started."""
    answers = iter([socket.gaierror("Name or service not known"), ConnectionRefusedError("refused")])
    real = socket.create_connection

    def connect(address, timeout):
        error = next(answers, None)
        if error is not None:
            raise error
        return real(address, timeout)

    monkeypatch.setattr(rendezvous, "_RETRY_S", 0.01)
    monkeypatch.setattr(socket, "create_connection", connect)
    both = [met(port, 1), met(port, 0)]
    assert [one.result(LONG_S) for one in both] == [None, None]
    assert next(answers, None) is None


@pytest.mark.slow
def test_a_single_process_prints_one_line_and_does_not_join():
    program = (
        "import feedline\n"
        "feedline.cluster.initialize()\n"
        "feedline.cluster.initialize(timeout_s=1)\n"
        "import jax\n"
        "print(jax.distributed.is_initialized(), jax.process_count())"
    )
    command = [sys.executable, "-c", program]
    done = programs.run(command, capture_output=True, text=True)
    assert done.stdout == "False 1\n"
    assert done.stderr == "feedline: process 0 of 1, because no launcher started other processes\n"
    with open("/dev/full", "wb") as full:  # that the line cannot be written is no failure
        assert programs.run(command, stdout=subprocess.PIPE, stderr=full).stdout == b"False 1\n"


RUN = (
    "import os, sys\n"
    "import feedline\n"
    "from feedline._src.errors import FeedError\n"
    "try:\n"
    "    feedline.cluster.initialize()\n"
    "except FeedError as error:\n"
    "    print(error); os._exit(3)\n"
    "print('joined', flush=True)\n"
    "sys.stdin.readline()\n"
    "print('ended well', flush=True)\n"
)


@pytest.mark.slow
def test_a_second_run_on_the_same_port_fails_and_the_first_goes_on(port, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("FEEDLINE_COORDINATOR", f"127.0.0.1:{port}")
    monkeypatch.setenv("FEEDLINE_PROCESSES", "2")

    def started(process):
        monkeypatch.setenv("FEEDLINE_PROCESS", str(process))
        pipe = subprocess.PIPE
        options = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
        return stack.enter_context(programs.started([sys.executable, "-c", RUN], **options))

    with contextlib.ExitStack() as stack:
        first = [started(process) for process in range(2)]
        assert [one.stdout.readline() for one in first] == ["joined\n"] * 2
        for process in (1, 0):
            second = started(process)
            out, _ = second.communicate()
            assert second.returncode == 3
            assert "perhaps another run" in out
        for one in first:
            one.stdin.write("\n")
            one.stdin.flush()
        assert [one.communicate()[0] for one in first] == ["ended well\n"] * 2
        assert [one.returncode for one in first] == [0, 0]
