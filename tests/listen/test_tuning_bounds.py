"""The limits of settings that are "auto": the user's, or shares of what the machine has."""

import dataclasses

import pytest

from feedline._src import bounds as module
from feedline._src.bounds import Bounds, bounds_of
from feedline._src.options import Limits, Settings

START, ALL = Settings(8, 0, 2, 2), frozenset(Settings._fields)
GIB = 1 << 30


@dataclasses.dataclass
class Device:
    platform: str = "gpu"
    bytes_limit: int | None = 80 * GIB

    def memory_stats(self):
        return None if self.bytes_limit is None else {"bytes_limit": self.bytes_limit}


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(module, "memory", lambda: (64 * GIB, GIB))
    monkeypatch.setattr(module, "own_processes", lambda: 4)
    monkeypatch.setattr(module, "own_cores", lambda: 6)


def made(limits=Limits(), tunable=ALL, start=START, local=GIB // 4, shard=GIB // 8, devices=(Device(),)):  # noqa: B008
    return bounds_of(limits, tunable, start, local_bytes=local, shard_bytes=shard, devices=devices)


@pytest.mark.parametrize(
    ("devices", "device_batches"),
    [
        ((Device(),), 64),  # a tenth of its memory
        ((Device(), Device(bytes_limit=8 * GIB)), 6),
        ((Device(bytes_limit=None),), None),  # it does not tell its memory
        ((Device("cpu", None),), None),  # its arrays count as host memory
    ],
)
def test_defaults_are_shares_of_the_machine(devices, device_batches):
    bounds, start = made(devices=devices)
    assert (bounds.host_batches, bounds.device_batches, bounds.cores) == (16, device_batches, 6)  # host: 1/4 ÷ 4
    assert start == START
    assert bounds.host_use(START) == 2 * 3 + (4 if devices[0].platform == "cpu" else 0)


def test_a_limit_makes_the_start_smaller_and_is_never_exceeded():
    bounds, start = made(Limits(host_bytes=GIB, device_bytes=GIB // 2, cores=3))
    assert start == Settings(3, 0, 1, 1)
    assert bounds.allow(start)
    for more in (start._replace(prefetch=2), start._replace(buffer=2), Settings(0, 4, 1, 1)):
        assert not bounds.allow(more)
    assert made(Limits(cores=1), tunable=frozenset({"buffer"}))[1] == START  # what the user gave stays
    assert made(local=100 * GIB, shard=100 * GIB)[1] == Settings(8, 0, 1, 1)  # batches of any size are allowed


@pytest.mark.parametrize("limits", [Limits(host_bytes=GIB - 1), Limits(device_bytes=GIB // 2 - 1)])
def test_a_limit_below_the_smallest_settings_is_refused(limits):
    match = r"^Limits\..*_bytes must hold 4 batches of .* for buffer 1 .*; raise it, or use a smaller batch_size$"
    with pytest.raises(ValueError, match=match):
        made(limits)


def test_workers_are_at_most_as_many_as_the_cores_unless_the_user_chose_them():
    limits = Bounds(ALL, host_batches=1000, device_batches=1000, cores=4)
    assert limits.allow(Settings(0, 4, 2, 2))
    assert not limits.allow(Settings(0, 5, 2, 2))
    assert dataclasses.replace(limits, tunable=ALL - {"workers"}).allow(Settings(0, 5, 1, 2))
