"""A report as a page and as a picture, and what a report, a feed and its statistics show in a notebook."""

import dataclasses
import html
import html.parser
import json
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
from feedline._src.listen.report import Change, Report, Straggler
from feedline._src.listen.view import COLORS

READ = Report(
    bound="read",
    au=0.51,
    wait_share=0.49,
    headroom={"read": 0.513, "host": 209.0, "place": 4.79, "compute": 1.99},
    advice="threads 2 → 4: reading 10.1 → 5.07 ms, wait 49 % → 1 %",
    change=Change("Reading.threads", 2, 4, 0.01, "read", 0.0101, 0.00507),
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
    "place": dataclasses.replace(READ, bound="place", headroom={**READ.headroom, "place": 0.2}, change=None),
    "transfer": dataclasses.replace(READ, bound="place", late_s=0.004, headroom={**READ.headroom, "place": 0.23}),
    "few batches": dataclasses.replace(READ, batches=2, drained=False),
    "straggler here": dataclasses.replace(READ, bound="straggler", straggler=SLOW, process=3),
    "straggler elsewhere": dataclasses.replace(COMPUTE, bound="straggler", straggler=SLOW),
    "synchronous": dataclasses.replace(READ, settings={**READ.settings, "prefetch": 0}),
    "workers": dataclasses.replace(READ, settings={**READ.settings, "threads": 0, "workers": 2}),
}
NASTY = "<b>&amp;</b> \"x\" 'y' </p><script>alert(1)</script> $a_b$ " + "x" * 300


class Page(html.parser.HTMLParser):
    """The visible texts of a page, its elements with their attributes, and the tags that were not closed."""

    def __init__(self, path):
        super().__init__()
        self.texts, self.elements, self.open = [], [], []
        self.feed(path.read_text())
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title") and data.strip():
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(self.texts)

    def rectangles(self, bar):
        """(class, width in percent) of the parts of a bar."""
        (at,) = [i for i, each in enumerate(self.elements) if each[1].get("aria-label", "").startswith(f"{bar}: ")]
        inside = (each for each in self.elements[at + 1 :] if each[0] in ("rect", "svg"))
        parts = []
        for tag, attributes in inside:
            if tag == "svg":
                break
            parts.append((attributes["class"], float(attributes["width"].rstrip("%"))))
        return parts


def saved(report, tmp_path):
    path = tmp_path / "r.html"
    report.save(path)
    return Page(path)


# --- the page ---


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_shows_the_whole_report(name, tmp_path):
    report = REPORTS[name]
    page = saved(report, tmp_path)
    assert page.open == []
    assert page.texts[0] == report.verdict
    assert report.advice in page.texts
    for stage in ("reading", "host work", "placing", "training loop", "all input"):
        assert stage in page.texts
    for stage in report.headroom.values():
        assert f"headroom {stage:.3g} ×" in page.texts
    assert ", ".join(f"{name} {value}" for name, value in report.settings.items()) in page.texts
    assert f"the latest {report.batches} batches of process {report.process}" in page.text
    assert ("Too few batches" in page.text) == (not report.drained)
    assert ("process 3" in page.texts) == (report.straggler is not None)
    assert {"AU 51 %", "AU 99 %"} & set(page.texts)
    assert {"Wait share 49 %", "Wait share 1 %"} & set(page.texts)
    assert "Headroom" in page.texts


def test_idle_devices_are_a_part_of_the_loops_own_time(tmp_path):
    report = dataclasses.replace(COMPUTE, bound="loop", idle_s=0.0039, au=0.24)
    (loop, busy), (idle, alone), *_ = saved(report, tmp_path).rectangles("measured")
    assert (loop, idle) == ("loop", "idle")
    assert alone / busy == pytest.approx(3, rel=0.01)


def test_bars_are_as_long_as_their_times(tmp_path):
    page = saved(READ, tmp_path)
    (loop, now), (late, none), (wait, waiting) = page.rectangles("measured")
    assert (loop, late, wait, none) == ("loop", "late", "wait", 0)
    assert waiting / now == pytest.approx(5.16 / 5.2, abs=0.001)
    (_, then), (_, less) = page.rectangles("predicted")
    assert then == pytest.approx(now, abs=0.01)
    assert less / (less + then) == pytest.approx(0.01, abs=0.001)

    ((kind, reading),) = page.rectangles("reading")
    ((calm, placing),) = page.rectangles("placing")
    ((own, training),) = page.rectangles("training loop")
    assert (kind, calm, own) == ("limits", "fast", "loop")
    assert training / reading == pytest.approx(0.513, abs=0.001)
    assert training / placing == pytest.approx(4.79, abs=0.01)
    pace = [each["x1"] for tag, each in page.elements if tag == "line"]
    assert pace == [f"{training:.3f}%"] * 5
    assert reading < sum(width for _, width in page.rectangles("all input")) < 100


