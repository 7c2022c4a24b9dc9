"""Bad rows: how they are found, replaced and counted, and that all other rows stay in their positions."""

import contextlib
import errno
import json
import pickle
import subprocess
import sys
import time

import grain
import jax
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from local_forms import planned
from row_sources import Numbered

from feedline import Feed, FeedError, Mixture, Order, Reading, RowError
from feedline._src.loader.random_access import LocalBatches, RandomAccess
from feedline._src.loader.staging import BatchBuffers
from feedline._src.order.epoch import SingleOrder, rows_at, substitutes_at
from feedline._src.order.schedule import Cursor, Schedule
from feedline._src.rows.bad_rows import find_bad_rows
from feedline._src.rows.source import UserSource

N, B, EPOCHS, SEED = 50, 16, 2, 5
BAD = {3, 25, 26, 49}  # 25 and 49 are among the elements that a fingerprint samples
REMAINDERS = ["drop", "pad", "wrap"]
TOO_LARGE = 2**31


class Columns(Numbered):
    """A source in which some rows cannot be read, and whose errors do not name these rows."""

    def __init__(self, bad=BAD, n=N, error=OSError):
        super().__init__(n, row=np.int32(0), wide=np.zeros(4, np.int32))
        self.bad, self.error, self.reads = np.array(sorted(bad), int), error, []

    def read(self, rows, out):
        self.reads.append(len(rows))
        if np.isin(rows, self.bad).any():
            raise self.error("it is damaged")
        super().read(rows, out)


class Records:
    """Records, of which `wrong` makes the bad ones."""

    def __init__(self, wrong):
        self.wrong = wrong

    def __len__(self):
        return N

    def __getitem__(self, i):
        if i in BAD:
            return self.wrong()
        return {"row": np.int32(i), "wide": np.full(4, i, np.int32)}


def _damaged():
    raise OSError("it is damaged")


def _too_large():
    wide = np.repeat(np.arange(N)[:, None], 4, axis=1)
    wide[sorted(BAD), 2] = TOO_LARGE
    return {"row": np.arange(N), "wide": wide}


def _refuse_bad(batch, rows):
    """A transform that raises a `RowError` which names the first bad row."""
    bad = np.isin(rows.index, sorted(BAD))
    if bad.any():
        raise RowError("it is damaged", row=int(rows.index[bad][0]))
    return batch


SOURCES = {
    "columns": lambda: {"source": Columns()},
    "integers": lambda: {"source": _too_large()},
    "records": lambda: {"source": Records(_damaged)},
    "of another form": lambda: {"source": Records(lambda: {"row": np.int32(1)})},
    "none": lambda: {"source": Records(lambda: None)},
    "transform": lambda: {"source": Columns(bad=()), "transform": _refuse_bad},
}


def spare(epoch, position, n=N, bad=BAD):
    return next(row for row in substitutes_at(SEED, n, epoch, position).tolist() if row not in bad)


def expected(remainder):
    """The expected batches of (row, valid, bad): lists cut from the order, with substitutes for bad rows."""
    orders = [rows_at(Order(SEED), N, epoch, np.arange(N)).tolist() for epoch in range(EPOCHS)]
    runs = [[(epoch, p, order[p]) for p in range(N)] for epoch, order in enumerate(orders)]
    runs = [[place for run in runs for place in run]] if remainder == "wrap" else runs
    batches = []
    for run in runs:
        for start in range(0, len(run), B):
            batch = [(*place, True) for place in run[start : start + B]]
            if len(batch) < B:
                if remainder != "pad":
                    continue
                batch += [(*run[i], False) for i in range(B - len(batch))]
            batches.append([(spare(e, p) if row in BAD else row, valid, row in BAD) for e, p, row, valid in batch])
    return batches


