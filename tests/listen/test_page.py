"""A report as a picture and as a page, and what a report and statistics show in a notebook."""

import dataclasses
import os
import re
import shutil
import sys
from xml.etree import ElementTree

import numpy as np
import programs
import pytest
from PIL import Image

import feedline
from feedline._src.listen.page import COLORS
from feedline._src.listen.report import Change, Report, Straggler

READ = Report(
    bound="read",
    au=0.51,
    wait_share=0.49,
    headroom={"read": 0.513, "host": 209.0, "place": 4.79, "compute": 1.99},
    advice="threads 2 → 4: wait 49 % → 1 %",
    change=Change("Reading.threads", 2, 4, 0.01),
    step_s=0.01036,
    loop_s=0.0052,
    wait_s=0.00516,
    late_s=0.0,
    stages_s={"read": 0.0203, "transform": 0.0, "stage": 0.00005, "place": 0.00217},
    cpu_s=0.000456,
    batches=115,
    drained=True,
    process=0,
    straggler=None,
    settings={"threads": 2, "workers": 0, "buffer": 2, "prefetch": 2},
)
COMPUTE = dataclasses.replace(
    READ,
    bound="compute",
    au=0.99,
    wait_share=0.01,
    headroom={"read": 4.66, "host": 242.0, "place": 64.0, "compute": 1.01},
    advice="nothing to change",
    change=None,
    step_s=0.00525,
    wait_s=0.00005,
)
SLOW = Straggler(3, "read", 0.0243, 0.0081, 0.5)
REPORTS = {
    "read": READ,
    "compute": COMPUTE,
    "loop": dataclasses.replace(COMPUTE, bound="loop", idle_s=0.0039, au=0.24),
    "place": dataclasses.replace(READ, bound="place", headroom={**READ.headroom, "place": 0.2}, change=None),
    "transfer": dataclasses.replace(READ, bound="place", late_s=0.004, headroom={**READ.headroom, "place": 0.23}),
    "few batches": dataclasses.replace(READ, batches=2, drained=False),
    "straggler here": dataclasses.replace(READ, bound="straggler", straggler=SLOW, process=3),
    "straggler elsewhere": dataclasses.replace(COMPUTE, bound="straggler", straggler=SLOW),
    "synchronous": dataclasses.replace(READ, settings={**READ.settings, "prefetch": 0}),
}
NASTY = "<b>&amp;</b> \"x\" 'y' </p><script>alert(1)</script> $a_b$ " + "x" * 300
SVG = "{http://www.w3.org/2000/svg}"


class Picture:
    """The texts of a picture, and its bars: the parts (what, width in pixels) of each by its name."""

    def __init__(self, report, path):
        report.save(path)
        root = ElementTree.fromstring(path.read_text())
        self.tags = {each.tag.removeprefix(SVG) for each in root.iter()}
        self.texts, self.bars = [], {}
        for each in root.iter():
            if each.tag == f"{SVG}text":
                self.texts.append(each.text)
            elif each.get("class"):
                self.bars.setdefault(self.texts[-1], []).append((each.get("class"), float(each.get("width"))))
        self.text = " ".join(self.texts)


@pytest.mark.parametrize("name", REPORTS)
def test_a_picture_shows_the_whole_report(name, tmp_path):
    report, picture = REPORTS[name], Picture(REPORTS[name], tmp_path / "r.svg")
    assert picture.text.casefold().startswith(report.verdict.casefold())
    assert f"Advice: {report.advice}" in picture.text
    for stage in ("reading", "host work", "placing", "training loop"):
        assert stage in picture.texts
    for headroom in report.headroom.values():
        assert f"headroom {headroom:.3g} ×" in picture.texts
    assert "Settings: threads 2, workers 0, buffer 2, prefetch" in picture.text
    assert f"the latest {report.batches} batches of process {report.process}" in picture.text
    assert ("Too few batches" in picture.text) == (not report.drained)
    assert ("predicted" in picture.texts) == (report.change is not None)
    assert ("with prefetch 0 the loop makes each batch itself" in picture.text) == (name == "synchronous")


