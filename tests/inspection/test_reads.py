"""Who reads what, against NumPy slicing of what JAX says of each device."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline._src.feed_options import FeedOptions
from feedline._src.options import Reading
from feedline._src.tools.inspect.contents import contents_of
from feedline._src.tools.inspect.description import describe
from feedline._src.tools.inspect.drawing import grid_of
from feedline._src.tools.inspect.reads import spans

SHAPES = {"x": (16, 4, 6), "y": (16,), "z": (16, 8)}
ROWS = {name: np.zeros((32, *shape[1:]), np.int16) for name, shape in SHAPES.items()}


def described(sharding, mesh, processes, source=ROWS, **options):
    """The description of batches of 16 rows."""
    options = {"remainder": "drop", "prefetch": 2, "reading": Reading(), **options}
    request = FeedOptions(source, 16, sharding, **options)
    return describe(contents_of(source), request, mesh, processes)


def mesh_of(shape, axes=("data", "model", "other")):
    return Mesh(np.array(jax.devices()).reshape(shape), axes[: len(shape)])


CASES = [
    ((8,), (P("data"), P("data"), P("data"))),
    ((8,), (P(), P(), P())),
    ((4, 2), (P("data", "model"), P("data"), P("data", "model"))),
    ((4, 2), (P(("data", "model")), P("data"), P(None, "model"))),
    ((2, 4), (P("data", "model"), P("model"), P("model", "data"))),
    ((2, 2, 2), (P("data", "model", "other"), P("other"), P(("other", "data"), "model"))),
]


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
@pytest.mark.parametrize(("shape", "specs"), CASES)
def test_a_process_reads_what_its_devices_hold(shape, specs, processes):
    mesh = mesh_of(shape)
    shardings = dict(zip(SHAPES, (NamedSharding(mesh, spec) for spec in specs), strict=True))
    description = described(shardings, mesh, processes)
    assert [each.process for each in description.reads] == list(range(processes))
    for each in description.reads:
        own = range(each.process * 8 // processes, (each.process + 1) * 8 // processes)
        assert each.devices == list(own)
        read_rows, bytes_read = np.zeros(16, bool), 0
        for (name, sizes), plan in zip(SHAPES.items(), each.plans, strict=True):
            held = np.zeros(sizes, bool)
            for device, index in shardings[name].devices_indices_map(sizes).items():
                if device.id in own:
                    held[index] = True
            # the smallest rectangle around what the devices hold
            sides = [np.flatnonzero(held.any(axis=tuple(set(range(held.ndim)) - {i}))) for i in range(held.ndim)]
            read = [plan.rows, *(np.arange(n)[c] for n, c in zip(sizes[1:], plan.columns, strict=True))]
            for side, expected in zip(read, sides, strict=True):
                np.testing.assert_array_equal(side, expected)
            read_rows[sides[0]] = True
            bytes_read += 2 * np.prod([len(side) for side in sides])
        assert [row for span in each.rows for row in range(*span)] == np.flatnonzero(read_rows).tolist()
        assert (each.local_bytes, each.read_bytes, each.cuts) == (bytes_read, 0, False)


@pytest.mark.parametrize(("shape", "specs"), CASES)
def test_each_block_is_held_by_the_devices_that_are_drawn_in_it(shape, specs):
    mesh = mesh_of(shape)
    shardings = dict(zip(SHAPES, (NamedSharding(mesh, spec) for spec in specs), strict=True))
    description = described(shardings, mesh, 2)
    drawn = sorted(itertools.chain(*(blocks.leaves for blocks in description.blocks)))
    assert drawn == [0, 1, 2]
    for blocks in description.blocks:
        for leaf in blocks.leaves:
            sizes = list(SHAPES.values())[leaf]
            holders = {}
            for device, index in shardings[list(SHAPES)[leaf]].devices_indices_map(sizes).items():
                bounds = tuple(part.indices(size)[:2] for part, size in zip(index, sizes, strict=True))
                holders.setdefault(bounds, []).append(device.id)
            found = {}
            for (row, column), devices in blocks.devices.items():
                shares = blocks.column_parts[column]
                columns = [(int(a * n), int(b * n)) for (a, b), n in zip(shares, sizes[1:], strict=False)]
                whole = [(0, n) for n in sizes[1 + len(columns) :]]
                found[blocks.row_parts[row], *columns, *whole] = sorted(devices)
            assert found == {bounds: sorted(devices) for bounds, devices in holders.items()}


def texts(description, blocks=0):
    grid = grid_of(description, description.blocks[blocks])
    return grid.columns, grid.rows, [[cell.text for cell in row] for row in grid.cells]


def test_a_drawing_of_rows_and_columns():
    mesh = mesh_of((4, 2))
    spec = {"x": NamedSharding(mesh, P("data", "model")), "y": NamedSharding(mesh, P("data"))}
    source = {"x": ROWS["x"], "y": ROWS["y"]}
    description = described(spec, mesh, 2, source)
    assert texts(description) == (
        ["columns 0–1", "columns 2–3"],
        ["0–3", "4–7", "8–11", "12–15"],
        [["d0 p0", "d1 p0"], ["d2 p0", "d3 p0"], ["d4 p1", "d5 p1"], ["d6 p1", "d7 p1"]],
    )
    rows = [["d0–1 p0"], ["d2–3 p0"], ["d4–5 p1"], ["d6–7 p1"]]
    assert texts(description, 1) == (["whole rows"], ["0–3", "4–7", "8–11", "12–15"], rows)


def test_leaves_of_several_widths_in_one_drawing_and_replicas_over_processes():
    mesh = mesh_of((2, 4))
    both = NamedSharding(mesh, P(None, "data"))
    description = described(both, mesh, 4, {"x": ROWS["x"], "z": ROWS["z"]})
    columns, rows, cells = texts(description)
    assert columns == ["columns, part 1 of 2", "columns, part 2 of 2"]
    assert (rows, cells) == (["0–15"], [["d0–3 p0–1", "d4–7 p2–3"]])


def test_permuted_devices_are_drawn_where_they_are():
    devices = np.array(jax.devices())[[3, 1, 7, 5, 2, 0, 6, 4]]
    mesh = Mesh(devices, ("data",))
    whole = Mesh(np.array(jax.devices()), ("data",))
    description = described(NamedSharding(mesh, P("data")), whole, 2)
    cells = ["d3 p0", "d1 p0", "d7 p1", "d5 p1", "d2 p0", "d0 p0", "d6 p1", "d4 p1"]
    assert texts(description)[2] == [[cell] for cell in cells]
    assert [each.rows for each in description.reads] == [[(0, 4), (8, 12)], [(4, 8), (12, 16)]]


class Whole:
    """Rows that can only be read whole."""

    def __len__(self):
        return 32

    def __getitem__(self, row):
        return {"z": np.zeros(8, np.int16), "y": np.float64(row)}


def test_whole_rows_are_read_where_a_source_cannot_read_columns():
    """z: int16[8] of which a process places 4; y: float64, placed as float32. Each process reads all 16 rows."""
    mesh = mesh_of((2, 4))
    shardings = {"z": NamedSharding(mesh, P(None, "data")), "y": NamedSharding(mesh, P())}
    description = described(shardings, mesh, 2, Whole())
    for each in description.reads:
        assert (each.rows, each.cuts) == ([(0, 16)], True)
        assert each.local_bytes == 16 * (4 * 2 + 4)
        assert each.read_bytes == 16 * (8 * 2 + 8)


def test_spans_of_nothing():
    assert spans(np.array([], np.int64)) == []
