"""Plots the result that `feedline bench NAME --out result.json` saved.

    python benchmarks/plot_bench.py result.json picture.svg

Needs matplotlib, which `pip install '.[bench]'` in the clone brings.
"""

import json
import sys
from pathlib import Path

from feedline._src.tools.bench.plots import plot

if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
