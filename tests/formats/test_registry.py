"""What formats declare: the registry, the docs and the extras say the same."""

import pickle
import pkgutil
import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import programs

from feedline._src import formats
from feedline._src.formats.registry import MODULES, Format, all_formats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text()


def test_each_declaration_is_in_the_registry():
    modules = [import_module(f"{formats.__name__}.{each.name}") for each in pkgutil.iter_modules(formats.__path__)]
    declared = {module.FORMAT for module in modules if hasattr(module, "FORMAT")}
    assert declared == set(all_formats())
    assert {suffix: form.name for form in all_formats() for suffix in form.suffixes} == MODULES


def test_a_declaration_pickles_by_its_name():
    for form in all_formats():
        assert isinstance(form, Format)
        assert pickle.loads(pickle.dumps(form)) is form


def test_the_registry_imports_no_format():
    code = "import sys; import feedline._src.formats.registry; print(*sys.modules)"
    done = programs.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = {name for name in done.stdout.split() if name.startswith("feedline._src.formats.")}
    assert loaded == {"feedline._src.formats.registry"}


def test_the_table_in_the_docs():
    """Suffixes, options and extras of docs/formats.md."""
    options, extras = {}, {}
    for row in re.findall(r"^\| (`\..*) \|$", PAGE, re.MULTILINE):
        suffixes, _, takes, _, needs = (cell.strip() for cell in row.split("|"))
        named = {"window", "stride", "columns"} if takes == "the same" else set(re.findall(r"`(\w+)`", takes))
        options |= dict.fromkeys(re.findall(r"`(\.\w+)`", suffixes), named)
        needed = re.fullmatch(r"`feedline\[([\w-]+)\]`", needs)
        extras |= dict.fromkeys(re.findall(r"`(\.\w+)`", suffixes), needed[1] if needed else "")
    assert options == {suffix: set(form.takes) for form in all_formats() for suffix in form.suffixes}
    assert extras == {suffix: form.extra for form in all_formats() for suffix in form.suffixes}


def test_the_extras_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {form.extra for form in all_formats()} - {""} <= set(extras)
