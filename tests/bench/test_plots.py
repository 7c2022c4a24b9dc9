"""The pictures of saved results: words that can be read, one unit on an axis, bars with their spread."""

import itertools
import json
from pathlib import Path

import plot
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def saved(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["peers_fastest", "peers", "modes", "scale", "feed", "one_curve"])
def test_no_words_overlap_or_leave_the_picture(name):
    figure = plot.drawn(saved(name))
    FigureCanvasAgg(figure).draw()
    boxes, beyond = {}, _beyond(figure)
    for text in figure.findobj(Text):
        box = text.get_window_extent()
        if text.get_visible() and text.get_text().strip() and box.width and text not in beyond:
            assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text.get_text()
            assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text.get_text()
            boxes[text] = box.padded(-1)
    for (one, box), (other, beside) in itertools.combinations(boxes.items(), 2):
        assert not box.overlaps(beside), (one.get_text(), other.get_text())
    assert figure.get_size_inches()[0] == 9  # at GitHub's width, a point is a point
    assert min(text.get_fontsize() for text in boxes) >= 7


def _beyond(figure):
    """The labels of ticks beyond the ends of their axis, which are not drawn."""
    found = set()
    for axes in figure.axes:
        for axis, side, (low, high) in (
            (axes.xaxis, 0, axes.bbox.intervalx),
            (axes.yaxis, 1, axes.bbox.intervaly),
        ):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                at = axes.transData.transform([(tick.get_loc(),) * 2])[0][side]
                if not low - 1 <= at <= high + 1:
                    found |= {tick.label1, tick.label2}
    return found


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
