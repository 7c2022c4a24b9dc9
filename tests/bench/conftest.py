"""The folders of benchmarks/ can be imported here, as its scripts import them."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "peers" / "tasks")]