def test_bars_are_as_long_as_their_times(tmp_path):
    bars = Picture(READ, tmp_path / "r.svg").bars
    widths = {name: dict(parts) for name, parts in bars.items()}
    assert widths["measured"]["wait"] / widths["measured"]["loop"] == pytest.approx(5.16 / 5.2, abs=0.01)
    assert widths["predicted"]["loop"] == pytest.approx(widths["measured"]["loop"], abs=0.01)
    assert widths["training loop"]["loop"] / widths["reading"]["limits"] == pytest.approx(0.513, abs=0.01)
    assert widths["training loop"]["loop"] / widths["placing"]["fast"] == pytest.approx(4.79, abs=0.01)
    for name, kind, share in (("loop", "idle", 39 / 52), ("transfer", "late", 4 / 5.2)):
        parts = dict(Picture(REPORTS[name], tmp_path / "r.svg").bars["measured"])
        assert parts[kind] / (parts["loop"] + parts[kind]) == pytest.approx(share, abs=0.01)
    endless = dataclasses.replace(READ, late_s=1.0, headroom=dict.fromkeys(READ.headroom, 1e-07))
    assert all(w >= 0 for parts in Picture(endless, tmp_path / "r.svg").bars.values() for _, w in parts)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("read", {"reading": "limits", "placing": "fast", "training loop": "loop"}),
        ("compute", {"reading": "fast", "training loop": "loop"}),
        ("place", {"reading": "slow", "placing": "limits"}),
        ("straggler here", {"reading": "limits"}),
        ("straggler elsewhere", {"reading": "fast"}),
    ],
)
def test_what_limits_training_is_marked(name, kinds, tmp_path):
    picture = Picture(REPORTS[name], tmp_path / "r.svg")
    assert {bar: picture.bars[bar][0][0] for bar in kinds} == kinds
    assert ("the stage that limits training" in picture.texts) == ("limits" in kinds.values())


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
    assert re.search(r'<meta name="viewport" content="width=device-width', page)


def test_statistics_show_their_units():
    values = {"rows": 1_234_567, "placed_bytes": 1_500_000, "read_s": 0.24, "loop_s": 12_345.6, "au": 0.93}
    statistics = feedline.Statistics(batches=120, **values)
    shown = dict(tuple(cell.text for cell in row) for row in ElementTree.fromstring(statistics._repr_html_())[1:])
    assert list(shown) == [field.name for field in dataclasses.fields(statistics)]
    expected = {
        "rows": "1,234,567",
        "placed_bytes": "1.5 MB",
        "read_s": "240 ms",
        "loop_s": "12,346 s",
        "au": "93 %",
    }
    assert {name: shown[name] for name in values} == expected
    assert shown["transfer_s"] == "not known yet"


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


FULL_DISK = """
import resource, signal, sys
from test_page import READ
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    READ.save(sys.argv[1])
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_file_that_was_there(tmp_path):
    (tmp_path / "r.html").write_text("before")
    done = programs.run(
        [sys.executable, "-B", "-c", FULL_DISK, tmp_path / "r.html"],
        capture_output=True,
        text=True,
        env=programs.importing(),
    )
    assert done.stdout == "File too large\n", done.stderr
    assert os.listdir(tmp_path) == ["r.html"]
    assert (tmp_path / "r.html").read_text() == "before"


# --- a real browser ---


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def screenshot(path, width):
    """The pixels of a file in a window of this width."""
    picture = path.with_name("screen.png")
    told = programs.run(
        [
            BROWSER, f"--user-data-dir={path.parent / 'profile'}", "--headless", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--hide-scrollbars", f"--window-size={width},1400",
            f"--screenshot={picture}", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return np.asarray(Image.open(picture).convert("RGB")) / 255


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome in the PATH")
@pytest.mark.parametrize("suffix", ["svg", "html"])
@pytest.mark.parametrize("name", ["read", "straggler here"])
def test_a_real_browser_shows_it(name, suffix, tmp_path):
    path = tmp_path / f"r.{suffix}"
    dataclasses.replace(REPORTS[name], advice=f"{NASTY} {REPORTS[name].advice}").save(path)
    picture = screenshot(path, 960)
    for kind in ("loop", "limits"):
        rgb = np.array([int(COLORS[kind][i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(picture - rgb) < 0.02).all(axis=-1).mean() > 0.005
    assert (picture[:, -20:] == 1).all()  # no text is cut off
