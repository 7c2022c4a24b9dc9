"""A rendezvous of all processes at the coordinator's port before jax uses it, so that errors name what is missing.

jax's coordination service takes every connection for a process of its own run: a second run on the same port ends
the first, and a process that never connects ends process 0 by SIGABRT. So feedline first listens on the port in
process 0. Each other process connects, sends its index and waits. Once all have arrived, process 0 answers them
and frees the port for jax. A process that finds another program, or another run, on the port raises an error.
"""

from __future__ import annotations

import contextlib
import errno
import math
import selectors
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from feedline._src.agreement.differences import process_names
from feedline._src.cluster.launchers.launcher import ProcessInfo
from feedline._src.errors import FeedError, ProcessError

_GREETING = b"feedline\n"
_COME = b"all have come\n"
_HERE_ALREADY = b"one with this number is here already\n"
_RETRY_S = 0.2
_ANSWER_S = 10.0
"""How long a program on the port may take to send the greeting, which process 0 sends as soon as it accepts.

Process 0 may take as long to answer all; it accepts none then, and closes the connections of those that come.
"""
_MAX_BYTES = 1 << 12
_TELL_S = 30.0
"""How long the others may take to come before a line on stderr says who is missing."""
_ATTEMPT_S = 10.0
"""How long one attempt to connect may take: a firewall may drop it without an answer."""


def meet(info: ProcessInfo, deadline: float) -> None:
    """Returns once all processes of the run have arrived and the coordinator's port is free for jax.

    Args:
      deadline: of `time.monotonic`.

    Raises:
      ProcessError: a process did not arrive in time; names it.
      FeedError: process 0 cannot listen on the port, or the others do not reach it there.
    """
    if info.process == 0:
        with _listening(info) as listener:
            _wait_for_all(info, listener, deadline)
    else:
        with _connected(info, deadline) as connection:
            _wait(info, connection, deadline)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1")


