"""The folders of benchmarks/ can be imported here, as its scripts import them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
