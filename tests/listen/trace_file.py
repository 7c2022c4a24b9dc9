"""Checks a trace file against its format alone, and builds feeds to trace."""

import collections
import gzip
import itertools
import json

import jax
import numpy as np

import feedline

ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])
STAGES = ("read", "transform", "stage", "place")
Span = collections.namedtuple("Span", "track name began ended args")


class Trace:
    """A trace file, checked against the rules of the trace event format. Times in microseconds."""

    def __init__(self, path):
        read = gzip.open if str(path).endswith(".gz") else open
        with read(path, "rt") as file:
            self.file = json.load(file)
        self.events = self.file["traceEvents"]
        for event in self.events:
            assert event["ph"] in "XsfbeCiM", event
            assert isinstance(event["name"], str), event
            assert {type(event["pid"]), type(event["tid"])} == {int}, event
            assert event["ph"] == "M" or event["ts"] >= 0, event
        named = self.of("M", "thread_name")
        self.tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in named}
        assert len(self.tracks) == len(named)
        (self.process,) = (event["args"]["name"] for event in self.of("M", "process_name"))
        self.spans = [
            Span(self.tracks[x["pid"], x["tid"]], x["name"], x["ts"], x["ts"] + x["dur"], x["args"])
            for x in self.of("X")
        ]
        assert all(span.ended >= span.began for span in self.spans)
        self.check_no_overlap()
        self.flows = self.paired("s", "f", "id")
        self.apart = self.paired("b", "e", "id2")
        assert all(end["bp"] == "e" for _, end in self.flows)

    def of(self, phases, name=None):
        return [event for event in self.events if event["ph"] in phases and name in (None, event["name"])]

    def check_no_overlap(self):
        for track in self.tracks.values():
            ordered = sorted((span for span in self.spans if span.track == track), key=lambda span: span.began)
            for span, following in itertools.pairwise(ordered):
                assert span.ended <= following.began + 0.0015, (span, following)

    def paired(self, begin, end, key):
        """Pairs of an event that begins something and the event that ends it, which is not earlier."""
        begins = {json.dumps(event[key]): event for event in self.of(begin)}
        ends = {json.dumps(event[key]): event for event in self.of(end)}
        assert len(begins) == len(self.of(begin))
        assert begins.keys() == ends.keys()
        for i, event in begins.items():
            assert event["ts"] <= ends[i]["ts"]
            assert event["name"] == ends[i]["name"]
            assert key != "id" or isinstance(event["id"], int)  # Perfetto ignores flows with other ids
        return [(begins[i], ends[i]) for i in begins]

    def named(self, name):
        return [span for span in self.spans if span.name == name]

    def seconds(self, name):
        return sum(span.ended - span.began for span in self.named(name)) / 1e6

    def at(self, event):
        """The span that contains an event, on the event's own track."""
        track = self.tracks[event["pid"], event["tid"]]
        (span,) = (s for s in self.spans if s.track == track and s.began <= event["ts"] <= s.ended)
        return span

    def chains(self):
        """All ways along the arrows, from spans that no arrow leads to: each is [(name, step) of a span, ...]."""
        arrows = collections.defaultdict(list)
        for begin, end in self.flows:
            arrows[self.key(self.at(begin))].append(self.at(end))
        led_to = {self.key(span) for spans in arrows.values() for span in spans}

        def ways(span):
            following = arrows[self.key(span)]
            return [[span, *way] for each in following for way in ways(each)] if following else [[span]]

        starts = [self.at(begin) for begin, _ in self.flows if self.key(self.at(begin)) not in led_to]
        return [[(s.name, s.args["step"]) for s in way] for start in starts for way in ways(start)]

    @staticmethod
    def key(span):
        return span.track, span.name, span.began


def transform(batch, rows):
    return {"x": batch["x"] + 1}


def stream_of(count):
    import grain

    rows = [{"x": np.full(4, i, np.float32)} for i in range(count)]
    return grain.MapDataset.source(rows).to_iter_dataset(grain.ReadOptions(0, 0))


def feed_of(kind, tmp_path):
    """A feed with batches of 64 rows, 10 in a pass."""
    np.save(tmp_path / "x.npy", np.zeros((640, 4), np.float32))
    more = {
        "one thread": {"reading": feedline.Reading(threads=1)},
        "threads share a batch": {"reading": feedline.Reading(threads=4, buffer=2), "transform": transform},
        "a transform": {"transform": transform},
        "a worker": {"reading": feedline.Reading(workers=1)},
        "a stream": {"transform": transform},
        "prefetch 0": {"prefetch": 0, "transform": transform},
        "several steps a call": {"steps_per_call": 2, "reading": feedline.Reading(threads=3)},
        "padded": {"remainder": "pad"},
    }[kind]
    source = stream_of(640) if kind == "a stream" else {"x": tmp_path / "x.npy"}
    return feedline.Feed(source, 64, ONE, **{"epochs": 1, **more})
