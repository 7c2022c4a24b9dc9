"""Encoded records as rows: what a decoder gets, what it must do, and which rows come where."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline import Feed, Order, Reading, RowError, decoded
from feedline._src.order.epoch import keys_at

ROWS = 37
SPEC = {
    "text": jax.ShapeDtypeStruct((8,), np.uint8),
    "length": jax.ShapeDtypeStruct((), np.int64),
    "key": jax.ShapeDtypeStruct((), np.uint32),
    "place": jax.ShapeDtypeStruct((3,), np.int32),
}


def decode(record, out, row):
    if record == b"broken":
        raise OSError("cannot be decoded")
    out["text"][: len(record)] = np.frombuffer(record, np.uint8)
    out["text"][len(record) :] = 0
    out["length"][...] = len(record)
    out["key"][...] = row.key & 0xFFFFFFFF
    out["place"][...] = row.index, row.epoch, row.position


def content(row):
    return f"{row:02d}".encode() * (row % 4)


@pytest.fixture
def folder(tmp_path):
    for row in range(ROWS):
        (tmp_path / f"{row:02d}").write_bytes(content(row))
    return tmp_path


def expected(order, epoch, positions):
    """Each leaf of the rows at these positions, one by one, from the order alone."""
    rows = [feedline._src.order.epoch.rows_at(order, ROWS, epoch, np.array([p]))[0] for p in positions]
    text = np.stack([np.frombuffer(content(row).ljust(8, b"\0"), np.uint8) for row in rows])
    keys = keys_at(order.seed, epoch, np.array(positions)).astype(np.uint32)
    place = np.array([[row, epoch, p] for row, p in zip(rows, positions, strict=True)])
    return {"text": text, "length": np.array([2 * (row % 4) for row in rows]), "key": keys, "place": place}


def assert_same(batch, wanted):
    for name, values in wanted.items():
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


SHARDINGS = {
    "rows": P("data"),
    "replicated": P(),
    "a leaf each": {"text": P("data", "model"), "length": P(), "key": P("data"), "place": P(("data", "model"))},
}


@pytest.mark.parametrize(("name", "threads"), [("rows", 1), ("replicated", 3), ("a leaf each", 3)])
def test_batches_are_those_of_the_order(folder, name, threads):
    spec, reading = SHARDINGS[name], Reading(threads=threads, buffer=1)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    sharding = jax.tree.map(lambda p: NamedSharding(mesh, p), spec, is_leaf=lambda p: isinstance(p, P))
    order = Order(seed=5)
    with Feed(decoded(folder, decode, SPEC), 8, sharding, order=order, epochs=2, reading=reading) as feed:
        batches = list(feed)
    assert len(batches) == 2 * (ROWS // 8)
    for k, batch in enumerate(batches):
        epoch, first = divmod(k, ROWS // 8)
        assert_same(batch, expected(order, epoch, range(8 * first, 8 * first + 8)))


@pytest.mark.slow
def test_workers_deliver_the_same(folder):
    source, device = decoded(folder, decode, SPEC), jax.devices()[0]
    with Feed(source, 8, device, epochs=1, reading=Reading(workers=2)) as feed:
        assert_same(jax.device_get(next(feed)), expected(Order(), 0, range(8)))


def test_a_resumed_feed_gives_the_same_keys(folder):
    device, source = jax.devices()[0], decoded(folder, decode, SPEC)
    with Feed(source, 5, device, epochs=3) as feed:
        whole = [jax.device_get(batch) for batch in feed]
    with Feed(source, 5, device, epochs=3) as feed:
        for _ in range(9):
            next(feed)
        state = feed.get_state()
    with Feed(decoded(folder, decode, SPEC), 5, device, epochs=3) as feed:
        feed.set_state(state)
        for batch, before in zip(feed, whole[9:], strict=True):
            assert_same(batch, before)


def test_a_bad_row_is_named_or_replaced(folder):
    (folder / "03").write_bytes(b"broken")
    source, device = decoded(folder, decode, SPEC), jax.devices()[0]
    with (
        Feed(source, 4, device, order=Order(shuffle=False)) as feed,
        pytest.raises(RowError, match="decode failed on this record with OSError: cannot be decoded") as error,
    ):
        next(feed)
    assert (error.value.row, error.value.position, error.value.file) == (3, 3, str(folder / "03"))
    with Feed(source, 4, device, order=Order(shuffle=False), reading=Reading(bad_rows="substitute")) as feed:
        batch = next(feed)
        assert feed.statistics().bad_rows == 1
    assert batch["place"][:3, 0].tolist() == [0, 1, 2]
    index, epoch, position = batch["place"][3].tolist()
    assert index != 3
    assert (epoch, position) == (0, 3)  # another row, at the same position, with the position's key
    assert batch["key"][3] == keys_at(0, 0, np.array([3]))[0] & 0xFFFFFFFF


def forgets(record, out, row):
    out["text"][: len(record)] = np.frombuffer(record, np.uint8)


def random(record, out, row):
    out["text"][...] = np.random.default_rng().integers(256, size=8)


@pytest.mark.parametrize(
    ("decoder", "error", "message"),
    [
        (forgets, ValueError, r"it leaves a part unwritten, in batch\['text'\]; fill the rest with zeros"),
        (random, ValueError, "it wrote other values when it was called again, in"),
        (lambda record, out, row: out, RowError, "decode writes its row into out, and must not return a dict"),
        (lambda record, out, row: next(iter(())), RowError, "with StopIteration"),
        (lambda record, out, row: out["x"], RowError, "with KeyError: 'x'"),
        (lambda record, out, row: out["text"].fill(300), RowError, "with OverflowError"),
    ],
)  # fmt: skip
def test_a_wrong_decoder_is_found_before_training(folder, decoder, error, message):
    with pytest.raises(error, match=message):
        decoded(folder, decoder, {"text": SPEC["text"]})


@pytest.mark.parametrize("source", [{"x": np.zeros(3)}, [b"a", b"b"], 7])
def test_what_has_no_records_is_refused(source):
    with pytest.raises(TypeError, match="decoded needs encoded records, got"):
        decoded(source, decode, SPEC)
