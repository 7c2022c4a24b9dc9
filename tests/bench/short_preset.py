"""`python short_preset.py bench …`: the command line, where the preset "small" is as small as "short".

The practices are measured in one process: those of `bench modes` have their own.
"""

import sys

from feedline._src.tools.bench import command
from feedline._src.tools.main import main


def shortened(measured):
    """The method of a benchmark. It imports jax, for which the command line sets the devices first."""

    def shorter(self):
        from feedline._src.tools.bench import practices
        from feedline._src.tools.bench.workload import PRESETS

        PRESETS["small"] = PRESETS["short"]
        practices.in_a_process = lambda call, *arguments: call(*arguments)
        return measured(self)

    return shorter


if __name__ == "__main__":
    for each in (command.ModesBenchmark, command.PracticesBenchmark):
        each.measured = shortened(each.measured)
    sys.exit(main())