@pytest.mark.parametrize(
    ("name", "marked", "kinds"),
    [
        ("read", ["reading"], {"reading": "limits", "placing": "fast"}),
        ("compute", ["training loop"], {"reading": "fast", "training loop": "loop"}),
        ("place", ["placing"], {"reading": "slow", "placing": "limits"}),
        ("straggler here", ["process 3", "reading"], {"process 3": "limits", "reading": "limits"}),
        ("straggler elsewhere", ["process 3"], {"other processes": "fast", "reading": "fast"}),
    ],
)
def test_what_limits_training_is_marked(name, marked, kinds, tmp_path):
    page = saved(REPORTS[name], tmp_path)
    assert [page.texts[i - 1] for i, text in enumerate(page.texts) if text == "limits training"] == marked
    assert {bar: page.rectangles(bar)[0][0] for bar in kinds} == kinds


def test_late_transfers_are_part_of_the_step(tmp_path):
    page = saved(REPORTS["transfer"], tmp_path)
    assert [kind for kind, width in page.rectangles("measured") if width] == ["loop", "late", "wait"]
    assert "the loop has the batch, but its transfer goes on 4.00 ms" in page.texts
    endless = dataclasses.replace(READ, late_s=1.0, headroom=dict.fromkeys(READ.headroom, 1e-07))
    assert all(width >= 0 for _, width in saved(endless, tmp_path).rectangles("measured"))


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ("Reading.threads", "feedline.Feed(..., reading=feedline.Reading(threads=4))"),
        ("prefetch", "feedline.Feed(..., prefetch=4)"),
    ],
)
def test_advice_is_also_shown_as_code(setting, code, tmp_path):
    change = READ.change._replace(setting=setting)
    assert code in saved(dataclasses.replace(READ, change=change), tmp_path).texts


def test_input_in_all_is_what_the_threads_or_the_workers_do(tmp_path):
    threads = saved(READ, tmp_path)
    assert len(threads.rectangles("all input")) == 3
    workers = saved(REPORTS["workers"], tmp_path)
    assert len(workers.rectangles("all input")) == 2  # without placing, which a thread does meanwhile
    assert "Time for a batch, stage by stage, with 2 workers" in workers.texts
    assert "with prefetch 0 the loop makes each batch itself" in saved(REPORTS["synchronous"], tmp_path).text


def test_texts_are_escaped(tmp_path):
    page = saved(dataclasses.replace(READ, advice=NASTY), tmp_path)
    assert NASTY in page.texts
    assert "script" not in {tag for tag, _ in page.elements}


def test_a_page_loads_nothing(tmp_path):
    page = saved(READ, tmp_path)
    text = (tmp_path / "r.html").read_text()
    assert not re.search(r"https?:|//|@import|url\(|@font-face", text)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert not any({"src", "href"} & set(attributes) for _, attributes in page.elements)
    assert re.search(r'<meta name="viewport" content="width=device-width', text)


def test_a_notebook_shows_the_same(tmp_path):
    READ.save(tmp_path / "r.html")
    shown = READ._repr_html_()
    assert shown in (tmp_path / "r.html").read_text()
    assert shown.startswith("<div")
    assert all(line.startswith((".feedline-report", "@media", "[data-jp", "  ", "}")) for line in style_of(shown))


def style_of(shown):
    """The rules of a style; in a notebook they must not change anything else."""
    return [line for line in shown.partition("<style>")[2].partition("</style>")[0].splitlines() if line]


def test_statistics_show_their_units():
    statistics = feedline.Statistics(
        batches=120,
        rows=1_234_567,
        placed_bytes=1_500_000,
        read_s=0.24,
        wait_p99_s=0.002,
        loop_s=12_345.6,
        au=0.93,
    )
    table = ElementTree.fromstring(statistics._repr_html_())
    head, *rows = ([cell.text or "" for cell in row] for row in table.iter("tr"))
    assert head == ["", "in all", "a batch"]
    shown = {name: (value, each) for name, value, each in rows}
    assert list(shown) == [field.name for field in dataclasses.fields(statistics)]
    assert shown["rows"] == ("1,234,567", "")
    assert shown["placed_bytes"] == ("1.5 MB", "")
    assert shown["read_s"] == ("240 ms", "2 ms")
    assert shown["loop_s"] == ("12,346 s", "103 s")
    assert shown["wait_p99_s"] == ("2 ms", "")
    assert (shown["au"], shown["readiness"]) == (("93 %", ""), ("not known yet", ""))
    assert ElementTree.fromstring(feedline.Statistics()._repr_html_()).tag == "table"  # before the first batch


# --- the picture, and files ---


