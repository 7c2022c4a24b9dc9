"""Import of the optional libraries that only some formats need."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """The module `module`, which `pip install '.[extra]'` in the clone brings.

    Raises:
      ImportError: it is not installed.

    Example:
      >>> require("feedline_has_no", "parquet")
      Traceback (most recent call last):
      ImportError: feedline_has_no reads this format and is not installed; from the clone: pip install '.[parquet]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # the package is installed, and one of its own dependencies is not
        raise ImportError(
            f"{package} reads this format and is not installed; from the clone: pip install '.[{extra}]'"
        ) from error
