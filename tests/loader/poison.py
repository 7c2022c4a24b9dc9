"""Overwrites each slab at the moment in which its lease ends, so that a later read of it finds poison."""

from row_sources import Numbered

from feedline._src.loader import staging

POISON = 0xA5


def poison(slab, lease, idle):
    """Replaces `_Return.of`."""

    def give_back(back):
        slab.fill(POISON)
        idle.append(back)

    back = staging._Return(lease, give_back)
    back.slab = slab
    return back


def install():
    """Poison slabs in this process from now on. A worker process calls it when it unpickles its source."""
    staging._Return.of = staticmethod(poison)


class PoisonedSource(Numbered):
    """A source that poisons the slabs of any process that unpickles it."""

    def __setstate__(self, state):
        self.__dict__ = state
        install()
