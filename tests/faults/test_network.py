"""A slow, lossy or cut link between two hosts: training goes on, or ends and names the process that is silent."""

import re
import signal
import time

import pytest
from link import link  # noqa: F401  a fixture
from runs import Member, await_, begun, ended

pytestmark = pytest.mark.nightly

ABORT_AFTER_S = 10
HEARTBEATS_S = 15  # after so long without heartbeats of one process, jax ends the others
SLACK_S = 15
PORT = 61999


def test_training_survives_a_bad_link_and_ends_when_it_is_cut_for_long(link, tmp_path, measured):  # noqa: F811
    address, _ = link.hosts[0]
    members = [
        Member(
            tmp_path, i, 2, f"{address}:{PORT}", "train", prefix=prefix,
            ABORT_AFTER_S=str(ABORT_AFTER_S),
        )
        for i, (_, prefix) in enumerate(link.hosts)
    ]  # fmt: skip
    try:
        begun(members)

        def goes_on(steps):
            before = [member.step for member in members]
            await_(lambda: all(m.step >= b + steps for m, b in zip(members, before, strict=True)), members)

        goes_on(5)
        link.delay_s, link.bytes_per_s = 0.05, 20_000
        goes_on(5)
        link.delay_s, link.bytes_per_s, link.loss = 0.0, None, 0.1
        goes_on(20)
        link.loss = 0.0
        for cut_s in (1, 2):
            link.cut = True
            time.sleep(cut_s)
            link.cut = False
            began = time.monotonic()
            goes_on(5)
            measured("cut for 1 s, 2 s", time.monotonic() - began)
        link.cut = True
        began = time.monotonic()
        ended(members, began)
        for process, member in enumerate(members):
            silent = f"feedline: no answer from process {1 - process} for 4 s: .* or cut off from process "
            assert re.search(silent, member.err)
            assert member.code in (-signal.SIGABRT, 1)
            assert member.ended_s < HEARTBEATS_S + SLACK_S
            measured("cut for ever", member.ended_s)
        first, second = ([line for line in m.out.splitlines() if line.startswith("step")] for m in members)
        common = min(len(first), len(second))
        assert common > 40
        assert first[:common] == second[:common]  # nothing was lost or taken twice
    finally:
        for member in members:
            member.kill()
