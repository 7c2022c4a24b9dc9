"""Stores in trouble: errors, cuts, delays, wrong answers; and addresses that are refused."""

import asyncio
import dataclasses
import re
import socket
import threading
import time
import types

import numpy as np
import pytest
from background import PATIENCE_S, arrived, spawn
from store_server import etag, serving
from stored import BLOCK, ROWS, npy

import feedline
from feedline._src.files import hedging
from feedline._src.files.client import RemoteObject, client_of, clients
from feedline._src.files.fetcher import Fetcher, InFlight, fetcher
from feedline._src.files.store import Url


@pytest.fixture
def source(store, options):
    """Its address contains "credentials", which must not make errors look like errors of credentials."""
    store.objects["/credentials/x.npy"] = npy(ROWS)
    return feedline.open_source(f"{store.url}/credentials/x.npy", store=options)


def read_all(source):
    out = np.empty((5000, 3000), np.uint8)
    source.read(np.arange(5000), out)
    np.testing.assert_array_equal(out, ROWS)


@pytest.mark.parametrize("fault", [500, 503, 429, "cut", "drop"])
def test_passing_faults_cost_retries_which_are_counted(store, source, fault):
    failed = set()

    def first_time(method, path, part):
        return None if part in failed else failed.add(part) or fault

    store.fault = first_time
    before = fetcher().counts.retries
    read_all(source)
    assert fetcher().counts.retries - before >= len(failed) > 0


def test_a_store_that_is_gone_for_a_while_costs_waiting_and_is_named_in_the_log(
    store, source, monkeypatch, caplog
):
    monkeypatch.setattr("feedline._src.files.client._WARN_AFTER_S", 0.1)
    store.fault = lambda *request: None if caplog.messages else 503
    read_all(source)
    (failing,) = caplog.messages  # one message: at most one a minute is logged
    expected = (
        r"a store has failed for \d+ s, and is asked again until it has failed for 100 s: http.*: 503 Service "
    )
    assert re.match(expected, failing)


def test_one_that_is_gone_for_longer_is_an_error_and_nothing_is_lost(store, tmp_path):
    store.objects["/x.npy"] = npy(ROWS)
    source = feedline.open_source(f"{store.url}/x.npy", store=feedline.Store(cache=tmp_path, patience_s=0.3))
    np.testing.assert_array_equal(source[0], ROWS[0])
    store.fault = lambda *request: 503
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0.3, and .*x.npy failed for .* 503 Service"):
        source[4999]
    np.testing.assert_array_equal(source[1], ROWS[1])  # in the cache
    store.fault = lambda *request: None
    read_all(source)


@pytest.mark.slow
def test_an_answer_that_trickles_is_given_up_and_a_slow_one_is_not(store, options, monkeypatch):
    monkeypatch.setattr("feedline._src.files.client._SHORTEST_S", 4.0)
    store.objects["/x.bin"] = bytes(5 << 20)
    url = Url.parse(f"{store.url}/x.bin")
    version = fetcher().run(client_of(url.base, 0.0).version(url.key)).result()
    store.bytes_s = 1 << 20  # so the answer takes five seconds
    assert len(fetcher().run(RemoteObject(url, version, 0.0).fetch(0, 5 << 20)).result()) == 5 << 20
    store.fault = lambda *request: "trickle"
    monkeypatch.setattr("feedline._src.files.client._SHORTEST_S", 1.0)
    with pytest.raises(feedline.FeedError, match=r"no progress in 1 s"):
        fetcher().run(RemoteObject(url, version, 0.0).fetch(0, 5 << 20)).result()


def test_a_slow_answer_that_is_cut_is_asked_for_again_however_long_it_took(store, monkeypatch):
    clock, tried = types.SimpleNamespace(monotonic=lambda: 300.0 * len(tried)), [None]
    store.objects["/x.bin"] = bytes(10)
    one = client_of(store.url, 5.0)
    monkeypatch.setattr("feedline._src.files.client.time", clock)

    async def cut():
        raise OSError("the connection was cut")

    async def slow():
        await one._asked("x.bin", asyncio.sleep(0))
        tried.append(None)  # five minutes later
        return await one._asked("x.bin", cut() if len(tried) == 2 else asyncio.sleep(0, "bytes"))

    assert fetcher().run(one._patiently("x.bin", slow)).result(PATIENCE_S) == "bytes"
    assert len(tried) == 3


