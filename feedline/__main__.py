"""`python -m feedline` is the `feedline` command."""

import sys

from feedline._src.tools.main import main

if __name__ == "__main__":
    sys.exit(main())