@pytest.mark.parametrize("name", REPORTS)
def test_a_picture_shows_the_whole_report(name, tmp_path):
    """Each text of the page, and the bars with the same lengths."""
    report = REPORTS[name]
    report.save(tmp_path / "r.svg")
    picture = (tmp_path / "r.svg").read_text()
    texts = [each.text for each in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    words = " ".join(texts).casefold().split()
    page = saved(report, tmp_path)
    assert set(re.sub(r":(?= |$)", "", " ".join(page.texts)).casefold().split()) <= {w.rstrip(":") for w in words}
    assert re.findall(r"<rect class=[^>]*%[^>]*>", picture) == re.findall(
        r"<rect class=[^>]*%[^>]*>", (tmp_path / "r.html").read_text()
    )


def share_of(picture, color):
    """The share of the pixels of a picture that have a colour."""
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return (np.abs(picture[..., :3] - rgb) < 0.02).all(axis=-1).mean()


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
MEASURE = """<iframe style="border: 0; width: {width}px; height: 1400px" srcdoc="{page}"></iframe>
<script>
onload = () => {{
  const page = frames[0].document, all = [...page.querySelectorAll("body, body *:not(style)")]
  const box = (each) => each.getBoundingClientRect()
  const cut = all.filter((each) => box(each).right > {width} + 0.5 || box(each).left < 0)
  const texts = [...page.querySelectorAll(".name, .value, .note, .mark, p, dt, dd, .legend span")]
  const overlaps = texts.filter((a) => texts.some((b) => {{
    if (a.contains(b) || b.contains(a) || a.tagName == "DT" || b.tagName == "DT") return false
    const [p, q] = [box(a), box(b)]
    return p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1
  }}))
  document.title = JSON.stringify({{
    cut: cut.map((each) => each.outerHTML), overlaps: overlaps.map((each) => each.outerHTML),
    scrolls: page.documentElement.scrollWidth > {width}, text: page.body.innerText,
    smallest_font: Math.min(...texts.map((each) => parseFloat(frames[0].getComputedStyle(each).fontSize))),
  }})
}}
</script>"""
"""In a frame, because a window of chromium is at least 500 pixels wide."""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome in the PATH")
@pytest.mark.parametrize("name", ["read", "straggler here"])
def test_a_real_browser_shows_the_picture(name, tmp_path):
    path = tmp_path / "r.svg"
    dataclasses.replace(REPORTS[name], advice=f"{NASTY} {REPORTS[name].advice}").save(path)
    picture = screenshot(path, 960, dark=False)
    assert share_of(picture, COLORS["loop"][0]) > 0.005
    assert share_of(picture, COLORS["limits"][0]) > 0.005
    assert (picture[:, -20:] == 1).all()  # no text is cut off


def browse(path, width, *options):
    """Open a page, and return what the browser prints."""
    profile = f"--user-data-dir={path.parent / 'profile'}"
    window = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--window-size={width},1400",
    ]
    command = [BROWSER, profile, *window, *options, path.as_uri()]
    told = programs.run(command, capture_output=True, text=True, timeout=180)
    assert told.returncode == 0, told.stderr
    return told.stdout


def measures(path, width):
    """The result of `MEASURE`."""
    framed = path.with_name("framed.html")
    framed.write_text(f"<!doctype html>{MEASURE.format(width=width, page=html.escape(path.read_text()))}")
    title = re.search(r"<title>(.*?)</title>", browse(framed, width, "--dump-dom"), re.DOTALL)[1]
    return json.loads(html.unescape(title))


def screenshot(path, width, dark):
    """The pixels of a page."""
    picture = path.with_name(f"{width}{'-dark' * dark}.png")
    browse(path, width, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    return np.asarray(Image.open(picture).convert("RGB")) / 255


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome in the PATH")
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["read", "straggler here"])
def test_a_real_browser_shows_the_page(name, width, tmp_path):
    """On a desktop and on a phone, in light and dark."""
    report = dataclasses.replace(REPORTS[name], advice=f"{NASTY} {REPORTS[name].advice}")
    path = tmp_path / "r.html"
    report.save(path)
    told = measures(path, width)
    assert (told["cut"], told["overlaps"], told["scrolls"]) == ([], [], False)
    assert told["smallest_font"] >= 12
    for text in (report.verdict, report.advice, "reading", "host work", "placing", "training loop", "Headroom"):
        assert text.lower() in told["text"].lower()  # the style makes the first letter of the verdict a capital
    for dark in (False, True):
        picture = screenshot(path, width, dark)
        ground = picture[-1, 0]
        assert picture.shape[1] == width
        assert (ground.mean() < 0.2) == dark
        empty = (np.abs(picture - ground) < 0.02).all(axis=-1).mean()
        assert 0.3 < empty < 0.97  # text and bars, on ground
        assert share_of(picture, COLORS["loop"][dark]) > 0.003
        assert share_of(picture, COLORS["limits"][dark]) > 0.003