@pytest.mark.slow
def test_a_feed_continues_from_its_state_after_a_store_was_gone_for_too_long(store, tmp_path, sharding):
    """Batches before the outage are delivered, then the error; a new feed continues, and each row comes once."""
    rows = np.repeat(np.arange(24, dtype=np.uint8), BLOCK).reshape(24, -1)  # each row is a block
    store.objects["/x.npy"] = npy(rows)
    options = feedline.Store(cache=tmp_path, cache_bytes=32 * BLOCK, patience_s=0.3)
    reading = feedline.Reading(threads=1, buffer=1)
    found, states, before = [], [], fetcher().counts.retries

    def feed():
        source = feedline.open_source(f"{store.url}/x.npy", store=options)
        return feedline.Feed(source, 8, sharding, epochs=1, reading=reading, prefetch=1)

    def deliver(batches):
        for batch in batches:
            found.append(np.asarray(batch)[:, 0])
            states.append(batches.get_state())

    blocks = set()

    def gone_after_some_blocks(method, path, part):
        if part and part[1] - part[0] >= BLOCK:
            blocks.update(range(part[0] // BLOCK, part[1] // BLOCK))
        return "drop" if len(blocks) > 10 else None

    with feed() as first:
        states.append(first.get_state())
        store.fault = gone_after_some_blocks
        with pytest.raises(
            feedline.FeedError, match=r"within patience_s=0.3, and .*built again from its last state"
        ):
            deliver(first)
    assert fetcher().counts.retries > before
    store.fault = lambda *request: None
    with feed() as second:
        second.set_state(states[-1])
        deliver(second)
    assert sorted(np.concatenate(found).tolist()) == list(range(24))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (403, r"must let this process read it, and .*x.npy failed with 403 Forbidden; check the address"),
        (401, "401 Unauthorized"),
        (400, "must answer requests, and .* 400 Bad Request"),
        (301, r"must be asked in its own region \(AWS_REGION\)"),
        (404, "it no longer exists"),
        ("html", "ranges of bytes, and .* failed with an answer that is not a range, such as a sign-in page"),
    ],
)
def test_lasting_faults_are_errors_at_once_and_no_bad_rows(store, source, fault, message):
    store.fault = lambda *request: fault
    began = time.monotonic()
    with pytest.raises(feedline.FeedError, match=message) as caught:
        source[0]
    assert not isinstance(caught.value, feedline.RowError)
    assert caught.value.file == f"{store.url}/credentials/x.npy"
    assert time.monotonic() - began < 30  # retries would take longer


@pytest.mark.parametrize(
    ("host", "cause"),  # a name has at most 63 letters, so no server is asked for "s" * 64
    [("127.0.0.1:{port}", "connection refused"), ("s" * 64, "the name of the host does not resolve")],
)
def test_a_store_that_cannot_be_reached_is_told_long_before_the_patience_ends(host, cause, tmp_path, monkeypatch):
    monkeypatch.setattr("feedline._src.files.client._UNREACHABLE_S", 0.3)
    with socket.socket() as unused:  # takes the port; without `listen`, connections are refused
        unused.bind(("127.0.0.1", 0))
        url = f"http://{host.format(port=unused.getsockname()[1])}/x.npy"
        expected = rf"must be reachable when it is opened, and {url} failed for \d+ s, last with: {cause}; check"
        with pytest.raises(feedline.FeedError, match=expected):
            feedline.open_source(url, store=feedline.Store(cache=tmp_path, patience_s=600))


def test_a_server_that_answered_once_may_be_away_for_as_long_as_the_patience(options, monkeypatch):
    monkeypatch.setattr("feedline._src.files.client._UNREACHABLE_S", 0.1)
    with socket.socket() as held:  # keeps the port; without `listen`, connections are refused
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with serving({"/x.npy": npy(ROWS)}, port) as store:
            source = feedline.open_source(f"{store.url}/x.npy", store=options)
            store.fault = lambda *request: "drop"  # this ends the open connections
        before = fetcher().counts.retries
        reading = spawn(lambda: read_all(source))
        while fetcher().counts.retries < before + 16:  # 4 retries of 4 requests: longer than 0.1 s
            assert not reading.done()
            time.sleep(0.01)
        with serving({"/x.npy": npy(ROWS)}, port):
            reading.result(2 * PATIENCE_S)


def test_a_replaced_object_is_an_error(store, source):
    np.testing.assert_array_equal(source[0], ROWS[0])
    before = etag(store.objects["/credentials/x.npy"]).strip('"')
    store.objects["/credentials/x.npy"] = npy(ROWS[::-1])
    np.testing.assert_array_equal(source[1], ROWS[1])  # of the old version, whose block is in the cache
    with pytest.raises(feedline.FeedError, match=rf"not change .* its ETag changed from {before} to .* since"):
        source[4999]
    store.objects["/credentials/x.npy"] = npy(ROWS[:10])
    with pytest.raises(feedline.FeedError, match=r"its size changed from 15000128 to 30128 bytes since"):
        source[4998]


