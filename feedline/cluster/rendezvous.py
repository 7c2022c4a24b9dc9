"""The processes of a run meet at the coordinator's port before jax uses it: all come, or all are told who did not.

jax's coordination service takes whoever connects for a process of its run: a second run on the same port ends the
first, and a process that never comes ends process 0 by SIGABRT. So process 0 first listens there itself. Each of
the others says its number and waits; once all have come, process 0 says so and leaves the port to jax. A process
that finds something else on the port has found another run, or another program, and does not join it.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterator, Mapping

from feedline.agreement.differences import process_names
from feedline.cluster.found import Found
from feedline.errors import FeedError, ProcessError

_GREETING = b"feedline\n"
_COME = b"all have come\n"
_RETRY_S = 0.2
_ANSWER_S = 10.0
"""How long something on the port may take to greet; process 0 greets as soon as it accepts."""
_LONGEST = 1 << 12


def meet(found: Found, deadline: float) -> None:
    """Returns once all processes of the run have come, and the coordinator's port is free for jax.

    Args:
      deadline: of `time.monotonic`.

    Raises:
      ProcessError: a process did not come in time; names it.
      FeedError: process 0 cannot listen on the port, or the others do not find it there.
    """
    if found.process == 0:
        with _listening(found) as listener:
            _gather(found, listener, deadline)
    else:
        with _connected(found, deadline) as connection:
            _wait(found, connection, deadline)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1")


@contextlib.contextmanager
def _listening(found: Found) -> Iterator[socket.socket]:
    """A socket that listens on the port, and on no port that another program listens on.

    gRPC shares its port with whoever asks for that (SO_REUSEPORT), so we do not ask at first. `feedline launch`
    holds the port of its run bound, but does not listen: then we do.
    """
    try:
        listener = _listener(found, share=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _answers(found):
            raise _taken(found, error) from error
        try:
            listener = _listener(found, share=True)
        except OSError as again:
            raise _taken(found, again) from again
    with listener:
        yield listener


def _listener(found: Found, *, share: bool) -> socket.socket:
    """On the addresses on which jax listens: the loopback's alone, or all of the host."""
    loopback = is_loopback(found.host)
    both = not loopback and socket.has_dualstack_ipv6()
    return socket.create_server(
        (found.host if loopback else "", found.port),
        family=socket.AF_INET6 if both or ":" in found.host else socket.AF_INET,
        dualstack_ipv6=both,
        reuse_port=share,
        backlog=socket.SOMAXCONN,
    )


def _answers(found: Found) -> bool:
    """Whether somebody listens on the port of this host."""
    for host in {"127.0.0.1", found.host}:
        with contextlib.suppress(OSError):
            socket.create_connection((host, found.port), timeout=1).close()
            return True
    return False


def _taken(found: Found, error: OSError) -> FeedError:
    return FeedError(
        f"process 0 listens as the coordinator on port {found.port} of {found.host}, but another program, perhaps "
        f"another run, has that port ({error.strerror}); {_another_port(found)}",
        stage="launch",
        process=0,
    )


def _another_port(found: Found) -> str:
    return (
        "end that one, or give this run another port, in every process: "
        f"FEEDLINE_COORDINATOR={found.host}:{found.port - 1}, or JAX_COORDINATOR_PORT under Slurm and mpirun"
    )


def _gather(found: Found, listener: socket.socket, deadline: float) -> None:
    """Process 0: until all have come, then tell them. Who does not come in time is named to all."""
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while len(came) < found.processes - 1:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() >= deadline:
                break
            for key, _ in ready:
                if key.fileobj is listener:
                    connection = stack.enter_context(listener.accept()[0])
                    connection.setblocking(False)
                    with contextlib.suppress(OSError):
                        connection.send(_GREETING)
                        selector.register(connection, selectors.EVENT_READ)
                    continue
                process = _introduced(key.fileobj, found)  # type: ignore[arg-type]
                selector.unregister(key.fileobj)
                if process is not None and process not in came:
                    came[process] = key.fileobj  # type: ignore[assignment]
                else:
                    key.fileobj.close()  # type: ignore[union-attr]
        absent = [process for process in range(1, found.processes) if process not in came]
        _tell(came, _did_not_come(absent).encode() if absent else _COME)
    if absent:
        raise ProcessError(_did_not_come(absent), stage="launch", process=absent[0])


def _introduced(connection: socket.socket, found: Found) -> int | None:
    """The process that connected; None for what is none of this run, such as a port scanner."""
    try:
        count, _, process = connection.recv(_LONGEST).decode().partition(" ")
        if int(count) == found.processes and 0 < int(process) < found.processes:
            return int(process)
    except (OSError, ValueError):
        return None
    return None


def _tell(came: Mapping[int, socket.socket], told: bytes) -> None:
    """And wait until each has hung up: the side that does so first keeps the port for a while, as TIME_WAIT."""
    for connection in came.values():
        with contextlib.suppress(OSError):
            connection.setblocking(True)
            connection.settimeout(_ANSWER_S)
            connection.send(told)
    for connection in came.values():
        with contextlib.suppress(OSError):
            connection.recv(1)


def _did_not_come(absent: list[int]) -> str:
    return (
        f"all processes of a run join at its start, but {process_names(absent)} did not come in time; look "
        "what it wrote last and whether it was started, or raise initialize(timeout_s)"
    )


@contextlib.contextmanager
def _connected(found: Found, deadline: float) -> Iterator[socket.socket]:
    """A connection to process 0, which may not listen yet: tried again and again, for nothing here could wake us.

    A name that does not resolve yet is as good as nobody listening, since a pod gets its name only when it starts.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection((found.host, found.port), timeout=max(left, _RETRY_S))
        except OSError as error:
            if left < _RETRY_S:
                raise _unreached(found, error) from error
        else:
            break
        time.sleep(_RETRY_S)
    with connection:
        connection.settimeout(_ANSWER_S)
        try:
            greeting = connection.recv(len(_GREETING))
        except OSError:
            greeting = b""
        if greeting != _GREETING:
            raise FeedError(
                f"process 0 of this run listens at {found.coordinator}, but another program does, perhaps another "
                f"run, which this process does not join; {_another_port(found)}",
                stage="launch",
                process=found.process,
            )
        yield connection


def _unreached(found: Found, error: OSError) -> FeedError:
    return FeedError(
        f"process 0 listens as the coordinator at {found.coordinator}, but it was not reached in time "
        f"({error}); look whether process 0 runs, on that host, and whether a firewall closes the port; "
        "FEEDLINE_COORDINATOR names another, in every process",
        stage="launch",
        process=found.process,
    )


def _wait(found: Found, connection: socket.socket, deadline: float) -> None:
    """One of the others: until process 0 says that all have come."""
    try:
        connection.send(f"{found.processes} {found.process}".encode())
        connection.settimeout(max(0.0, deadline - time.monotonic()) + _ANSWER_S)
        told = connection.recv(_LONGEST)
    except OSError:
        told = b""
    if told == _COME:
        return
    raise ProcessError(
        told.decode()
        or f"all processes of a run join at its start, but process 0 ended before all had; look what it wrote "
        f"last (another process {found.process} of {found.processes} may have joined it in place of this one)",
        stage="launch",
        process=None if told else 0,
    )
