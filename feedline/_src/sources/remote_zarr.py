"""The source of Zarr folders in stores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from feedline._src.rows.shards import Indices
from feedline._src.sources.groups import GroupSource
from feedline._src.sources.remote.zarr import ZarrObjects
from feedline._src.sources.remote.zarr_array import RemoteZarrArray


class RemoteZarrSource(GroupSource):
    """A `GroupSource` over Zarr folders in stores. Its `open_file` is a `ZarrObjects`."""

    @property
    def will_read(self) -> Callable[[Indices, int], bool]:
        """As of a `ToldSource`."""
        return self._fetch_chunks

    def _fetch_chunks(self, rows: Indices, ahead: int) -> bool:
        for leaf, shards in enumerate(self._shards):
            for file, within, _ in self._groups[leaf].split(np.unique(shards.of(rows))):
                array = self._arrays(file)[leaf]
                if not array.fetch_ahead([array.group_rows(group) for group in within.tolist()], ahead):
                    return False
        return True

    def close(self) -> None:
        """Drop the cached groups, and give up what is being fetched."""
        super().close()
        for file in range(len(self._paths)):
            for array in self._arrays(file):
                array.close()

    def _arrays(self, file: int) -> list[RemoteZarrArray]:
        assert isinstance(self._open_file, ZarrObjects)
        return self._open_file.arrays[self._paths[file]]
