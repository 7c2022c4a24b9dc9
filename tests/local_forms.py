"""Plans process-local batches, given the devices of each process."""

import dataclasses

from feedline import FeedOptions
from feedline._src.loader.form import LocalForm
from feedline._src.plan.asked import SourceMetadata
from feedline._src.plan.plan import plan_of
from feedline._src.rows.spec import RowSpec


def planned(spec, size, sharding, processes, *, lanes=0, reads_columns=False, seed=0, **options):
    """The plan, and the form of each process's part of a batch, for rows of this spec.

    Args:
      processes: the devices of each process.
      reads_columns: whether the source can read only some columns of a leaf.
    """
    rows = RowSpec.of(spec)
    asked = FeedOptions(None, size, sharding, **options)
    metadata = SourceMetadata(rows, None, lanes, reads_columns=reads_columns)
    ids = {process: [device.id for device in devices] for process, devices in enumerate(processes)}
    plan = plan_of(metadata, rows, asked, ids)
    assert not plan.problems
    form = LocalForm(rows, rows, plan.reads[0], asked.transform, seed, asked.reading.bad_rows)
    return plan, [dataclasses.replace(form, part=part) for part in plan.reads]
