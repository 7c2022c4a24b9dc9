"""What `feedline inspect` prints, and the meshes and specs that it takes."""

import io

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from feedline import FeedOptions
from feedline._src.tools.inspect.command import parse_mesh, parse_spec
from feedline._src.tools.inspect.show import show
from feedline._src.tools.inspect.target import Target, first_rows, of_source

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
DATA = NamedSharding(MESH, P("data"))
AXES = {"data": 4, "model": 2, "x": 1}


def screen(source, batch_size, sharding=DATA, width=80, processes=1, **options):
    asked, text = FeedOptions(source, batch_size, sharding, **options), io.StringIO()
    target = Target(MESH, asked, asked.plan(processes), first_rows(source)[1])
    show("rows.npz", target, Console(file=text, width=width))
    return text.getvalue().splitlines()


def cells(lines, first):
    """The cells of the first line whose first word is `first`."""
    return next(line.split() for line in lines if line.split()[:1] == [first])


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    source = {f"column_{i}": np.full((300, i + 1), -1.2345678) for i in range(20)}
    lines = screen(source, 32, width=width, processes=4)
    assert max(map(len, lines)) <= width
    assert lines.count("  and 8 more") == 2
    assert len(lines) < 100


def test_a_table_of_a_batch_by_hand():
    by_both = NamedSharding(MESH, P("data", "model"))
    lines = screen({"x": np.array([[np.nan, 1]] * 100)}, 30, by_both, processes=2)
    assert lines[0].startswith("A feed refuses this: the batch size must be a multiple of the 4 shards")
    assert "A batch of 28, since one of 30 does not fit" in lines
    assert [cells(lines, "x"), cells(lines[8:], "x")] == [
        ["x", "2", "float64", "16", *(["[nan,", "1]"] * 3)],
        ["x", "28", "×", "2", "float32", "P('data',", "'model')", "7", "×", "1"],
    ]
    assert [cells(lines, "0"), cells(lines, "1")] == [
        ["0", "0–3", "0–13", "112", "B"],
        ["1", "4–7", "14–27", "112", "B"],
    ]
    assert [cells(lines, each) for each in ("28", "→", "32")] == [
        ["28", "3", "16", "4", "12"],
        ["→", "30", "3", "10", "4", "20"],
        ["32", "3", "4", "4", "28"],
    ]


def test_memory_is_shown_as_formula_and_result():
    """A process has 16 rows, of 16 bytes each when placed and 32 as read; a device has 8 rows."""
    lines = screen({"x": np.ones((100, 4))}, 32, processes=2)
    formulas = [" ".join(line.split()) for line in lines[lines.index("Memory for batches of 32 rows") + 1 :][:4]]
    assert formulas == [
        "host, each process (buffer 2 + 1) × 256 B = 768 B",
        "on CPU devices (buffer 2 + prefetch 2 + 3) × 256 B = 1.75 KiB",
        "plus, as read (buffer 2 + 1) × 512 B = 1.5 KiB",
        "device, each (prefetch 2 + 2) × 128 B = 512 B",
    ]


@pytest.mark.parametrize(("rows", "size"), [(100, 32), (20, 20), (5, 4), (1, 4)])
def test_the_default_batch_size(rows, size):
    target = of_source(np.zeros(rows), {"data": 4, "model": 2}, ("data",), 1, lambda options: options)
    assert target.options.batch_size == size


def test_meshes_and_specs():
    assert list(parse_mesh(" model = 2 , data=4096").items()) == [("model", 2), ("data", 4096)]  # in this order
    assert parse_spec("None,model", AXES) == (None, "model")
    assert parse_spec("data+x, None, model", AXES) == (("data", "x"), None, "model")


@pytest.mark.parametrize("text", ["data", "data=4,", "data=-1", "4=data", "data=0", "data=2,data=4"])
def test_what_is_no_mesh(text):
    with pytest.raises(ValueError, match="--mesh takes names of different axes and their sizes"):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["fsdp", "data+", "none", "data,model+data"])
def test_what_is_no_spec(text):
    with pytest.raises(ValueError, match="--spec takes, for each axis of a leaf, None or axes of the mesh"):
        parse_spec(text, AXES)
