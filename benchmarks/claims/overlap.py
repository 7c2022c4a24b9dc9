"""How much longer is a step than the slower of loading and computing?

A load that sleeps and a computation take equally long. Refuted by a median above 1.05 × the slower of them at
prefetch 2. `feedline doctor` makes the same measurement, shorter.

    python benchmarks/claims/overlap.py --out overlap.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from shared.script import parser, save

from feedline._src.tools.doctor.devices import overlap

if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--step-ms", type=float, default=20, help="how long a load takes, and a computation")
    asked.add_argument("--steps", type=int, default=100, help="measured at each depth of prefetch")
    options = asked.parse_args()
    measured = overlap(options.step_ms / 1e3, options.steps)
    for depth in measured["depths"]:
        print(
            f"prefetch {depth['prefetch']}: a step of {depth['step_s'] * 1e3:.2f} ms, "
            f"{depth['of_the_slower']:.3f} × the slower of load and compute"
        )
    save("overlap", options, results=measured)
