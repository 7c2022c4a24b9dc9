"""Images as rows: JPEG, PNG, WebP and others, cropped and resized.

::

    decode       decodes a source of encoded images into rows {"image": uint8[size, size, 3], "label": int32}

`pip install '.[images]'` in the clone of the repository installs the libraries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feedline._src.lazy import lazily

if TYPE_CHECKING:
    from feedline._src.images import decode as decode

__getattr__, __dir__, __all__ = lazily(__name__, {"decode": "feedline._src.images"})
