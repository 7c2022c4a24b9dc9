"""Several processes as one run: join them, end them together, and stop them for a checkpoint.

::

    initialize   makes this process join the others, with any launcher
    should_stop  whether all processes should stop after this step, because one of them got a signal
    abort        ends all processes of the run, with a reason
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feedline._src.lazy import lazily

if TYPE_CHECKING:
    from feedline._src.agreement.monitor import abort as abort
    from feedline._src.agreement.stop import should_stop as should_stop
    from feedline._src.cluster.join import initialize as initialize

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "abort": "feedline._src.agreement.monitor",
        "initialize": "feedline._src.cluster.join",
        "should_stop": "feedline._src.agreement.stop",
    },
)