@pytest.mark.parametrize("policy", ["substitute", "mask"])
@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_bad_row_is_replaced_and_no_other_row_moves(sharding, tmp_path, source, remainder, policy):
    path = tmp_path / "bad.jsonl"
    reading = Reading(threads=3, bad_rows=policy, bad_rows_budget=99, quarantine=path)
    options = {"order": Order(SEED), "epochs": EPOCHS, "remainder": remainder, "reading": reading}
    with Feed(batch_size=B, sharding=sharding, **SOURCES[source](), **options) as feed:
        batches = [jax.tree.map(np.asarray, batch) for batch in feed]
        statistics = feed.statistics()
    wanted = expected(remainder)
    assert [batch["row"].tolist() for batch in batches] == [[row for row, _, _ in batch] for batch in wanted]
    for batch, rows in zip(batches, wanted, strict=True):
        np.testing.assert_array_equal(batch["wide"], np.repeat(batch["row"][:, None], 4, axis=1))
        valid = [valid and not (bad and policy == "mask") for _, valid, bad in rows]
        assert ("valid" in batch) == (policy == "mask" or remainder == "pad")
        assert batch.get("valid", np.ones(B, bool)).tolist() == valid
    bad = sum(valid and bad for batch in wanted for _, valid, bad in batch)
    assert bad > 4
    assert statistics.bad_rows == bad
    assert statistics.rows == sum(valid for batch in wanted for _, valid, _ in batch)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == sorted(BAD)  # each once
    for line in lines:
        epoch, position = line["epoch"], line["position"]
        assert line["row"] == rows_at(Order(SEED), N, epoch, np.array([position]))[0]
        assert (line["process"], line["substitute"]) == (0, spare(epoch, position))
        assert line["error"]
    assert [(line["epoch"], line["position"]) for line in lines] == sorted(
        (line["epoch"], line["position"]) for line in lines
    )


def test_substitutes_are_uniform_and_a_function_of_seed_epoch_and_position():
    drawn = np.array([substitutes_at(1, 10, epoch, p) for epoch in range(4) for p in range(200)])
    assert drawn.shape == (800, 16)
    counts = np.bincount(drawn.ravel(), minlength=10)
    assert (abs(counts - 1280) < 5 * 1280**0.5).all()
    assert len({tuple(one) for one in drawn.tolist()}) == 800
    assert substitutes_at(1, 10, 3, 199).tolist() == drawn[-1].tolist()
    assert substitutes_at(2, 10, 3, 199).tolist() != drawn[-1].tolist()


# --- the search ---


@settings(max_examples=200)
@given(st.data())
def test_the_search_finds_each_bad_row_and_reads_every_other(data):
    count = data.draw(st.integers(1, 60))
    rows = np.array(data.draw(st.lists(st.integers(0, 30), min_size=count, max_size=count)))
    bad = data.draw(st.sets(st.integers(0, 30), max_size=6))
    says = data.draw(st.sampled_from(["the row", "nothing", "another row"]))
    read, attempts = set(), 0

    def attempt(here):
        nonlocal attempts
        attempts += 1
        for i in range(here.start, here.stop):
            if rows[i] in bad:
                raise RowError(
                    "no", row={"the row": int(rows[i]), "nothing": None, "another row": int(rows[0])}[says]
                )
            read.add(i)

    try:
        attempt(slice(0, count))
    except RowError as error:
        read.clear()
        found = [i for i, _ in find_bad_rows(attempt, rows, error)]
    else:
        found = []
    wrong = [i for i in range(count) if rows[i] in bad]
    assert found == wrong
    assert read == set(range(count)) - set(wrong)
    if says == "the row":
        assert attempts <= 1 + 3 * len(wrong)
    elif says == "nothing":
        assert attempts <= 1 + 2 * len(wrong) * 6  # 2 log₂ 60


@pytest.mark.parametrize("policy", ["raise", "substitute", "mask"])
def test_good_rows_are_read_once(sharding, policy):
    source = Columns(bad=())
    with Feed(source, B, sharding, epochs=1, reading=Reading(threads=0, bad_rows=policy)) as feed:
        assert len(list(feed)) == 3
    assert source.reads == [B, B, B]


# --- the same on any topology ---

CUTS = {"narrow": P("model"), "wide": P("data", "model")}


class Misfits:
    """A `RowSource` with numbers that do not fit, each in one column, and rows that cannot be read."""

    def __init__(self, values, damaged):
        self.values, self.damaged = values, np.array(sorted(damaged), int)
        self.spec = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in values.items()}

    def read(self, rows, out):
        if np.isin(rows, self.damaged).any():
            raise OSError("damaged")
        for name, leaf in self.values.items():
            out[name][...] = leaf[rows]


