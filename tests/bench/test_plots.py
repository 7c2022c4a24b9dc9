"""The pictures of saved results: each can be drawn, its words can be read, and its bars are linear."""

import json
from pathlib import Path

import plot
import pytest

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def saved(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["peers_fastest", "scale", "one_curve"])
def test_each_saved_result_can_be_drawn(name):
    assert plot.drawn(saved(name)).axes


def test_each_library_has_one_linear_bar_in_rows_a_second_that_can_be_read():
    figure = plot.drawn(saved("peers"))
    words = [text.get_text() for chart in figure.axes for text in chart.texts]
    assert "3.69 k: feedline 9,545 ×" in words  # and not "0.00369 M"
    assert "20.4 M: feedline 1.9 ×" in words
    assert not [word for word in words if word.startswith("0.")]
    for chart in figure.axes:
        assert chart.get_xscale() == "linear"
        assert [bar.get_width() for bar in chart.patches].count(0) == 0
    libraries = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(libraries) == len(set(libraries)) == len(figure.axes[1].patches)
