"""What a source that fetches rows ahead is told of."""

from types import SimpleNamespace

from feedline._src.loader.local_batches import LocalBatches


def test_a_worker_tells_only_of_the_batches_that_it_reads():
    """Else each worker of several would fetch the rows of all."""
    told = []
    reader = SimpleNamespace(
        form=SimpleNamespace(plans=[SimpleNamespace(rows=range(8))]),
        schedule=SimpleNamespace(batches_from=lambda origin: 20, batch_at=lambda origin, number: number),
        tells_source=True,
        tell_source=lambda start, ahead: len(told) < 4 and (told.append((start, ahead)) or True),
    )
    batches = LocalBatches(reader, None, None, every=3)
    batches._tell_source(1)
    assert told == [(1, 0), (4, 3), (7, 6), (10, 9)]
    told.clear()
    batches._tell_source(4)
    assert told == [(13, 9), (16, 12), (19, 15)]