@settings(max_examples=60)
@given(st.data())
def test_every_split_into_processes_takes_the_same_rows(data):
    """The devices are dealt out to several processes; each must read its part of the expected batch."""
    devices = data.draw(st.permutations(range(8)))
    mesh = Mesh(np.array(jax.devices())[devices].reshape(4, 2), ("data", "model"))
    borders = sorted(data.draw(st.sets(st.integers(1, 7), max_size=3)))
    processes = np.split(np.array(data.draw(st.permutations(jax.devices()))), borders)
    n = data.draw(st.integers(12, 40))  # at most three are bad, so one of 16 substitutes is good
    size = 8 * data.draw(st.integers(1, 3))
    remainder = data.draw(st.sampled_from(["pad", "wrap"]))
    policy = data.draw(st.sampled_from(["substitute", "mask"]))
    large = data.draw(st.dictionaries(st.integers(0, n - 1), st.integers(0, 3), max_size=2))
    damaged = data.draw(st.sets(st.integers(0, n - 1), max_size=1))
    transforms = data.draw(st.booleans())
    bad = {*large, *damaged}
    wide = np.repeat(np.arange(n)[:, None], 4, axis=1)
    for row, column in large.items():
        wide[row, column] = TOO_LARGE
    source = Misfits({"narrow": np.arange(n), "wide": wide}, damaged)
    schedule = Schedule(n, size, remainder, None)
    start = schedule.batch_at(Cursor(0, 0), data.draw(st.integers(0, 5)))
    wanted = schedule.positions(start, np.arange(size))
    at = zip(wanted.epoch.tolist(), wanted.position.tolist(), strict=True)
    order = [(e, p, int(rows_at(Order(SEED), n, e, np.array([p]))[0])) for e, p in at]
    rows = np.array([spare(e, p, n, bad) if row in bad else row for e, p, row in order])
    valid = wanted.valid & ~(np.array([row in bad for _, _, row in order]) & (policy == "mask"))
    _, forms = planned(
        source.spec,
        size,
        {name: NamedSharding(mesh, CUTS[name]) for name in source.spec},
        processes,
        seed=SEED,
        transform=(lambda batch, rows: jax.tree.map(np.copy, batch)) if transforms else None,
        reading=Reading(bad_rows=policy),
        remainder=remainder,
    )
    for form in forms:
        one, buffers = SingleOrder(Order(SEED), n), BatchBuffers(form, 2)
        access = RandomAccess(UserSource(source), one, form, buffers, schedule)
        batches = LocalBatches(access, start, data.draw(st.integers(1, 3)))
        parts = data.draw(st.permutations(range(batches.parts)))
        (batch,) = [one for one in [batches.read(0, part) for part in parts] if one]
        narrow, *masks, values = batch.leaves
        assert bool(masks) == (remainder == "pad" or policy == "mask")
        of_narrow, of_wide = form.part.of_rows
        np.testing.assert_array_equal(narrow, rows[of_narrow.rows])
        np.testing.assert_array_equal(
            values, np.repeat(rows[of_wide.rows, None], 4, axis=1)[:, of_wide.columns[0]]
        )
        for mask in masks:
            np.testing.assert_array_equal(mask, valid[form.part.own_rows])
        met = [i for i in form.part.rows.tolist() if wanted.valid[i] and order[i][2] in bad]
        assert [one.at for one in batch.bad] == met
        assert pickle.loads(pickle.dumps(batch.bad)) == batch.bad


# --- budget, states, errors ---


def _feed(sharding, source, transform=None, prefetch=2, **reading):
    reading = Reading(threads=1, **{"bad_rows": "substitute", **reading})
    options = {"order": Order(shuffle=False), "epochs": 1, "transform": transform, "prefetch": prefetch}
    return Feed(source, B, sharding, reading=reading, **options)


@pytest.mark.parametrize(("budget", "batches"), [(0, 0), (1, 1), (2, 1), (3, 3), (0.0, 0), (1 / B, 1), (0.07, 3)])
def test_beyond_its_budget_a_feed_raises_and_delivers_nothing_more(sharding, tmp_path, budget, batches):
    """Rows 3, 25 and 26 of 50 are bad, in batches of 16."""
    path = tmp_path / "bad.jsonl"
    with _feed(sharding, Columns(), bad_rows_budget=budget, quarantine=path) as feed:
        delivered = [next(feed) for _ in range(batches)]
        assert path.exists()
        if batches < 3:
            for _ in range(2):  # a second `next` raises, too
                with pytest.raises(
                    RowError, match=rf"Reading\.bad_rows_budget = {budget} allows \d+ bad rows in the"
                ):
                    next(feed)
            listed = [json.loads(line)["row"] for line in path.read_text().splitlines()]
            assert listed == {0: [3], 1: [3, 25, 26]}[batches]
        assert feed.get_state()["step"] == len(delivered) == feed.statistics().batches
        assert feed.statistics().bad_rows == {0: 0, 1: 1, 3: 3}[batches]


