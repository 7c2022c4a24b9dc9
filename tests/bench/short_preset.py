"""`python short_preset.py bench …`: the command line, with the preset "short" under the name "small".

Practices are measured in this process. `bench modes` still starts a process for each mode.
"""

import sys

from feedline._src.tools.bench import command
from feedline._src.tools.main import main


def shortened(measured):
    """The method with the short preset. It imports jax when called, after the command line has set devices."""

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
