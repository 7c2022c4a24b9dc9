"""Two hosts on this machine, connected by a link that can be cut, slowed and made to lose packets.

Each host is a network namespace with one TUN device, an address, and its own /etc/hosts. A thread of the test
carries the packets from one device to the other. (`tc netem` would do that too, but not every kernel has it.)
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import socket
import struct
import threading
import time
from pathlib import Path

import programs
import pytest

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_PACKET_BYTES = 1 << 16
_QUEUE_S = 0.5
"""A packet that would wait longer in a slow link is lost, as in the buffer of a switch."""


class Link:
    """The link between two hosts. Its attributes may be set at any time.

    Attributes:
      hosts: for each host (its address, the words that go before a command to run it there).
      cut: whether all packets are lost.
      loss: the share of packets that are lost.
      delay_s: of each packet, in each direction.
      bytes_per_s: in each direction; None: no limit.
      carried: number of packets that arrived so far.
    """

    def __init__(self, stack):
        self.cut, self.loss, self.delay_s, self.bytes_per_s, self.carried = False, 0.0, 0.0, None, 0
        self.hosts = []
        self._devices = [stack.enter_context(contextlib.closing(self._host(stack, end))) for end in (1, 2)]
        self._ends, stop = os.pipe()
        thread = threading.Thread(target=self._carry, name="link", daemon=True)
        thread.start()
        stack.callback(os.close, self._ends)
        stack.callback(thread.join)
        stack.callback(os.close, stop)  # this wakes the thread

    def _host(self, stack, end):
        name, address = f"feedline-{os.getpid()}-{end}", f"10.77.0.{end}"
        device = _Device(f"fl{os.getpid()}-{end}")
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "del", name)
        # `ip netns exec` mounts these files over those in /etc. Gloo listens at the address of the host's name.
        files = Path("/etc/netns", name)
        files.mkdir(parents=True)
        stack.callback(shutil.rmtree, files)
        (files / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        _ip("link", "set", device.name, "netns", name)
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", device.name)
        _ip("-n", name, "link", "set", device.name, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        self.hosts.append((address, ["ip", "netns", "exec", name]))
        return device

    def _carry(self):
        numbers, waiting, free_at = itertools.count(), [], [0.0, 0.0]
        dice = random.Random(0)
        while True:
            timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            ready, _, _ = select.select([self._ends, *self._devices], [], [], timeout_s)
            if self._ends in ready:
                return
            now = time.monotonic()
            for end, device in enumerate(self._devices):
                if device not in ready:
                    continue
                packet = os.read(device.fileno(), _PACKET_BYTES)
                sent_at = max(now, free_at[end])
                if self.cut or dice.random() < self.loss or sent_at > now + _QUEUE_S:
                    continue
                free_at[end] = sent_at + (len(packet) / self.bytes_per_s if self.bytes_per_s else 0)
                heapq.heappush(waiting, (free_at[end] + self.delay_s, next(numbers), 1 - end, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(waiting)
                self.carried += 1
                with contextlib.suppress(OSError):
                    os.write(self._devices[end].fileno(), packet)


class _Device:
    """A TUN device: `os.read` gets packets that the kernel sends, and `os.write` gives packets to the kernel."""

    def __init__(self, name):
        self.name = name
        self._file = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(self._file, _TUNSETIFF, struct.pack("16sH", name.encode(), _TUN_WITHOUT_HEADER))

    def fileno(self):
        return self._file

    def close(self):
        os.close(self._file)


def _ip(*words):
    programs.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def link():
    """A `Link`; skips the test where there cannot be one."""
    if reason := _impossible():
        pytest.skip(f"two hosts with a link between them need {reason}")
    with contextlib.ExitStack() as stack:
        yield Link(stack)


def _impossible():
    if os.geteuid() != 0:
        return "root"
    if shutil.which("ip") is None:
        return "`ip` (Debian: iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun"
    probe = f"feedline-{os.getpid()}-0"
    if programs.run(["ip", "netns", "add", probe], capture_output=True, check=False).returncode:
        return "network namespaces (`ip netns add` failed)"
    _ip("netns", "del", probe)
    return None