def test_a_share_is_of_the_rows_delivered_and_rounded_up(sharding):
    with _feed(sharding, Columns(bad={3, 4, 25}), bad_rows_budget=0.07) as feed:  # 16 rows: 1.12, so 2 may be bad
        next(feed), next(feed)  # 32 rows: 2.24, so 3 may be bad
        assert feed.statistics().bad_rows == 3
    message = r"allows 2 bad rows in the 16 rows .* but 3 are.* damaged \[stage read, row 3, "
    with (
        _feed(sharding, Columns(bad={3, 4, 5}), bad_rows_budget=0.07) as feed,
        pytest.raises(RowError, match=message),
    ):
        next(feed)
    reading = Reading(bad_rows="substitute", bad_rows_budget=0.1)  # 16 + 8 rows: 2.4, so 3 may be bad
    with Feed(
        Columns({3, 4, 17}), [(0, 16), (1, 8)], sharding, order=Order(shuffle=False), reading=reading
    ) as feed:
        next(feed), next(feed)
        assert feed.statistics().bad_rows == 3
    sources = {"few": Columns((), 16), "many": Columns({10, 60, 110}, 160)}  # an epoch has 16 rows of "many"
    mixture = Mixture(sources, {"few": 1, "many": 1}, end="first_exhausted")
    with Feed(mixture, B, sharding, reading=Reading(bad_rows="substitute", bad_rows_budget=0.05)) as feed:
        assert len([None for _ in zip(range(22), feed, strict=False)]) == 22  # enough for all rows of "many"


