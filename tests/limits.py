"""A limit on this process while a block runs."""

import contextlib
import resource


@contextlib.contextmanager
def limited(kind, soft):
    """Set a limit, such as `resource.RLIMIT_FSIZE`, beyond which a file fails as on a full disk.

    Not a fixture, which would limit pytest's log as well.
    """
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)
