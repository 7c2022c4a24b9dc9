"""The variables of torchrun, set by a script or an operator.

They are looked at after all launchers, because scripts for srun set some of them to equal values in all tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

from feedline._src.cluster.launchers.torchrun import find as find

DOCS = """\
| torchrun's variables | RANK or WORLD_SIZE, set by a script or an operator | RANK, WORLD_SIZE | MASTER_ADDR and \
MASTER_PORT |"""


def started(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("RANK") or environ.get("WORLD_SIZE"))
