"""jax's real coordination service, with several clients in this process that stand for processes."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

from jax._src.lib import _jax

from feedline._src.agreement.coordination import Coordination
from feedline._src.tools.launch import reserved_port


@contextlib.contextmanager
def joined(processes):
    """Yields one `Coordination` for each of `processes` simulated processes."""
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        service = _jax.get_distributed_runtime_service(address, processes)
        clients = [
            _jax.get_distributed_runtime_client(address, number, init_timeout=30, use_compression=True)
            for number in range(processes)
        ]
        with ThreadPoolExecutor(processes) as pool:
            list(pool.map(lambda client: client.connect(), clients))
            try:
                yield [Coordination(number, processes, client) for number, client in enumerate(clients)]
            finally:
                list(pool.map(lambda client: client.shutdown(), clients))
                service.shutdown()
