"""The screens: as wide as the terminal, short also for large meshes, and without lost characters."""

import io

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from feedline import FeedOptions, Reading
from feedline._src.plan.plan import divided, plan_of
from feedline._src.tools.inspect.show import show, shown, spans
from feedline._src.tools.inspect.target import Target, first_rows, of_source

DATA = P("data")
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def screen(source, batch_size, sharding=DATA, width=80, processes=1, colours=False, mesh=MESH, **options):
    if isinstance(sharding, P):
        sharding = NamedSharding(mesh, sharding)
    asked = FeedOptions(source, batch_size, sharding, **options)
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=colours, color_system="standard" if colours else None)
    show("rows.npz", Target(mesh, asked, asked.plan(processes), first_rows(source)[1]), console)
    return text.getvalue()


def grid(text):
    """Cells of all drawings, without their heads."""
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line[:1] == "│"]
    return [cells for cells in lines if cells[0] != "rows"]


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
        reading=Reading(workers=2, buffer="auto"),
        processes=8,
    )
    for told in (
        "After the transform on the host, a batch has:",
        "Each process reads whole rows, and cuts the columns for its devices afterwards.",
        'At the start: buffer "auto" may grow, within feedline.Limits.',
        "/dev/shm, for 2 workers: 10 × 32 B, at most.",  # 2 · (2 · max(1, 2 // 2) + 3), of 8 rows of 4 bytes
    ):
        assert told in text
    text = screen({"x": np.ones((96, 4), np.float32)}, 32, steps_per_call=3)
    assert "Each call delivers 3 batches, which is counted here." in text


@pytest.mark.parametrize(("processes", "more"), [(1, ""), (2, "1 process without one of these cannot build it.")])
def test_a_feed_on_a_part_of_the_mesh(processes, more):
    asked = FeedOptions({"x": np.zeros(9)}, 3, jax.devices()[0])
    metadata, first = first_rows(asked.source)
    plan = plan_of(metadata, metadata.spec, asked, divided(range(8), processes))
    text = io.StringIO()
    show("rows", Target(MESH, asked, plan, first), Console(file=text, width=80))
    lines = text.getvalue().splitlines()
    assert lines[lines.index("The feed uses 1 of them.") + 1].startswith(more or "d3")
    assert "x: SingleDeviceSharding" in lines
    assert any(line.split()[:3] == ["0", "0–7" if processes == 1 else "0–3", "0–2"] for line in lines)


def test_processes_have_colours_in_a_terminal_only():
    source = {"x": np.ones((100, 4))}
    assert "\x1b[" not in screen(source, 32, processes=2)
    assert "\x1b[36md0–1 p0" in screen(source, 32, processes=2, colours=True)
    assert "\x1b[33md6–7 p1" in screen(source, 32, processes=2, colours=True)


# --- the drawing ---

X, Y, Z = np.zeros((32, 4, 6)), np.zeros(32), np.zeros((32, 8))


def test_rows_and_columns():
    spec = {"x": NamedSharding(MESH, P("data", "model")), "y": NamedSharding(MESH, P("data"))}
    text = screen({"x": X, "y": Y}, 16, spec, processes=2)
    by_column, by_row = text[text.index("\nx: ") : text.index("\ny: ")], text[text.index("\ny: ") :]
    assert grid(by_column) == [
        ["0–3", "d0 p0", "d1 p0"],
        ["4–7", "d2 p0", "d3 p0"],
        ["8–11", "d4 p1", "d5 p1"],
        ["12–15", "d6 p1", "d7 p1"],
    ]
    assert "│ rows  │ columns 0–1 │ columns 2–3 │" in by_column
    assert [row[1] for row in grid(by_row)] == ["d0–1 p0", "d2–3 p0", "d4–5 p1", "d6–7 p1"]


def test_leaves_of_several_widths_share_a_drawing_and_processes_a_block():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    text = screen({"x": X, "z": Z}, 16, P(None, "data"), processes=4, mesh=mesh, width=120)
    assert "x, z: P(None, 'data')" in text
    assert "columns, part 1 of 2" in text
    assert grid(text) == [["0–15", "d0–3 p0–1", "d4–7 p2–3"]]


def test_permuted_devices_are_drawn_where_they_are():
    mesh = Mesh(np.array(jax.devices())[[3, 1, 7, 5, 2, 0, 6, 4]], ("data",))
    cells = ["d3 p0", "d1 p0", "d7 p1", "d5 p1", "d2 p0", "d0 p0", "d6 p1", "d4 p1"]
    assert [row[1] for row in grid(screen({"y": Y}, 16, processes=2, mesh=mesh))] == cells


def test_the_middle_of_a_large_mesh_is_left_out():
    mesh = AbstractMesh((64, 8), ("data", "model"))
    text = screen({"x": np.zeros((1024, 16))}, 256, P("data", "model"), processes=64, mesh=mesh, width=120)
    rows = grid(text)
    assert len(rows) == 12
    assert rows[6][:2] == ["24–27", "d48 p6"]
    assert rows[7] == ["… 53 more", "…", "…", "…", "…", "…", "…"]
    assert rows[8][:2] == ["240–243", "d480 p60"]
    assert rows[0] == ["0–3", "d0 p0", "d1 p0", "d2 p0", "…", "d6 p0", "d7 p0"]
    assert "… 57 more" in text  # of the processes


# --- words ---


def test_spans_of_nothing():
    assert spans([]) == []


@pytest.mark.parametrize(("rows", "size"), [(100, 32), (20, 20), (5, 4), (1, 4)])
def test_the_default_batch_size(rows, size):
    axes = {"data": 4, "model": 2}
    assert of_source(np.zeros(rows), axes, ("data",), 1, lambda options: options).options.batch_size == size


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.int64(7), "7"),
        (np.float32(0.1), "0.1"),
        (np.bool_(True), "True"),
        (np.array([1, 2, 3]), "[1, 2, 3]"),
        (np.array([np.nan, 1e-9]), "[nan, 1e-09]"),
        (np.arange(12, dtype=np.uint8).reshape(3, 4), "0 to 11"),
        (np.zeros((3, 4)), "all 0"),
        (np.array([np.nan, 1, 2, np.inf, -3.25]), "-3.25 to 2, 2 not finite"),
        (np.full(9, np.nan), "9 not finite"),
        (np.arange(9) % 2 == 0, "5 of 9 True"),
        (np.full(5, 3 + 4j), "all 5"),
        (np.zeros((0, 3)), "no values"),
        (np.ones(6, jax.numpy.bfloat16), "all 1"),
        (np.array([2**63 - 1] * 5 + [-(2**63)]), f"{-(2**63)} to {2**63 - 1}"),
    ],
)
def test_values_in_a_few_characters(values, text):
    assert shown(np.asarray(values)) == text
