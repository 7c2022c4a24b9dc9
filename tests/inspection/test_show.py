"""The screens: as wide as the terminal, short also for large meshes, and without lost characters."""

import io

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from feedline._src.feed_options import FeedOptions
from feedline._src.options import Reading
from feedline._src.tools.inspect.contents import contents_of
from feedline._src.tools.inspect.description import Description, describe
from feedline._src.tools.inspect.drawing import grid_of
from feedline._src.tools.inspect.reads import Blocks, ProcessReads
from feedline._src.tools.inspect.show import show

DATA = P("data")
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def screen(source, batch_size, spec=DATA, width=80, processes=1, colours=False, **options):
    options = {"remainder": "drop", "prefetch": 2, "reading": Reading(), "transform": None, **options}
    request = FeedOptions(source, batch_size, NamedSharding(MESH, spec), **options)
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=colours, color_system="standard" if colours else None)
    show(describe(contents_of(source, options["transform"]), request, MESH, processes), "rows.npz", console)
    return text.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    source = {f"column_{i}": np.full((300, i + 1), -1.2345678) for i in range(20)}
    lines = screen(source, 30, width=width, processes=4).splitlines()
    assert max(map(len, lines)) <= width
    assert "  and 8 more leaves, which --json lists" in lines
    assert len(lines) < 100


def test_brackets_in_values_are_no_markup():
    text = screen({"x": np.array([[np.nan, 1], [2, 3], [4, 5]])}, 4, remainder="wrap")
    assert "[nan, 1]   [2, 3]   [4, 5]" in text


def test_a_size_that_does_not_fit_is_marked():
    lines = screen({"x": np.zeros((100, 4), np.float32)}, 30, processes=2).splitlines()
    assert lines[0].startswith("A feed refuses this. The batch size must be a multiple of the 4 shards")
    assert "Batches of 30 rows do not fit; this is for 28." in lines
    assert "Which process reads which rows of a batch of 28" in lines
    assert "Memory for batches of 28 rows" in lines
    assert "→ 30 does not fit; the others do." in lines
    rows = [
        line.split() for line in lines if line.split()[:1] in (["20"], ["28"], ["→"], ["32"]) and line[0] == " "
    ]
    assert rows == [
        ["20", "5", "0", "5", "0"],
        ["28", "3", "16", "4", "12"],
        ["→", "30", "3", "10", "4", "20"],
        ["32", "3", "4", "4", "28"],
    ]


def test_memory_is_shown_as_formula_and_result():
    """16 rows of 16 bytes a process, and as read 32; 8 rows a device."""
    lines = screen({"x": np.ones((100, 4))}, 32, processes=2).splitlines()
    formulas = [" ".join(line.split()) for line in lines[lines.index("Memory for batches of 32 rows") + 1 :][:4]]
    assert formulas == [
        "host, each process (buffer 2 + 1) × 256 B = 768 B",
        "on CPU devices (buffer 2 + prefetch 2 + 3) × 256 B = 1.75 KiB",
        "more, as read (buffer 2 + 1) × 512 B = 1.5 KiB",
        "device, each (prefetch 2 + 2) × 128 B = 512 B",
    ]


def test_what_else_a_feed_may_have_is_told():
    text = screen(
        {"x": np.ones((96, 4), np.float32)},
        32,
        P("data", "model"),
        transform=lambda batch, rows: {"mean": batch["x"].mean(axis=1, keepdims=True).repeat(2, axis=1)},
        reading=Reading(workers=2),
        steps_per_call=3,
        processes=8,
    )
    for told in (
        "A transform on the host makes of them:",
        "Each process reads whole rows, and cuts the columns for its devices afterwards.",
        "Each call delivers 3 batches, which is counted here.",
        "/dev/shm, for 2 workers: 10 × 96 B, at most.",  # 2 · (2 · max(1, 2 // 2) + 3), of 24 rows of 4 bytes
    ):
        assert told in text


@pytest.mark.parametrize(
    ("processes", "more"), [(1, ""), (2, " 1 process has none of these, and cannot build it.")]
)
def test_a_feed_on_a_part_of_the_mesh(processes, more):
    request = FeedOptions({"x": np.zeros(9)}, 3, jax.devices()[0])
    text = io.StringIO()
    show(describe(contents_of(request.source), request, MESH, processes), "rows", Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert f"The feed uses 1 of them.{more}" in lines
    assert "x: SingleDeviceSharding" in lines
    assert any(line.split()[:3] == ["0", "0–7" if processes == 1 else "0–3", "0–2"] for line in lines)


def test_processes_have_colours_in_a_terminal_only():
    source = {"x": np.ones((100, 4))}
    assert "\x1b[" not in screen(source, 32, processes=2)
    assert "\x1b[36md0–1 p0" in screen(source, 32, processes=2, colours=True)
    assert "\x1b[33md6–7 p1" in screen(source, 32, processes=2, colours=True)


# --- large meshes, which these eight devices do not make ---


class Drawn(Description):
    """A description of which only the drawing is looked at."""

    def __init__(self, processes, devices_each, rows):
        reads = [
            ProcessReads(p, list(range(p * devices_each, (p + 1) * devices_each)), [], [], 0, 0, False)
            for p in range(processes)
        ]
        leaf = jax.ShapeDtypeStruct((rows,), np.int32)
        for name, value in {"reads": reads, "processes": processes, "batch": [leaf]}.items():
            object.__setattr__(self, name, value)


def drawn(processes, devices_each):
    count = processes * devices_each
    parts = [(4 * i, 4 * i + 4) for i in range(count)]
    blocks = Blocks([0], parts, [()], {(i, 0): [i] for i in range(count)})
    grid = grid_of(Drawn(processes, devices_each, 4 * count), blocks)
    return list(zip(grid.rows, [cell.text for (cell,) in grid.cells], strict=True))


def test_adjacent_blocks_of_a_process_are_drawn_as_one_where_there_are_many():
    assert drawn(2, 6)[:2] == [("0–3", "d0 p0"), ("4–7", "d1 p0")]
    assert drawn(2, 32) == [
        ("0–127 in 32 blocks", "d0–31 p0"),
        ("128–255 in 32 blocks", "d32–63 p1"),
    ]


def test_the_middle_of_many_processes_is_left_out():
    rows = drawn(64, 1)
    assert len(rows) == 12
    assert rows[6:9] == [("24–27", "d6 p6"), ("… 53 more", "…"), ("240–243", "d60 p60")]


def test_auto_is_shown_by_the_numbers_to_begin_with():
    source, auto = (
        {"x": np.ones((100, 4))},
        {"reading": Reading(buffer="auto", workers="auto"), "prefetch": "auto"},
    )
    given, found = screen(source, 32), screen(source, 32, **auto)
    told = 'At the start: buffer and prefetch and workers "auto" may grow, within feedline.Limits.'
    assert " ".join(found.split()).replace(f"{told} ", "") == " ".join(given.split())
