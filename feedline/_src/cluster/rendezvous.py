"""All processes meet at the coordinator's port before jax uses it, so that errors name what is missing.

jax's service takes every connection for a process of its own run: a second run on the port ends the first, and a
process that never comes ends process 0 by SIGABRT. So process 0 listens there first. The others connect, send
their number, and wait for its answer: that all have joined, or why not.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import time

from feedline._src.agreement.coordination import process_names
from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.errors import FeedError, ProcessError

_PREFIX = b"feedline: "  # of all that processes send here
_ALL_JOINED = _PREFIX + b"all joined"
_MAX_BYTES = 1 << 12
_RETRY_S = 0.2
_CONNECT_S = 10.0  # for an attempt to connect: a firewall may drop it
_NUMBER_S = 1.0  # for the number of a process, which it sends at once
_WARN_S = 30.0  # after that a line on stderr says who is missing


def meet(info: ProcessInfo, deadline: float) -> None:
    """Returns once all processes of the run have arrived and the coordinator's port is free for jax.

    A `ProcessError` names a process that did not arrive by the deadline (of `time.monotonic`). A `FeedError`
    says that process 0 cannot listen on the port, or that the others do not reach it there.
    """
    if info.process == 0:
        _gather(info, deadline)
        return
    with _connect(info, deadline) as connection:
        _send(connection, b"%s%d %d" % (_PREFIX, info.processes, info.process))
        connection.settimeout(max(0.0, deadline - time.monotonic()) + _CONNECT_S)
        answer = _receive(connection)
    if answer == _ALL_JOINED:
        return
    if answer and not answer.startswith(_PREFIX):
        raise _port_is_taken(info)
    found = answer.removeprefix(_PREFIX).decode() or (
        "all processes of a run join at its start, but process 0 closed the connection before all had: it ended, "
        "or belongs to another run; look what it wrote last"
    )
    own = f"this is process {info.process} of {info.processes}, by {info.launcher}: {info.evidence}"
    raise ProcessError(f"{found} ({own})", stage="launch", process=None if answer else 0)


def _gather(info: ProcessInfo, deadline: float) -> None:
    """In process 0: wait for the others, and answer. One that ends meanwhile is missing, and may come again."""
    arrived: dict[int, socket.socket] = {}
    warn_at = time.monotonic() + _WARN_S
    with _listen(info) as listener, contextlib.ExitStack() as connections:
        while missing := [process for process in range(1, info.processes) if process not in arrived]:
            if (now := time.monotonic()) >= deadline:
                break
            if now >= warn_at:
                warn_at = math.inf
                _print_wait(info, f"{process_names(missing)} to join", deadline)
            listener.settimeout(max(0.001, min(deadline, warn_at) - now))
            with contextlib.suppress(TimeoutError):
                connection = connections.enter_context(listener.accept()[0])
                connection.settimeout(_NUMBER_S)
                process = _index_of(_receive(connection), info)
                connection.setblocking(False)
                if process is None:
                    connection.close()
                elif process in arrived and not _has_ended(arrived[process]):
                    text = b"each process of a run has a number of its own, but %d is taken"
                    _send(connection, _PREFIX + text % process)
                else:
                    arrived[process] = connection
                if len(arrived) < info.processes - 1:
                    continue
            # all have arrived, or the wait is over: those that have ended since they came are missing, too
            arrived = {process: each for process, each in arrived.items() if not _has_ended(each)}
        message = (
            f"all processes of a run join at its start, but {process_names(missing)} did not come in time, or "
            "ended meanwhile; look what it wrote last and whether it was started, or raise initialize(timeout_s)"
        )
        for connection in arrived.values():
            _send(connection, _PREFIX + message.encode() if missing else _ALL_JOINED)
    if missing:
        raise ProcessError(message, stage="launch", process=missing[0])


def _listen(info: ProcessInfo) -> socket.socket:
    """Listens as jax will: on the loopback address, or on all addresses of the host.

    With SO_REUSEPORT it would share the port with the gRPC server of another run, so that comes second: `feedline
    launch` holds the port of its run with that option, and does not listen.
    """
    host = info.host if is_loopback(info.host) else ""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    for share in (False, True):
        with contextlib.suppress(OSError):
            return socket.create_server(
                (host, info.port), family=family, dualstack_ipv6=both, reuse_port=share, backlog=socket.SOMAXCONN
            )
        with contextlib.suppress(OSError):
            socket.create_connection((host or "localhost", info.port), timeout=1).close()
            break
    raise _port_is_taken(info)


def _connect(info: ProcessInfo, deadline: float) -> socket.socket:
    """A connection to process 0. Tried until it listens, and until its name resolves."""
    warn_at = time.monotonic() + _WARN_S
    while True:
        left_s = deadline - time.monotonic()
        try:
            return socket.create_connection((info.host, info.port), timeout=min(max(left_s, _RETRY_S), _CONNECT_S))
        except OSError as error:
            if left_s < _RETRY_S:
                raise FeedError(
                    f"process 0 listens as the coordinator at {info.coordinator}, but it was not reached in time "
                    f"({error}); look whether process 0 runs, on that host, and whether a firewall closes the "
                    "port; FEEDLINE_COORDINATOR names another, in every process",
                    stage="launch",
                    process=info.process,
                ) from error
        if time.monotonic() >= warn_at:
            warn_at = math.inf
            _print_wait(info, f"process 0 to listen at {info.coordinator}", deadline)
        time.sleep(_RETRY_S)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1")


def _port_is_taken(info: ProcessInfo) -> FeedError:
    return FeedError(
        f"process 0 of this run listens as the coordinator at {info.coordinator}, but another program, perhaps "
        "another run, has that port, or it may not be used; end that one, or give this run another port, in every "
        f"process: FEEDLINE_COORDINATOR={info.host}:{info.port - 1}, or JAX_COORDINATOR_PORT under Slurm, mpirun",
        stage="launch",
        process=info.process,
    )


def _print_wait(info: ProcessInfo, missing: str, deadline: float) -> None:
    """A single write to stderr: several processes share the terminal."""
    left_s = max(0.0, deadline - time.monotonic())
    sys.stderr.write(f"feedline: process {info.process} waits for {missing}, for at most {left_s:.0f} s more\n")
    sys.stderr.flush()


def _send(connection: socket.socket, text: bytes) -> None:
    with contextlib.suppress(OSError):  # it has ended
        connection.send(text)


def _receive(connection: socket.socket) -> bytes:
    """What was sent; empty if the other side has ended, or does not send in time."""
    with contextlib.suppress(OSError):
        return connection.recv(_MAX_BYTES)
    return b""


def _has_ended(connection: socket.socket) -> bool:
    """Whether the process at the other side, which sends nothing more, has ended."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _index_of(sent: bytes, info: ProcessInfo) -> int | None:
    """The number that a process sent; None if it is none of this run, such as a port scanner."""
    with contextlib.suppress(ValueError):
        count, process = map(int, sent.removeprefix(_PREFIX).decode().split())
        if count == info.processes and 0 < process < count:
            return process
    return None
