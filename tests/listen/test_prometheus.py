"""Metrics over HTTP, read by the parsers of prometheus_client: values, labels, life cycle, ports in use."""

import socketserver
import threading
import urllib.error
import urllib.request
import weakref

import jax
import numpy as np
import pytest
from background import is_collected
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed

import feedline
from feedline._src.listen.prometheus import FeedCollector, serve
from feedline._src.listen.statistics import METRICS, samples


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A server notices `close` within 0.01 s, instead of the default 0.5 s."""
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.01,))


@pytest.fixture
def feed(sharding):
    with feedline.Feed({"x": np.zeros((640, 2), np.float32)}, 64, sharding) as feed:
        for _, _ in zip(range(20), feed, strict=False):
            pass
        yield feed


def scraped(server, accept="text/plain"):
    request = urllib.request.Request(server.url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def values(text, **labels):
    """{(name, value of a third label): value} of the samples with these labels."""
    found = {}
    for family in parsed(text):
        for sample in family.samples:
            own = {name: value for name, value in sample.labels.items() if name not in ("feed", "process")}
            if labels.items() <= sample.labels.items():
                assert len(own) <= 1
                found[sample.name, next(iter(own.values()), "")] = sample.value
    return found


def test_a_scrape_has_the_values_of_the_statistics_and_the_report(feed):
    with serve(feed, port=0) as server:
        feed.close()  # so that no thread goes on counting
        text = scraped(server)
    expected = {(m.name, label): value for m, label, value in samples(feed.statistics(), feed.report())}
    found = values(text, feed="train", process="0")
    held = "feedline_host_bytes", ""  # a glance at the devices may hold the latest batches a little longer
    assert expected.pop(held) <= found[held]
    assert {key: value for key, value in found.items() if key != held} == pytest.approx(expected)
    assert found == values(text)
    assert found["feedline_rows_total", ""] == 20 * 64


def test_names_kinds_units_and_help_are_those_of_the_table(feed):
    with serve(feed, port=0) as server:
        families = {family.name: family for family in parsed(scraped(server))}
        strict = {
            family.name: family
            for family in openmetrics.text_string_to_metric_families(
                scraped(server, "application/openmetrics-text; version=1.0.0")
            )
        }
    assert len(families) == len(strict) == len(METRICS)
    for metric in METRICS:
        short = metric.name.removesuffix("_total")
        for family in (families[short], strict[short]):
            assert (family.type, family.documentation) == (metric.kind, metric.help)
            if metric.label != "source" and "_store_" not in metric.name:  # no mixture or store here
                assert {*family.samples[0].labels} == {"feed", "process"} | ({metric.label} - {""})
        assert strict[short].unit == metric.unit


def test_several_feeds_have_labels_of_their_own(feed, sharding):
    with feedline.Feed({"x": np.zeros((640, 2))}, 32, sharding) as fresh:
        with serve({"train": feed, 'a "b"\\\n': fresh}, port=0) as server:
            text = scraped(server)
        assert values(text, feed="train")["feedline_rows_total", ""] == 1280
        found = values(text, feed='a "b"\\\n')
        assert found["feedline_rows_total", ""] == 0  # before the first batch there is no verdict
        assert not any(name in ("feedline_bound", "feedline_au_ratio") for name, _ in found)
        next(fresh)


class Watched:
    """Statistics that note which threads ask for them."""

    def __init__(self, feed):
        self.feed, self.asked = feed, []

    def statistics(self):
        self.asked.append(threading.current_thread())
        return self.feed.statistics()


def test_a_server_asks_when_it_is_asked_and_holds_no_feed_and_ends(feed):
    watched = Watched(feed)
    server = serve(watched, port=0)
    assert watched.asked == []
    feed.close()  # a closed feed is still served
    assert values(scraped(server))["feedline_batches_total", ""] == 20
    assert [thread is threading.current_thread() for thread in watched.asked] == [False]
    gone = weakref.ref(watched)
    del watched
    assert is_collected(gone)
    assert values(scraped(server)) == {}
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        scraped(server)
    assert not any("serve_forever" in thread.name for thread in threading.enumerate())


def test_a_port_in_use_is_an_error_with_a_fix_and_training_goes_on(feed):
    with serve(feed, port=0) as server:
        with pytest.raises(
            OSError,
            match=rf"metrics need an address of this machine and a port that no program listens on, but "
            rf"127.0.0.1:{server.port} cannot be used: Address already in use; give another port, or port=0 for a",
        ) as found:
            serve(feed, port=server.port)
        assert found.value.errno is not None
        next(feed)
        assert values(scraped(server))["feedline_batches_total", ""] == 21
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(OSError, match=rf"metrics need an address of this machine.* {host}:0 cannot be used: "):
            serve(feed, port=0, host=host)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"port": 65536}, ValueError, "port must be at most 65535, got 65536"),
        ({"port": "9464"}, TypeError, "port must be an integer"),
        ({"feeds": {1: None}}, ValueError, "feeds must be a feed, or feeds by name, such as"),
        ({"feeds": [1, 2]}, TypeError, r"feed must have a method statistics\(\), .* got \[1, 2\]; give the feed"),
    ],
)
def test_refused_arguments(feed, arguments, error, message):
    with pytest.raises(error, match=message):
        serve(**{"feeds": feed, "port": 0, **arguments})


def test_a_registry_of_ones_own_has_the_index_of_the_process(feed, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    registry = CollectorRegistry(auto_describe=True)
    registry.register(FeedCollector({"mine": feed}))
    found = values(generate_latest(registry).decode(), feed="mine", process="3")
    assert found["feedline_rows_total", ""] == 1280
    with pytest.raises(ValueError, match="Duplicated timeseries"):  # one collector serves all feeds
        registry.register(FeedCollector({"other": feed}))
