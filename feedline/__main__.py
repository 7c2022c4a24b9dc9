"""`python -m feedline` is the `feedline` command."""

import sys

from feedline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