def test_a_late_answer_is_asked_for_a_second_time(store, source, monkeypatch):
    file, slow = source._opened[0], []
    for row in range(0, 5000, 40):  # enough small requests to know the usual time of one
        file.samples([(row * 3000, 99)])
    monkeypatch.setattr(hedging, "_SHARE", 0.1)

    def first_is_late(method, path, part):
        return None if slow else slow.append(part) or 60.0

    store.fault = first_is_late
    before, began = fetcher().counts.hedged, time.monotonic()
    assert file.samples([(777, 99)]) == [store.objects["/credentials/x.npy"][777:876]]
    assert time.monotonic() - began < 30
    assert fetcher().counts.hedged == before + 1
    assert store.gets().count((777, 876)) == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/../x.npy", "must not have empty parts, '.' or '..', got s3://bucket/../x.npy"),
        ("gs:///x.npy", "must not have empty parts"),
        ("https://host/*.npy", "a web server does not list its files"),
        ("https://me:secret@host/x.npy", "no user, password, query or fragment"),
        ("https://host/x.npy?X-Amz-Signature=secret", "no user, password, query or fragment"),
    ],
)
def test_addresses_that_are_refused(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        feedline.open_source(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "error", "match"),
    [
        (None, FileNotFoundError, r"there is no object .*/no\.npy; check the address"),
        ("html", feedline.FeedError, r"must answer with data, and .*no\.npy failed with a web page"),
        (405, feedline.FeedError, r"must answer HEAD requests, .*/no\.npy failed with 405 Method"),
    ],
)
def test_answers_that_are_no_object_are_told_apart(store, options, fault, error, match):
    store.fault = lambda method, *request: fault
    with pytest.raises(error, match=match):
        feedline.open_source(f"{store.url}/no.npy", store=options)


def test_an_environment_that_was_corrected_is_read_again(bucket, options, monkeypatch):
    bucket.objects["/b/x.npy"] = npy(ROWS)
    options = dataclasses.replace(options, patience_s=0.2)
    for wrong in ("AWS_ENDPOINT_URL", "AWS_SKIP_SIGNATURE"):
        with monkeypatch.context() as patch:
            patch.setenv(wrong, "http://127.0.0.1:9" if wrong == "AWS_ENDPOINT_URL" else "false")
            with pytest.raises(feedline.FeedError, match="AWS_ENDPOINT_URL"):
                feedline.open_source("s3://b/x.npy", store=options)
        assert len(feedline.open_source("s3://b/x.npy", store=options)) == len(ROWS)
        clients.clear()


def test_failures_replace_their_own_client_once_and_leave_others_as_they_are(store, options):
    store.objects["/x.npy"] = npy(ROWS)
    other, failing = client_of(store.url, 3600.0), client_of(store.url, options.patience_s)
    store.fault = lambda *request: 403
    for _ in range(2):
        with pytest.raises(feedline.FeedError, match="403 Forbidden"):
            fetcher().run(failing.version("x.npy")).result()
        found = client_of(store.url, options.patience_s)
        assert client_of(store.url, 3600.0) is other
        assert found is not failing
    assert client_of(store.url, options.patience_s) is found


def test_after_a_failure_a_store_that_had_answered_may_again_be_away_for_as_long_as_the_patience(store):
    store.objects["/x.npy"] = npy(ROWS)
    client = client_of(store.url, 0.2)
    fetcher().run(client.version("x.npy")).result()
    store.fault = lambda *request: 503
    with pytest.raises(feedline.FeedError, match="503 Service"):
        fetcher().run(client.version("x.npy")).result()
    assert client_of(store.url, 0.2) is client


def test_a_request_that_has_ended_is_not_taken_for_one_in_flight(monkeypatch):
    """Otherwise, if its file was deleted since, a reader would look for the file in vain again and again."""
    begun, go_on, usual, requests = threading.Event(), threading.Event(), InFlight._done, InFlight()

    async def fetched():
        await asyncio.to_thread(arrived, begun)

    def start():
        return requests.start([0], lambda keys: [(keys, fetched())])[0]

    monkeypatch.setattr(InFlight, "_done", lambda *arguments: (arrived(go_on), usual(*arguments)))
    first = start()
    begun.set()
    first.result(PATIENCE_S)
    second = start()
    go_on.set()
    assert second is not first
    second.result(PATIENCE_S)


def test_a_thread_that_cannot_be_started_is_an_error_and_the_next_request_starts_it(monkeypatch):
    async def answer():
        return 5

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    tried, made = Fetcher(), asyncio.new_event_loop()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", lambda: made)
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            tried.run(answer())
    made.close()
    assert tried.run(answer()).result(PATIENCE_S) == 5
    tried.close()
    assert tried.join(PATIENCE_S) is None


def test_a_cache_that_is_too_small_for_a_block_is_an_error_that_says_so(store, tmp_path):
    store.objects["/x.npy"] = npy(ROWS)
    source = feedline.open_source(f"{store.url}/x.npy", store=feedline.Store(cache=tmp_path, cache_bytes=BLOCK))
    with pytest.raises(feedline.FeedError, match="changed or evicted 100 times; raise cache_bytes"):
        source[0]


@pytest.mark.parametrize(
    "arguments", [{"cache": 3}, {"cache_bytes": 0}, {"patience_s": -1}, {"patience_s": float("nan")}]
)
def test_options_are_checked(arguments):
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        feedline.Store(**arguments)


def test_a_cache_that_cannot_be_written_is_an_error(store, tmp_path):
    store.objects["/x.npy"] = npy(ROWS)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(feedline.FeedError, match=r"kept in a cache on local disk, and .*set FEEDLINE_CACHE"):
        feedline.open_source(f"{store.url}/x.npy", store=feedline.Store(cache=tmp_path / "file"))
