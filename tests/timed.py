"""`timed`: marks a test that judges by times."""

import functools
import os
import time
from pathlib import Path

import pytest

TRIES = 4
QUIET = 0.1
"""The share of one processor that other programs may take in a test of times."""


def timed(test):
    """Mark a test as timed, and try it again. If all tries fail, so does it, but if other programs ran in each of
    them, it is skipped.
    """

    @functools.wraps(test)
    def tried(**arguments):
        busy = []
        for _ in range(TRIES):
            began, before = time.monotonic(), processor_time_of_others()
            try:
                return test(**arguments)
            except Exception:
                busy.append((processor_time_of_others() - before) / (time.monotonic() - began))
                if len(busy) == TRIES and min(busy) < QUIET:
                    raise
        return pytest.skip(f"times cannot be judged: other programs took {min(busy):.2f} of a processor or more")

    return pytest.mark.timed(tried)


def processor_time_of_others():
    """Seconds for which the processors of this machine worked for other processes, or other virtual machines."""
    user, nice, system, _, _, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