@contextlib.contextmanager
def _listening(info: ProcessInfo) -> Iterator[socket.socket]:
    """A socket that listens on the port, if no other program does.

    With SO_REUSEPORT the socket would share the port with another run's gRPC server, so it is first tried without.
    `feedline launch` binds the port of its run with that option but does not listen; then the option is needed.
    """
    try:
        listener = _listener(info, share=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _answers(info):
            raise _taken(info, error) from error
        try:
            listener = _listener(info, share=True)
        except OSError as again:
            raise _taken(info, again) from again
    with listener:
        yield listener


def _listener(info: ProcessInfo, *, share: bool) -> socket.socket:
    """Listens on the addresses on which jax listens: the loopback address, or all addresses of the host."""
    loopback = is_loopback(info.host)
    both = not loopback and socket.has_dualstack_ipv6()
    return socket.create_server(
        (info.host if loopback else "", info.port),
        family=socket.AF_INET6 if both or ":" in info.host else socket.AF_INET,
        dualstack_ipv6=both,
        reuse_port=share,
        backlog=socket.SOMAXCONN,
    )


def _answers(info: ProcessInfo) -> bool:
    """Whether a program listens on the port of this host."""
    for host in {"127.0.0.1", info.host}:
        with contextlib.suppress(OSError):
            socket.create_connection((host, info.port), timeout=1).close()
            return True
    return False


def _taken(info: ProcessInfo, error: OSError) -> FeedError:
    return FeedError(
        f"process 0 listens as the coordinator on port {info.port} of {info.host}, but another program, perhaps "
        f"another run, has that port ({error.strerror}); {_another_port(info)}",
        stage="launch",
        process=0,
    )


def _another_port(info: ProcessInfo) -> str:
    return (
        "end that one, or give this run another port, in every process: "
        f"FEEDLINE_COORDINATOR={info.host}:{info.port - 1}, or JAX_COORDINATOR_PORT under Slurm and mpirun"
    )


def _wait_for_all(info: ProcessInfo, listener: socket.socket, deadline: float) -> None:
    """In process 0: wait until all have arrived, then answer them; the answer names processes that are missing.

    A process that ends while it waits closes its connection. It then counts as missing, and may arrive again.
    """
    arrived: dict[int, socket.socket] = {}
    left: set[int] = set()
    tell_at = time.monotonic() + _TELL_S
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            complete = len(arrived) == info.processes - 1
            ready = selector.select(0 if complete else max(0.0, min(deadline, tell_at) - time.monotonic()))
            if not ready and (complete or time.monotonic() >= deadline):
                break
            if not complete and time.monotonic() >= tell_at:
                tell_at = math.inf
                _tell(info, f"{process_names(_missing(info, arrived))} to join", deadline)
            # first the ends of processes that had arrived: one that arrives now may take the place of such a one
            for key, _ in sorted(ready, key=lambda event: event[0].data is None):
                if key.fileobj is listener:
                    connection = stack.enter_context(listener.accept()[0])
                    connection.setblocking(False)
                    with contextlib.suppress(OSError):
                        connection.send(_GREETING)
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                connection = cast(socket.socket, key.fileobj)
                process = _index_of(connection, info)
                if process is not None and process not in arrived:
                    arrived[process] = connection
                    left.discard(process)
                    selector.modify(connection, selectors.EVENT_READ, data=process)
                    continue
                if process is not None and key.data is None:
                    with contextlib.suppress(OSError):
                        connection.send(_HERE_ALREADY)
                selector.unregister(connection)
                connection.close()
                if key.data is not None:
                    del arrived[key.data]
                    left.add(key.data)
                    _tell(info, f"process {key.data}, which came and then ended, to come again", deadline)
        missing = _missing(info, arrived)
        message = _missing_message(missing, left)
        _answer(arrived, message.encode() if missing else _COME)
    if missing:
        raise ProcessError(message, stage="launch", process=missing[0])


def _missing(info: ProcessInfo, arrived: Collection[int]) -> list[int]:
    return [process for process in range(1, info.processes) if process not in arrived]


def _tell(info: ProcessInfo, missing: str, deadline: float) -> None:
    """Say on stderr for what this process waits. A single write: several processes share the terminal."""
    left_s = max(0.0, deadline - time.monotonic())
    sys.stderr.write(f"feedline: process {info.process} waits for {missing}, for at most {left_s:.0f} s more\n")
    sys.stderr.flush()


def _index_of(connection: socket.socket, info: ProcessInfo) -> int | None:
    """The index of the process that connected; None if it does not belong to this run, as a port scanner."""
    try:
        count, _, process = connection.recv(_MAX_BYTES).decode().partition(" ")
        if int(count) == info.processes and 0 < int(process) < info.processes:
            return int(process)
    except (OSError, ValueError):
        return None
    return None


def _answer(arrived: Mapping[int, socket.socket], answer: bytes) -> None:
    """Send the answer, and wait until all processes have closed their connections, but not for stopped ones.

    The side that closes first keeps the port in TIME_WAIT for a while, and process 0 needs the port.
    """
    deadline = time.monotonic() + _ANSWER_S
    for connection in arrived.values():
        with contextlib.suppress(OSError):
            connection.send(answer)
    for connection in arrived.values():
        with contextlib.suppress(OSError):
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            connection.recv(1)


def _missing_message(missing: list[int], left: Collection[int]) -> str:
    never = [process for process in missing if process not in left]
    found = [f"{process_names(never)} did not come in time"] if never else []
    found += [f"{process_names(sorted(left))} came and then ended"] if left else []
    return (
        f"all processes of a run join at its start, but {', and '.join(found)}; look what it wrote "
        "last and whether it was started, or raise initialize(timeout_s)"
    )


@contextlib.contextmanager
def _connected(info: ProcessInfo, deadline: float) -> Iterator[socket.socket]:
    """A connection to process 0. It may not listen yet, and no event tells when it does, so this tries repeatedly.

    A name that does not resolve yet is also tried again, because a pod gets its name only when it starts. So is a
    connection that is closed without a word: process 0 may have stopped listening at this moment.
    """
    tell_at = time.monotonic() + _TELL_S
    while True:
        remaining_s = deadline - time.monotonic()
        try:
            connection = _greeted(info, min(max(remaining_s, _RETRY_S), _ATTEMPT_S))
        except OSError as error:
            if remaining_s < _RETRY_S:
                raise _unreached(info, error) from error
        else:
            break
        if time.monotonic() >= tell_at:
            tell_at = math.inf
            _tell(info, f"process 0 to listen at {info.coordinator}", deadline)
        time.sleep(_RETRY_S)
    with connection:
        yield connection


def _greeted(info: ProcessInfo, timeout_s: float) -> socket.socket:
    """A connection on which the greeting has come.

    Raises:
      OSError: no program was reached, or it closed the connection without a word.
      FeedError: another program listens there.
    """
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection((info.host, info.port), timeout=timeout_s))
        connection.settimeout(_ANSWER_S)
        try:
            greeting = connection.recv(len(_GREETING))
        except TimeoutError:
            greeting = None
        if greeting == b"":
            raise ConnectionResetError(errno.ECONNRESET, "the connection was closed without a word")
        if greeting != _GREETING:
            raise FeedError(
                f"process 0 of this run listens at {info.coordinator}, but another program does, perhaps another "
                f"run, which this process does not join; {_another_port(info)}",
                stage="launch",
                process=info.process,
            )
        stack.pop_all()
        return connection


def _unreached(info: ProcessInfo, error: OSError) -> FeedError:
    return FeedError(
        f"process 0 listens as the coordinator at {info.coordinator}, but it was not reached in time "
        f"({error}); look whether process 0 runs, on that host, and whether a firewall closes the port; "
        "FEEDLINE_COORDINATOR names another, in every process",
        stage="launch",
        process=info.process,
    )


def _wait(info: ProcessInfo, connection: socket.socket, deadline: float) -> None:
    """In the other processes: wait until process 0 answers that all have arrived."""
    try:
        connection.send(f"{info.processes} {info.process}".encode())
        connection.settimeout(max(0.0, deadline - time.monotonic()) + _ANSWER_S)
        answer = connection.recv(_MAX_BYTES)
    except TimeoutError as error:
        raise ProcessError(
            "all processes of a run join at its start, but not all came in time; process 0 names those that did "
            "not come, at its own deadline; look what they wrote last, or raise initialize(timeout_s)",
            stage="launch",
        ) from error
    except OSError:
        answer = b""
    if answer == _COME:
        return
    if answer == _HERE_ALREADY:
        raise ProcessError(
            f"each process of a run has a number of its own, but another process {info.process} of "
            f"{info.processes} is here already: two have this number, or an earlier one was cut off; look at what "
            f"sets it, {info.launcher} ({info.evidence}), and start the run again",
            stage="launch",
            process=info.process,
        )
    raise ProcessError(
        answer.decode()
        or f"all processes of a run join at its start, but process 0 ended before all had; look what it wrote "
        f"last (another process {info.process} of {info.processes} may have joined it in place of this one)",
        stage="launch",
        process=None if answer else 0,
    )
