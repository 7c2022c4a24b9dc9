"""The Python of the README and of docs/ runs, block after block; links, paths and modules on all pages exist."""

import json
import math
import os
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline
from feedline._src.agreement.stop import stopping
from feedline._src.order.epoch import rows_at

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*sorted(ROOT.glob("[A-Z]*.md")), ROOT / "benchmarks" / "README.md", *DOCS]


SHARDING = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


def _given():
    """The names that the pages use without defining them: a step, its state, an evaluation."""

    def logits(state, batch):
        return (batch["image"].reshape(len(batch["image"]), -1) / 255.0) @ state

    @jax.jit
    def train_step(state, batch):
        def loss(state):
            label = batch["label"]
            return -jnp.mean(jax.nn.log_softmax(logits(state, batch))[jnp.arange(len(label)), label])

        value, gradient = jax.value_and_grad(loss)(state)
        return state - 0.1 * gradient, value

    @jax.jit
    def evaluate(state, batch):
        right = (logits(state, batch).argmax(axis=1) == batch["label"]) & batch["valid"]
        return right.sum(), batch["valid"].sum()

    return {"train_step": train_step, "evaluate": evaluate, "state": np.zeros((16, 10), np.float32)}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The current folder holds the two files that all pages read: 200 rows, so 3 whole batches of 64 an epoch."""
    monkeypatch.chdir(tmp_path)
    np.save("image.npy", np.random.default_rng(0).integers(0, 256, (200, 4, 4)).astype(np.uint8))
    np.save("label.npy", np.arange(200, dtype=np.int32) % 10)


def run(page, section="", until=None, language="python", **more):
    """Run all Python of a page, or of its part from one heading to another. Returns the names that it defines."""
    names = _given() | more
    for block in _blocks(page, language, section, until):
        exec(compile(block, f"<{page}>", "exec"), names)  # not the name of a file: Grain would look up its lines
    return names


def _blocks(page, language, section="", until=None):
    text = (ROOT / page).read_text()
    part = text[text.index(section) : until and text.index(until)]
    return re.findall(rf"^```{language}\n(.*?)^```", part, re.DOTALL | re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_first_program_runs_as_a_file_and_prints_what_the_readme_shows(devices, tmp_path):
    (program,), (shown,) = _blocks("README.md", "python"), _blocks("README.md", "text")
    (tmp_path / "first.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
    ran = programs.run(
        [sys.executable, "-W", "error", "first.py"],
        cwd=tmp_path,
        env=environment | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown


def test_the_figures_of_the_readme_are_those_of_the_saved_results():
    readme = (ROOT / "README.md").read_text()
    result = json.loads((ROOT / "benchmarks" / "results" / "peers_fastest.json").read_text())
    for size in ("256", "3072"):
        found = result["standings"][size]["entrants"]
        best = next(name for name in found if name not in ("feedline", "limit", "gather"))  # fastest first
        assert best.startswith("tf_data")
        ours, theirs = (f"{found[name]['median_rows_per_s'] / 1e6:#.3g} M" for name in ("feedline", best))
        over = found[best]["feedline_over"]
        interval = f"{over['ratio']:.1f} × [{over['low']:.1f}, {over['high']:.1f}]"
        assert f" | {ours} rows/s | tf.data {theirs} | {interval} |" in readme
    result = json.loads((ROOT / "benchmarks" / "results" / "stores_peers.json").read_text())
    ours, theirs = (f"{result['medians'][name]['first_epoch_mb_s']:.0f} MB/s" for name in ("feedline", "LitData"))
    firsts = [[run["epochs_s"][0] for run in result["runs"][name]] for name in ("LitData", "feedline")]
    ratios = [slow / fast for slow, fast in zip(*firsts, strict=True)]
    mean = math.prod(ratios) ** (1 / len(ratios))
    assert f" | {ours} | LitData {theirs} | {mean:.1f} × [{min(ratios):.1f}, {max(ratios):.1f}] |" in readme


def test_feed(files, capsys):
    run("docs/feed.md")
    shape, *lines = capsys.readouterr().out.splitlines()
    assert shape == "(64, 4, 4)"
    assert [line.split()[2:] for line in lines if line.startswith("auto: ")] == [["2", "2"]]
    (several,) = [line for line in lines if line.startswith("(4, 64, 4, 4)")]
    assert several.split()[-1] == "4"
    assert [line.split(" over ")[1] for line in lines[:2]] == ["200 rows"] * 2
    assert "0 bad rows" in lines
    assert Path("bad.jsonl").read_text() == ""


def test_waiting(files, capsys):
    run("docs/waiting.md", until="\n## Metrics", sharding=SHARDING)
    *_, stalls, path = capsys.readouterr().out.splitlines()
    assert stalls == "['fetch', 'preparation', 'transfer'] True 0"
    assert path == str(Path.cwd() / "trace.json")
    names = [event["name"] for event in json.loads(Path("all.json").read_text())["traceEvents"]]
    assert (names.count("step"), names.count("place")) == (50, 50)
    assert list(Path("profile").rglob("*.xplane.pb"))


def test_training(files, capsys):
    with stopping():  # restores the signal handlers that should_stop replaces
        names = run("docs/training.md", until="\n## Checkpoints\n")
    assert (names["fitted"].progress.step, names["noisy_fit"].progress.step) == (200, 20)
    assert Path("runs/1/log.csv").read_text().count("\n") == 1 + 21


def test_processes(files):
    with stopping(), feedline.Feed({"image": "image.npy", "label": "label.npy"}, 64, SHARDING) as feed:
        assert run("docs/processes.md", feed=feed, first=0, last=3)["step"] == 2


def test_checkpoints(files):
    with feedline.Feed({"image": "image.npy", "label": "label.npy"}, 64, SHARDING) as feed:
        next(feed), next(feed)
        names = run("docs/training.md", section="\n## Checkpoints\n", feed=feed, sharding=SHARDING)
    # step s, counted from 1, delivers batch s - 1, counted from 0; an epoch has 3 batches of 64 rows
    for name, step in (("after_checkpoint", 3), ("at_step_41200", 41_200)):
        epoch, batch = divmod(step - 1, 3)
        expected = rows_at(feedline.Order(), 200, epoch, np.arange(64 * batch, 64 * batch + 64))
        np.testing.assert_array_equal(names[name], expected)


def test_metrics(files, capsys):
    run("docs/waiting.md", section="\n## Metrics", sharding=SHARDING)
    printed = capsys.readouterr().out
    told = r"^step 90, .*\nhttp://127.0.0.1:\d+/metrics\n# HELP feedline_batches_total Global batches del"
    assert re.search(told, printed, re.M)
    assert 'feedline_batches_total{feed="train",process="0"} 100.0\n' in printed
    assert [path.name.startswith("events.") for path in Path("runs/1").iterdir()] == [True]


def test_streams(files):
    names = run("docs/sources.md", section="\n## Streams\n")
    assert names["stream"].get_state()["step"] == 2


def test_images(files, capsys):
    names = run("docs/images.md")
    means = np.asarray(jax.vmap(lambda row: row.astype(np.float32).mean((0, 1)))(names["batch"]["image"]))
    wanted = np.array(list(names["colours"].values()))[names["batch"]["label"]]
    assert np.abs(means - wanted).max() < 5
    *_, last = capsys.readouterr().out.splitlines()
    assert last.endswith("'text': array([111, 114,  32, 110, 111, 116,   0,   0], dtype=uint8)}")


def test_convert(files, capsys):
    run("docs/formats.md", section="## Converting to files")
    source = capsys.readouterr().out
    assert source.startswith(
        "<ArraySource: rows 1,000, image uint8[8, 8], label int64[], from rows/rows-00000-of-"
    )


def test_mixtures(files, capsys):
    names = run("docs/mixtures.md")
    *steps, epochs, sizes, skipped = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].rpartition(",")[0] for line in steps] == [f"step {n}" for n in range(10, 51, 10)]
    losses = [float(line.split("loss ")[1].split(":")[0]) for line in steps]
    assert losses == sorted(losses, reverse=True)
    # 50 batches of 64 rows of 17 tokens, by the shares 7 : 2 : 1
    assert epochs == str({"web": 2240 / 2352, "code": 640 / 1176, "books": 320 / 235})
    assert sizes == "32 (32, 17)"
    assert skipped == "1 144"
    assert names["batches"] == (4 * 234 + 3) // 8  # books has 235 rows, each the third of four places


@pytest.mark.slow
def test_migration(files, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "formats")
    from tfrecords import encoded

    rows = np.arange(4 * 640, dtype=np.float32).reshape(640, 4)
    Path("rows-0.tfrecord").write_bytes(encoded([row.tobytes() for row in rows]))
    names = run("docs/migration.md", train_step=lambda state, batch: (state + len(batch["x"]), 0.0), state=0)
    assert names["state"] == 640 + 2 * 640 + 20 * 64 + 640
    before = run("docs/migration.md", "\n## From Hugging Face", language="py", **names | {"state": 0})
    before = run("docs/migration.md", "\n## From Grain", "\n## From PyTorch", "py", **before)
    assert before["state"] == 640 + 640


@pytest.mark.slow
def test_text(files, capsys):
    names = run("docs/text.md")
    *_, first, _, _, last, tokens, epochs = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in (first, last)] == ["40", "60"]
    assert re.fullmatch(r"\{'code': \d{5}, 'topics': \d{5}, 'docstrings': \d{5}\}", tokens)
    assert float(re.search(r"'loss': ([\d.]+)", last)[1]) < 4.5 < np.log(512)
    # 40 batches of 32 rows by the shares 2 : 1 : 1, and 20 by 1 : 1 : 2
    counts = {"code": 640 + 160, "topics": 320 + 160, "docstrings": 320 + 320}
    assert epochs == str({name: count / len(names["corpus"](name)) for name, count in counts.items()})
    segments = np.array([[1, 1, 2, 0, 0]])
    np.testing.assert_array_equal(names["same_document"](segments)[0, 0, 1], [True, True, False, False, False])
    np.testing.assert_array_equal(names["follows"](segments), [[True, False, False, False]])


def test_the_tables_of_the_api_page_have_each_public_name_once():
    public = set()
    for name in ("", "checkpoint.", "cluster.", "images.", "metrics.", "trainer."):
        module = pkgutil.resolve_name(f"feedline.{name}".rstrip("."))
        public |= {name + each for each in module.__all__ if not isinstance(getattr(module, each), ModuleType)}
    listed = re.findall(r"^   ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(public)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    """The linked files and headings exist."""
    for target in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            assert heading in _anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_modules_exist(page):
    """Paths may be relative to the repository, to feedline/_src/, to its tools, or to the page."""
    folders = (ROOT, ROOT / "feedline/_src", ROOT / "feedline/_src/tools", page.parent)
    text = page.read_text()
    for path in re.findall(r"(?<![\w./-])(?:[\w.]+/)+\w+\.(?:py|c)\b|(?<=`)(?:\w+/)+(?=`)", text):
        assert any((folder / path).exists() for folder in folders), path
    for name in re.findall(r"\bfeedline(?:\.\w+)+(?!\w|[-/])", text):
        pkgutil.resolve_name(name)


def _anchors(page):
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted((ROOT / "examples").rglob("*.py"))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_what_users_copy_imports_public_names_only(page):
    assert not re.findall(r"^\s*(?:import|from) feedline[\w.]*\._src.*", page.read_text(), re.MULTILINE)
