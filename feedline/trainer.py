"""`fit` trains your own model on the batches of any iterator. It also trains the bundled MLP.

::

    fit             the loop, with checkpoints, evaluation, history and callbacks
    Fitted          what `fit` returns: params, history
    Practices       how a step is compiled: donation, dtypes, sharding of parameters
    mesh_for        the mesh of a mode: "jit_single", "jit_multi", "pmap"
    mean_of_valid   a mean over the rows of a batch that the leaf `valid` marks with True
    Progress        the argument of a callback
    LiveLine, CSVLog, TensorBoardLog   callbacks that show or log the progress
    MemoryWatch     warns when the memory of a loop keeps growing, and names what grows
    digits          1,797 handwritten digits, as rows for first trials
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feedline._src.lazy import lazily

if TYPE_CHECKING:
    from feedline._src.tools.train.labelled import digits as digits
    from feedline._src.trainer.fitting import Fitted as Fitted
    from feedline._src.trainer.fitting import fit as fit
    from feedline._src.trainer.live import LiveLine as LiveLine
    from feedline._src.trainer.logs import CSVLog as CSVLog
    from feedline._src.trainer.logs import TensorBoardLog as TensorBoardLog
    from feedline._src.trainer.loop import Progress as Progress
    from feedline._src.trainer.memory import MemoryWatch as MemoryWatch
    from feedline._src.trainer.modes import Practices as Practices
    from feedline._src.trainer.modes import mesh_for as mesh_for
    from feedline._src.trainer.task import mean_of_valid as mean_of_valid

__getattr__, __dir__, __all__ = lazily(
    __name__,
    {
        "CSVLog": "feedline._src.trainer.logs",
        "Fitted": "feedline._src.trainer.fitting",
        "LiveLine": "feedline._src.trainer.live",
        "MemoryWatch": "feedline._src.trainer.memory",
        "Practices": "feedline._src.trainer.modes",
        "Progress": "feedline._src.trainer.loop",
        "TensorBoardLog": "feedline._src.trainer.logs",
        "digits": "feedline._src.tools.train.labelled",
        "fit": "feedline._src.trainer.fitting",
        "mean_of_valid": "feedline._src.trainer.task",
        "mesh_for": "feedline._src.trainer.modes",
    },
)
