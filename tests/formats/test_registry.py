"""What formats declare: the registry, the docs and the extras say the same; the Python of docs/formats.md runs."""

import re
import tomllib
from pathlib import Path

from test_docs import run

from feedline._src.formats.registry import formats

ROOT = Path(__file__).parents[2]
FORMATS = set(formats().values())
PAGE = (ROOT / "docs" / "formats.md").read_text().partition("\n## Tables: ")[0]


def test_no_two_formats_share_a_suffix():
    suffixes = [suffix for form in FORMATS for suffix in form.suffixes]
    assert sorted(suffixes) == sorted(formats())


def test_the_table_in_the_docs_and_the_extras_of_the_package():
    """docs/formats.md has the suffixes, options and extras that formats declare; pyproject.toml has the extras."""
    options, extras = {}, {}
    for row in re.findall(r"^\| (`\..*) \|$", PAGE, re.MULTILINE):
        suffixes, _, takes, _, needs = (cell.strip() for cell in row.split("|"))
        named = {"window", "stride", "columns"} if takes == "the same" else set(re.findall(r"`(\w+)`", takes))
        options |= dict.fromkeys(re.findall(r"`(\.\w+)`", suffixes), named)
        needed = re.fullmatch(r"`feedline\[([\w-]+)\]`", needs)
        extras |= dict.fromkeys(re.findall(r"`(\.\w+)`", suffixes), needed[1] if needed else "")
    assert options == {suffix: set(form.takes) for form in FORMATS for suffix in form.suffixes}
    assert extras == {suffix: form.extra for form in FORMATS for suffix in form.suffixes}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {form.extra for form in FORMATS} - {""} <= set(declared)


def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("docs/formats.md", until="\n## Tables: ")
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "96 {'tokens': ShapeDtypeStruct(shape=(2049,), dtype=uint16)}",
        "ShapeDtypeStruct(shape=(32, 32, 3), dtype=uint8)",
        "ShapeDtypeStruct(shape=(3072,), dtype=uint8)",
        "{'score': ShapeDtypeStruct(shape=(), dtype=float64)}",
        "{'stars': ShapeDtypeStruct(shape=(), dtype=int64), "
        "'embedding': ShapeDtypeStruct(shape=(2,), dtype=float64)} "
        "{'embedding': array([2.5, 1. ]), 'stars': np.int64(5)}",
        "{'text': b'good good ', 'stars': np.int64(2)}",
        "ShapeDtypeStruct(shape=(32, 32, 3), dtype=uint8) 999",
        "ShapeDtypeStruct(shape=(3,), dtype=bfloat16)",
    ]
