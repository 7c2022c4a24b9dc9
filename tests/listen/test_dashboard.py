"""examples/grafana.json against the table of metrics. It was loaded into no Grafana."""

import json
import re
from pathlib import Path

import pytest

from feedline._src.listen.metrics import METRICS

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
NAMES = {metric.name: metric for metric in METRICS}
OF_TARGETS = {"instance", "job"}  # labels that Prometheus adds
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}


def names_in(expression):
    return re.findall(r"\bfeedline\w*", expression)


def labels_of(names):
    return {"feed", "process", *OF_TARGETS}.union(*([NAMES[name].label] for name in names)) - {""}


def lists(expression, *words):
    """The labels in the parentheses after one of these words."""
    found = re.findall(rf"\b(?:{'|'.join(words)})\s*\(([^)]*)\)", expression)
    return {label.strip() for each in found for label in each.split(",")} - {""}


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_the_expressions_of_a_panel_fit_the_metrics(panel):
    """Metrics and labels exist; a rate is of a counter; a legend names labels that the result has."""
    for target in panel["targets"]:
        expression = target["expr"]
        names = names_in(expression)
        assert names
        assert {*names} <= NAMES.keys()
        assert expression.count("(") == expression.count(")")
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
            pairs = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers)
            assert {"feed", "process"} <= {label for label, _ in pairs} <= labels_of([name])
            assert {value.removeprefix("$") for _, value in pairs} <= VARIABLES.keys()
        assert lists(expression, "by", "ignoring", "on", "group_left", "without") <= labels_of(names)
        counters = [name for name in names if NAMES[name].kind == "counter"]
        for name in re.findall(r"\brate\((\w+)\{[^}]*\}\[\$__rate_interval\]\)", expression):
            counters.remove(name)
        assert not counters or "since the feed was built" in panel["description"]
        kept = lists(expression.partition("rate(")[0] or expression, "by") or labels_of(names)
        assert {"feed"} <= {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= kept


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_each_panel_explains_itself(panel):
    assert panel["title"][0].isupper()
    assert panel["description"].endswith(".")
    unit = panel["fieldConfig"]["defaults"]["unit"]
    units = {NAMES[name].unit for target in panel["targets"] for name in names_in(target["expr"])}
    divided = any("/" in target["expr"] for target in panel["targets"])
    rated = any("rate(" in target["expr"] for target in panel["targets"])
    if units == {"bytes"}:
        assert unit == ("Bps" if rated else "decbytes")
    elif units == {"ratio"}:
        assert unit in ("percentunit", "suffix: ×")
    elif units == {"seconds"}:
        assert unit == ("percentunit" if divided else "suffix: cores" if rated else "s")
    elif "seconds" in units:
        assert unit == "s"  # a batch
    else:
        assert unit == ("rowsps" if rated else "none" if panel["type"] == "state-timeline" else "short")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_the_dashboard_shows_what_a_user_asks_first():
    shown = {name for panel in PANELS for target in panel["targets"] for name in names_in(target["expr"])}
    unseen = {*NAMES} - shown
    assert unseen == {
        "feedline_host_buffers",
        "feedline_source_epochs",  # of mixtures only
        "feedline_store_requests_total",  # of stores only
        "feedline_store_fetched_bytes_total",
        "feedline_store_cached_blocks_total",
        "feedline_store_wait_seconds_total",
    }
