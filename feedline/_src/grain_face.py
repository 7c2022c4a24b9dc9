"""What loops that were written for a `grain.DatasetIterator` call, beside `get_state`, `set_state` and `close`."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

import grain


class GrainFace:
    """The names of a `grain.DatasetIterator` that a feed has by others, and Orbax's protocol of version 1."""

    spec: Any

    def get_state(self) -> dict[str, Any]:
        """See `Feed`."""
        raise NotImplementedError

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See `Feed`."""
        raise NotImplementedError

    def start(self) -> None:
        """See `Feed`."""
        raise NotImplementedError

    @property
    def element_spec(self) -> Any:
        """The `spec`, by the name that it has in Grain."""
        return self.spec

    def start_prefetch(self) -> None:
        """Begin to read ahead: Grain's name of `start`."""
        self.start()

    async def save(self, directory: Any) -> Awaitable[None]:
        """Save the state for `orbax.checkpoint.experimental.v1`, of which a feed is a checkpointable.

        Args:
          directory: Orbax's path, which is being created.
        """
        state = self.get_state()  # before the feed goes on

        async def write() -> None:
            from feedline._src.loader.lane_files import write_state

            write_state(await directory.await_creation(), state)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Go on from a state that `save` wrote; errors as of `set_state`, and of `feedline.load_lanes`."""

        async def read() -> None:
            from feedline._src.loader.lane_files import read_state

            self.set_state(read_state(directory))

        return read()


grain.DatasetIterator.register(GrainFace)  # handlers written for Grain's iterators ask for their class
