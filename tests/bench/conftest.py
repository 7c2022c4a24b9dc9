"""The modules of benchmarks/, which is a folder of scripts and no package, can be imported here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