@pytest.mark.parametrize("size", [B, [(0, B), (9, B // 2)]])
def test_a_row_that_is_bad_in_each_epoch_counts_once(sharding, tmp_path, size):
    path = tmp_path / "bad.jsonl"
    reading = Reading(bad_rows="substitute", bad_rows_budget=2, quarantine=path)
    with Feed(Columns(bad={3, 26}), size, sharding, epochs=8, remainder="wrap", reading=reading) as feed:
        rows = sum(len(batch["row"]) for batch in feed)
        assert rows == 8 * N
        assert feed.statistics().bad_rows == 16  # 2 rows in 8 epochs
    assert sorted(json.loads(line)["row"] for line in path.read_text().splitlines()) == [3, 26]


def test_a_source_without_a_good_row_is_an_error_after_few_reads(sharding):
    source = Columns(bad=range(N))
    reading = Reading(bad_rows="substitute")
    message = r"all 16 that were drawn are bad.* it is damaged \[.*row 0, epoch 0, position 0\]"
    options = {"order": Order(shuffle=False), "reading": reading, "prefetch": 0}
    with Feed(source, B, sharding, **options) as feed, pytest.raises(RowError, match=message) as raised:
        next(feed)
    assert (raised.value.row, raised.value.epoch, raised.value.position) == (0, 0, 0)
    assert len(source.reads) <= 1 + 5 + 16  # the whole batch, ever smaller parts of it, and 16 substitutes


@pytest.mark.parametrize(
    ("fault", "error"), [(StopIteration, RowError), (KeyboardInterrupt,) * 2, (SystemExit,) * 2]
)
def test_an_error_that_no_row_caused_is_not_replaced(sharding, fault, error):
    def fail(i):
        if i == 3:
            raise fault("it is damaged")
        return {"x": np.int32(i)}

    for source in (Columns(error=fault), grain.MapDataset.range(N).map(fail)):
        with _feed(sharding, source, bad_rows_budget=99) as feed:
            with pytest.raises(error, match="it is damaged"):
                next(feed)
            assert feed.statistics().bad_rows == 0


def test_of_two_bad_rows_in_a_batch_the_first_is_raised_whichever_was_read_first(sharding):
    class SlowFirst(Columns):
        def read(self, rows, out):
            if rows[0] < B // 4:
                time.sleep(0.05)
            super().read(rows, out)

    reading = Reading(threads=4, buffer=1)  # four parts a batch
    source = SlowFirst(bad=[1, B - 1])
    with Feed(source, B, sharding, order=Order(shuffle=False), epochs=1, reading=reading) as feed:
        with pytest.raises(RowError) as caught:
            next(feed)
        assert caught.value.row == 1


def test_a_failed_read_of_rows_that_can_each_be_read_is_no_bad_row(sharding):
    class Moody(Columns):
        def read(self, rows, out):
            if len(rows) > 4:
                raise OSError("too many at once")
            super().read(rows, out)

    with _feed(sharding, Moody(bad=()), bad_rows_budget=0) as feed:
        assert np.asarray(next(feed)["row"]).tolist() == list(range(B))
    with (
        _feed(sharding, Moody(bad=()), bad_rows="raise") as feed,
        pytest.raises(RowError, match="too many at once"),
    ):
        next(feed)


def test_the_first_row_must_be_good(sharding):
    class First(Records):
        def __getitem__(self, i):
            return super().__getitem__(3 if i == 0 else i)

    with pytest.raises(RowError, match=r"it is damaged \[stage read, row 0\]"):
        _feed(sharding, First(_damaged))


def test_a_full_disk_under_the_quarantine_is_named_and_the_batch_is_read_again(sharding, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.symlink_to("/dev/full")
    with _feed(sharding, Columns(), bad_rows_budget=99, quarantine=path) as feed:
        for _ in range(2):
            with pytest.raises(OSError, match=r"to the file of Reading.quarantine \(No space left") as caught:
                list(feed)
            assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
            assert feed.statistics().bad_rows == 0
        path.unlink()  # now there is room
        list(feed)
        assert len(path.read_text().splitlines()) == feed.statistics().bad_rows > 0


def test_a_quarantine_that_cannot_be_written_is_refused_at_the_start(sharding, tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        _feed(sharding, Columns(), quarantine=tmp_path / "gone" / "bad.jsonl")


@pytest.mark.slow
def test_workers_report_their_bad_rows(sharding, tmp_path):
    for name, leaf in _too_large().items():
        np.save(tmp_path / f"{name}.npy", leaf)
    source = {name: tmp_path / f"{name}.npy" for name in ("row", "wide")}
    path = tmp_path / "bad.jsonl"
    reading = Reading(workers=1, bad_rows="mask", bad_rows_budget=99, quarantine=path)
    options = {"order": Order(SEED), "epochs": EPOCHS, "remainder": "wrap", "reading": reading}
    with Feed(source, B, sharding, **options) as feed:
        batches = [jax.tree.map(np.asarray, batch) for batch in feed]
        counted = feed.statistics().bad_rows
    wanted = expected("wrap")
    assert [batch["row"].tolist() for batch in batches] == [[row for row, _, _ in batch] for batch in wanted]
    assert [batch["valid"].tolist() for batch in batches] == [[not bad for _, _, bad in batch] for batch in wanted]
    assert counted == sum(bad for batch in wanted for _, _, bad in batch)
    assert sorted(json.loads(line)["row"] for line in path.read_text().splitlines()) == sorted(BAD)


# --- "raise" ---


def test_raise_names_row_epoch_and_position(sharding):
    with Feed(_too_large(), B, sharding, order=Order(SEED), reading=Reading(threads=3)) as feed:
        feed.seek(7)
        with pytest.raises(
            RowError,
            match=rf"JAX holds int64 as int32 .* {TOO_LARGE} does not fit.*\[stage read, row \d+, epoch 7, pos",
        ) as caught:
            list(feed)
    assert rows_at(Order(SEED), N, 7, np.array([caught.value.position])) == [caught.value.row]
    assert caught.value.row in BAD
    again = pickle.loads(pickle.dumps(caught.value))  # as it travels from a worker
    assert (str(again), again.row, again.epoch) == (str(caught.value), caught.value.row, 7)


# --- streams ---


def _stream(at, n=40):
    """A stream of `n` items. `at`: items of another form, or with values that do not fit, by their positions."""
    return grain.MapDataset.range(n).map(lambda i: at.get(i, {"x": np.int64(i)})).to_iter_dataset()


STREAM_BAD = {5: {"x": np.zeros(2, np.int64)}, 17: {"x": np.int64(TOO_LARGE)}, 39: {"y": np.int64(1)}}


@pytest.mark.parametrize("policy", ["substitute", "mask"])
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_the_first_item_of_a_stream_replaces_bad_items(sharding, tmp_path, remainder, policy):
    reading = Reading(bad_rows=policy, bad_rows_budget=99, quarantine=tmp_path / "bad.jsonl")
    options = {"epochs": 2, "remainder": remainder, "reading": reading}
    batches, state = [], None
    for most in (2, 99):  # interrupted and resumed
        with Feed(_stream(STREAM_BAD), B, sharding, **options) as feed:
            feed.set_state(state) if state else None
            batches += [jax.tree.map(np.asarray, batch) for _, batch in zip(range(most), feed, strict=False)]
            state = json.loads(json.dumps(feed.get_state()))
    run = list(range(40))
    cut = {"drop": [run[:16], run[16:32]] * 2, "wrap": [(run * 2)[i : i + 16] for i in range(0, 80, 16)]}
    pad = [run[:16], run[16:32], run[32:] * 2] * 2
    wanted = cut.get(remainder, pad)
    assert [batch["x"].tolist() for batch in batches] == [[0 if i in STREAM_BAD else i for i in b] for b in wanted]
    for k, (batch, items) in enumerate(zip(batches, wanted, strict=True)):
        padded = remainder == "pad" and k % 3 == 2
        valid = [not (i in STREAM_BAD and policy == "mask") and (j < 8 or not padded) for j, i in enumerate(items)]
        assert batch.get("valid", np.ones(B, bool)).tolist() == valid
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    positions = [(line["epoch"], line["position"]) for line in lines]
    assert positions == [(e, p) for e in range(2) for p in STREAM_BAD if p < 32 or remainder != "drop"]
    assert all(line["substitute"] == 0 and line["row"] == line["position"] for line in lines)


def test_an_error_of_a_stream_ends_it_and_is_no_bad_row(sharding):
    def fail(i):
        return {"x": np.int32(i)} if i != 20 else _damaged()

    stream = grain.MapDataset.range(40).map(fail).to_iter_dataset(grain.ReadOptions(0, 0))
    with Feed(stream, B, sharding, reading=Reading(bad_rows="substitute", bad_rows_budget=99)) as feed:
        next(feed)
        with pytest.raises(FeedError, match="lane 0 failed after 20 items of epoch 0 with OSError: it is damaged"):
            next(feed)


def test_a_stream_whose_first_item_does_not_fit_has_no_substitute(sharding):
    stream = _stream({0: {"x": np.int64(TOO_LARGE)}})
    reading = Reading(bad_rows="substitute", bad_rows_budget=99)
    with Feed(stream, B, sharding, reading=reading) as feed, pytest.raises(RowError, match="does not fit"):
        next(feed)


# --- the file ---


def test_the_file_stays_where_it_is_when_the_program_changes_directory(sharding, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with _feed(sharding, Columns(), bad_rows_budget=99, quarantine="bad.jsonl") as feed:
        monkeypatch.chdir("elsewhere")
        next(feed)
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 1
    assert not list((tmp_path / "elsewhere").iterdir())


WRITES = """
import sys
from feedline._src.rows.bad_rows import BadRow
from feedline._src.listen.bad_rows import Quarantine
from feedline._src.options import Reading

reading = Reading(bad_rows="mask", bad_rows_budget=10**9, quarantine=sys.argv[1])
quarantine = Quarantine(reading, int(sys.argv[2]), 1000)
sys.stdin.readline()  # until all are there
for i in range(300):
    quarantine.enter([BadRow(0, 0, i, i, 0, "x" * 3000, None)], own_rows=8)
"""


@pytest.mark.slow
def test_several_processes_append_whole_lines_to_one_file(tmp_path):
    command = [sys.executable, "-c", WRITES, str(tmp_path / "bad.jsonl")]
    with contextlib.ExitStack() as stack:
        each = [programs.started([*command, str(i)], stdin=subprocess.PIPE, text=True) for i in range(3)]
        processes = [stack.enter_context(process) for process in each]
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.close()
        assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert sorted((line["process"], line["row"]) for line in lines) == [
        (p, i) for p in range(3) for i in range(300)
    ]
