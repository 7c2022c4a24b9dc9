"""examples/grafana.json against the table of metrics. It was loaded into no Grafana."""

import json
import re
from pathlib import Path

import pytest

from feedline._src.observe.metrics import METRICS

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana.json").read_text())
PANELS = DASHBOARD["panels"]
NAMES = {metric.name: metric for metric in METRICS}
OF_TARGETS = {"instance", "job"}  # labels that Prometheus adds
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
TARGETS = [
    pytest.param(panel, target, id=f"{panel['title']}, {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


def names_in(expression):
    return re.findall(r"\bfeedline\w*", expression)


def labels_of(names):
    return {"feed", "process", *OF_TARGETS}.union(*([NAMES[name].label] for name in names)) - {""}


def lists(expression, *words):
    """The labels in the parentheses after one of these words."""
    found = re.findall(rf"\b(?:{'|'.join(words)})\s*\(([^)]*)\)", expression)
    return {label.strip() for each in found for label in each.split(",")} - {""}


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_each_metric_and_label_of_an_expression_exists(panel, target):
    names = names_in(target["expr"])
    assert names
    assert {*names} <= NAMES.keys()
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", target["expr"]):
        pairs = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers)
        assert {label for label, _ in pairs} <= labels_of([name])
        assert {value.removeprefix("$") for _, value in pairs} <= VARIABLES.keys()
        assert {label for label, _ in pairs} >= {"feed", "process"}  # the choices above the panels hold for all
    assert lists(target["expr"], "by", "ignoring", "on", "group_left", "without") <= labels_of(names)


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_a_rate_is_of_a_counter_and_a_counter_has_a_rate_or_is_a_sum(panel, target):
    of_rates = re.findall(r"\brate\((\w+)\{[^}]*\}\[\$__rate_interval\]\)", target["expr"])
    assert all(NAMES[name].kind == "counter" for name in of_rates)
    others = [name for name in names_in(target["expr"]) if NAMES[name].kind == "counter"]
    for name in of_rates:
        others.remove(name)
    assert not others or "since the feed was built" in panel["description"]


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_a_legend_names_labels_that_the_result_has(panel, target):
    kept = lists(target["expr"].partition("rate(")[0] or target["expr"], "by") or labels_of(
        names_in(target["expr"])
    )
    assert {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= kept
    assert "{{feed}}" in target["legendFormat"]
    assert target["expr"].count("(") == target["expr"].count(")")


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


def test_ids_and_titles_are_unique_and_panels_do_not_overlap():
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    cells = set()
    for panel in PANELS:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        covered = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & covered
        cells |= covered
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    assert len(cells) == 24 * (1 + max(y for _, y in cells))  # and leave no hole


def test_the_choices_above_the_panels():
    assert [*VARIABLES] == ["datasource", "feed", "process"]
    for name in ("feed", "process"):
        query = VARIABLES[name]["query"]["query"]
        (metric,) = names_in(query)
        assert re.fullmatch(rf"label_values\({metric}(\{{[^}}]*\}})?, {name}\)", query)
        assert name in labels_of([metric])


def test_the_dashboard_shows_what_a_user_asks_first():
    shown = {name for panel in PANELS for target in panel["targets"] for name in names_in(target["expr"])}
    unseen = {*NAMES} - shown
    assert unseen == {
        "feedline_wait_ratio",  # 1 - feedline_au_ratio
        "feedline_slot_seconds_total",
        "feedline_queued_seconds_total",
        "feedline_host_buffers",
        "feedline_source_epochs",  # of mixtures only
        "feedline_store_requests_total",  # of stores only
        "feedline_store_fetched_bytes_total",
        "feedline_store_cached_blocks_total",
        "feedline_store_wait_seconds_total",
    }
