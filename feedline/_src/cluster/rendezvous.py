"""All processes meet at the coordinator's port before jax uses it, so that errors name what is missing.

jax's service treats every connection as a process of its own run, so a second run on the port ends the first. And
a process that never arrives ends process 0 by SIGABRT. So process 0 first listens on the port itself. Every other
process connects, sends one line, and waits for an answer: all have joined, or the reason why not.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from typing import cast

from feedline._src.agreement.coordination import process_names
from feedline._src.agreement.monitor import say
from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.errors import FeedError, ProcessError

LOOPBACK = ("localhost", "127.0.0.1")
_PREFIX = b"feedline: "  # of every line
_ALL_JOINED = "all joined"
_MISSING = "did not arrive in time, or ended too early; read their logs, or increase initialize(timeout_s)"
_ENDED = "process 0 ended before all had joined, or belongs to another run; read the end of its log"
_FILES = "it opens one file for each process: raise the limit there (ulimit -n)"
_LOOK = "check that process 0 runs on that host, and that no firewall blocks the port"
_TAKEN = "another program, perhaps another run, has that port, or this process is not allowed to use it"
_RESTARTED = "this process alone was restarted: a process cannot join its run again, so restart all processes"
_RETRY_S = 0.2
_LINE_S = 1.0  # for a line that has begun to arrive
_CONNECT_S = 10.0  # for an attempt to connect, which a firewall may drop
_WARN_S = 30.0  # until a line on stderr names who is missing
_AT_ONCE = struct.pack("ii", 1, 0)  # closes a connection without TIME_WAIT, in which it would occupy the port


def meet(info: ProcessInfo, deadline: float) -> None:
    """Wait until all processes of the run have arrived, then leave the coordinator's port to jax.

    Raises a `ProcessError` that names the processes missing at `deadline` (by `time.monotonic`), or a `FeedError`
    if the port is unusable.
    """
    answer = _announce(info, deadline) if info.process else _gather(info, deadline)
    if answer != _ALL_JOINED:
        own = f"this is process {info.process} of {info.processes}, found {info.launcher} ({info.evidence})"
        raise ProcessError(f"all processes of a run join at its start, but {answer} ({own})", stage="launch")


def _gather(info: ProcessInfo, deadline: float) -> str:
    """In process 0: waits for the others, sends all of them the answer, and returns it."""
    missing, warn_at = set(range(1, info.processes)), time.monotonic() + _WARN_S
    with _listen(info) as listener, selectors.DefaultSelector() as ready, contextlib.ExitStack() as connections:
        ready.register(listener, selectors.EVENT_READ)
        while missing and (now := time.monotonic()) < deadline:
            if now >= warn_at:
                _print_wait(info, f"{process_names(sorted(missing))} to join", deadline)
                warn_at = deadline
            events = ready.select(min(warn_at, deadline) - now)
            for key, _ in sorted(events, key=lambda each: each[0].data is None):  # with data: an ended process
                if key.fileobj is listener:
                    try:
                        connection = connections.enter_context(listener.accept()[0])
                    except OSError as error:
                        found = f"process 0 could not accept {process_names(sorted(missing))} ({error.strerror})"
                        return _tell(ready, f"{found}; {_FILES}")
                    ready.register(connection, selectors.EVENT_READ)  # its line may come late
                    continue
                connection = cast(socket.socket, key.fileobj)
                if key.data is not None:  # readable after its line: the process has ended, and may connect again
                    ready.unregister(connection)
                    missing.add(key.data)
                    continue
                process = process_in(_receive(connection, _LINE_S), info)
                if process in missing:
                    ready.modify(connection, selectors.EVENT_READ, process)
                    missing.remove(process)
                    continue
                if process is not None:  # None: a port scanner, or a process of another run
                    _send(connection, f"another process already has the number {process}")
                ready.unregister(connection)
                connection.close()
        return _tell(ready, f"{process_names(sorted(missing))} {_MISSING}" if missing else _ALL_JOINED)


def _tell(ready: selectors.BaseSelector, answer: str) -> str:
    """Send all processes the answer; if it is an error, also to connections whose line has not arrived."""
    for key in ready.get_map().values():  # also the listener: sending to it fails, which is ignored
        if key.data is not None or answer != _ALL_JOINED:
            _send(cast(socket.socket, key.fileobj), answer)
    return answer


def _listen(info: ProcessInfo) -> socket.socket:
    """Listens where jax will: on the loopback address, or on all addresses of the host.

    It sets SO_REUSEPORT, because `feedline launch` holds the port of its run. But the gRPC server of another run
    sets this option, too, so both could listen. Therefore a port that accepts a connection is treated as taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        found = probe.connect_ex(("127.0.0.1", info.port)) == 0
        if found and probe.getsockname()[1] != info.port:  # TCP may connect a free port with itself
            raise _unusable(info, _TAKEN)
    host = info.host if info.host in LOOPBACK else ""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            (host, info.port), family=family, dualstack_ipv6=both, reuse_port=True, backlog=socket.SOMAXCONN
        )
    except OSError as error:
        raise _unusable(info, _TAKEN) from error


