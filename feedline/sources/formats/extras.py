"""Libraries that only some formats need: had when such a file is opened, or an error with the line that helps."""

from __future__ import annotations

import importlib
from typing import Any


def need(module: str, extra: str) -> Any:
    """The module `module`, which `pip install feedline[extra]` brings.

    Raises:
      ImportError: it is not installed.

    Example:
      >>> need("feedline_has_none", "parquet")
      Traceback (most recent call last):
      ImportError: feedline_has_none reads this format and is not installed; pip install 'feedline[parquet]'
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # it is there, and what it needs itself is not
        raise ImportError(
            f"{package} reads this format and is not installed; pip install 'feedline[{extra}]'"
        ) from error
