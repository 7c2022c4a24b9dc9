"""A report as a picture, as a page, and in a notebook."""

import dataclasses
import os
import re
import shutil
from xml.etree import ElementTree

import numpy as np
import programs
import pytest
from PIL import Image
from planted import judged, window

from feedline._src.listen.page import COLORS
from feedline._src.listen.report import BOUNDS, Straggler

READ = judged(window(read=0.0203, place=0.00217, wait=0.00516, loop=0.0052, cpu=0.000456))
COMPUTE = judged(window(read=0.0022, place=0.0001, wait=0.00005, loop=0.0052))
SLOW = Straggler(3, "read", 0.0243, 0.0081)
REPORTS = {
    "read": READ,
    "host": judged(window(host=0.0203, wait=0.00516, loop=0.0052)),
    "compute": COMPUTE,
    "reading elsewhere": dataclasses.replace(COMPUTE, bound="read"),
    "machine": judged(window(read=0.0022, wait=0.0005, loop=0.0052)),
    "loop": dataclasses.replace(COMPUTE, bound="loop", idle_s=0.0039, au=0.24),
    "place": dataclasses.replace(READ, bound="place", headroom={**READ.headroom, "place": 0.2}, change=None),
    "transfer": dataclasses.replace(READ, bound="place", late_s=0.004, headroom={**READ.headroom, "place": 0.23}),
    "straggler here": dataclasses.replace(READ, bound="straggler", straggler=SLOW, process=3),
    "straggler elsewhere": dataclasses.replace(COMPUTE, bound="straggler", straggler=SLOW),
}
NASTY = "<b>&amp;</b> \"x\" 'y' </p><script>alert(1)</script> $a_b$ " + "x" * 300
SVG = "{http://www.w3.org/2000/svg}"


class Picture:
    """The texts of a picture, and its bars: {name: {kind of part: width in pixels}}."""

    def __init__(self, report, path):
        report.save(path)
        root = ElementTree.fromstring(path.read_text())
        self.tags = {each.tag.removeprefix(SVG) for each in root.iter()}
        self.texts, self.bars = [], {}
        for each in root:
            if each.tag == f"{SVG}text":
                self.texts.append(each.text.strip())
            elif each.tag == f"{SVG}g":
                kind, shape = each
                self.bars.setdefault(self.texts[-1], {})[kind.text] = float(shape.get("width"))
        self.text = " ".join(self.texts)


LOOP, IDLE, LATE, WAIT, LIMITS, OTHER = COLORS


@pytest.mark.parametrize("name", REPORTS)
def test_a_picture_shows_the_whole_report(name, tmp_path):
    report, picture = REPORTS[name], Picture(REPORTS[name], tmp_path / "r.svg")
    assert picture.text.casefold().startswith(report.verdict.casefold())
    assert f"Advice: {report.advice}" in picture.text
    for line in str(report).splitlines()[1:-1]:
        assert line.split() == [] or " ".join(line.split()) in " ".join(picture.text.split())
    assert f"process {report.process}: threads 2, workers 0, buffer 2, prefetch" in picture.text
    assert ("predicted" in picture.bars) == (report.change is not None)


def test_bars_are_as_long_as_their_times(tmp_path):
    bars = Picture(READ, tmp_path / "r.svg").bars
    assert bars["one step"][WAIT] / bars["one step"][LOOP] == pytest.approx(5.16 / 5.2, abs=0.01)
    assert bars["predicted"][LOOP] == pytest.approx(bars["one step"][LOOP], abs=0.01)
    assert bars["one step"][LOOP] / bars["reading"][LIMITS] == pytest.approx(5.2 / 10.15, abs=0.01)
    assert bars["one step"][LOOP] / bars["placing"][OTHER] == pytest.approx(5.2 / 1.085, abs=0.01)
    for name, kind, share in (("loop", IDLE, 39 / 52), ("transfer", LATE, 4 / 5.2)):
        parts = Picture(REPORTS[name], tmp_path / "r.svg").bars["one step"]
        assert parts[kind] / (parts[LOOP] + parts[kind]) == pytest.approx(share, abs=0.01)
    endless = dataclasses.replace(READ, late_s=1.0, headroom=dict.fromkeys(READ.headroom, 1e-07))
    assert all(w >= 0 for bar in Picture(endless, tmp_path / "r.svg").bars.values() for w in bar.values())


def test_the_stage_that_limits_training_is_marked_for_each_bound(tmp_path):
    assert {report.bound for report in REPORTS.values()} == BOUNDS.keys()
    bars = {name: Picture(report, tmp_path / "r.svg").bars for name, report in REPORTS.items()}
    marked = {name: bar for name in bars for bar, parts in bars[name].items() if LIMITS in parts}
    stages = {"read": "reading", "host": "host work", "place": "placing", "transfer": "placing"}
    assert marked == stages | {"straggler here": "reading"}


def test_a_page_and_a_notebook_show_the_picture_and_load_nothing(tmp_path):
    report = dataclasses.replace(READ, advice=NASTY)
    picture = Picture(report, tmp_path / "r.svg")
    assert re.sub(r"\s", "", NASTY) in re.sub(r"\s", "", picture.text)
    assert "script" not in picture.tags
    report.save(tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert report._repr_html_() == (tmp_path / "r.svg").read_text()
    assert report._repr_html_() in page
    assert not re.search(
        r"https?:|@import|url\(|@font-face|src=|href=", page.replace("http://www.w3.org/2000/svg", "")
    )


# --- files ---


@pytest.mark.parametrize("name", ["r.png", "r", "html"])
def test_another_suffix_is_an_error(name, tmp_path):
    with pytest.raises(ValueError, match=rf"^a report is saved as \.html or as \.svg, got '.*{name}'; rename it$"):
        READ.save(str(tmp_path / name))
    assert os.listdir(tmp_path) == []


def test_a_file_that_cannot_be_written_does_not_appear(tmp_path):
    with pytest.raises(FileNotFoundError):
        READ.save(tmp_path / "missing" / "r.html")
    (tmp_path / "r.html").mkdir()  # cannot be replaced by a file
    with pytest.raises(IsADirectoryError):
        READ.save(tmp_path / "r.html")
    assert os.listdir(tmp_path) == ["r.html"]


# --- a real browser ---


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome in the PATH")
@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_real_browser_shows_it(suffix, tmp_path):
    path, screen = tmp_path / f"r.{suffix}", tmp_path / "screen.png"
    dataclasses.replace(READ, advice=f"{NASTY} {READ.advice}").save(path)
    done = programs.run(
        [
            BROWSER, f"--user-data-dir={tmp_path / 'profile'}", "--headless", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--hide-scrollbars", "--window-size=960,1400", f"--screenshot={screen}",
            path.as_uri(),
        ],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pixels = np.asarray(Image.open(screen).convert("RGB")) / 255
    for kind in (LOOP, LIMITS):
        rgb = np.array([int(COLORS[kind][i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(pixels - rgb) < 0.02).all(axis=-1).mean() > 0.005
    assert (pixels[:, -20:] == 1).all()  # no text is cut off