def _announce(info: ProcessInfo, deadline: float) -> str:
    """In each other process: sends its number to process 0 once process 0 listens, and returns the answer."""
    warn_at = time.monotonic() + _WARN_S
    while True:
        try:
            connection = socket.create_connection((info.host, info.port), timeout=_CONNECT_S)
            if connection.getsockname()[1] == info.port:  # TCP has connected a free port with itself
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                connection.close()
                raise ConnectionRefusedError("nothing listens there")
            break
        except (ConnectionResetError, ConnectionAbortedError):  # process 0 ended during `create_connection`
            return _ENDED
        except OSError as error:  # process 0 does not listen yet, or its host name does not resolve yet
            if (now := time.monotonic()) >= deadline:
                raise _unusable(info, f"it was not reached in time ({error}); {_LOOK}") from error
        if now >= warn_at:
            _print_wait(info, f"process 0 to listen at {info.coordinator}", deadline)
            warn_at = deadline
        time.sleep(_RETRY_S)
    with connection:
        _send(connection, f"{info.processes} {info.process}")
        answer = _receive(connection, max(0.0, deadline - time.monotonic()) + _CONNECT_S)
    if answer and not answer.startswith(_PREFIX):
        raise _unusable(info, f"{_TAKEN}, or {_RESTARTED}")
    return answer.removeprefix(_PREFIX).decode() or _ENDED


def process_in(line: bytes, info: ProcessInfo) -> int | None:
    """The number of the process that sent a line; None: the sender is of another run, or a port scanner."""
    with contextlib.suppress(ValueError):
        count, process = map(int, line.removeprefix(_PREFIX).decode().split())
        if count == info.processes and 0 < process < count:
            return process
    return None


def _send(connection: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # the other process has ended
        connection.sendall(_PREFIX + text.encode())


def _receive(connection: socket.socket, timeout_s: float) -> bytes:
    """A line; empty if the other process has ended, or does not send in time."""
    connection.settimeout(timeout_s)
    with contextlib.suppress(OSError):
        return connection.recv(4096)
    return b""


def _unusable(info: ProcessInfo, found: str) -> FeedError:
    text = f"process 0 of this run must listen as the coordinator at {info.coordinator}, but {found}"
    other = f"FEEDLINE_COORDINATOR={info.host}:{info.port - 1}, or JAX_COORDINATOR_PORT under Slurm or mpirun"
    fix = f"give the run another port, in every process: {other}"
    return FeedError(f"{text}; {fix}", stage="launch", process=info.process)


def _print_wait(info: ProcessInfo, missing: str, deadline: float) -> None:
    left_s = max(0.0, deadline - time.monotonic())
    say(f"process {info.process} waits for {missing}, for at most {left_s:.0f} s more")
