"""Tests import modules of benchmarks/ by the same names as its scripts do."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS), str(BENCHMARKS / "peers" / "tasks")]
