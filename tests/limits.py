"""A limit on this process while a block runs."""

import contextlib
import resource


@contextlib.contextmanager
def limited(kind, soft):
    """Set a resource limit. Writes to a file beyond `resource.RLIMIT_FSIZE` fail as on a full disk.

    This is no fixture, because a fixture would limit pytest's log as well.
    """
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
