"""The Python of docs/formats.md runs as it stands, and its table names the formats that there are."""

import re
import tomllib
from pathlib import Path

from feedline._src.sources.file_formats import FORMATS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "formats.md").read_text()


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "formats.md", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "96 {'tokens': ShapeDtypeStruct(shape=(2049,), dtype=uint16)}",
        "ShapeDtypeStruct(shape=(32, 32, 3), dtype=uint8)",
        "{'image': ShapeDtypeStruct(shape=(3072,), dtype=uint8)}",
        "ShapeDtypeStruct(shape=(3072,), dtype=uint8)",
        "ShapeDtypeStruct(shape=(32, 32, 3), dtype=uint8) 999",
        "{'image': b'second', 'label': np.int64(1)}",
        "ShapeDtypeStruct(shape=(3,), dtype=bfloat16)",
    ]


def test_its_table_is_that_of_the_code():
    documented = {}
    for row in re.findall(r"^\| (`\..*) \|$", PAGE, re.MULTILINE):
        suffixes, _, options, _, _ = (cell.strip() for cell in row.split("|"))
        named = {"window", "stride", "columns"} if options == "the same" else set(re.findall(r"`(\w+)`", options))
        documented |= dict.fromkeys(re.findall(r"`(\.\w+)`", suffixes), named)
    assert documented == {suffix: set(form.takes) for suffix, form in FORMATS.items()}


def test_its_extras_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"feedline\[([\w-]+)\]", PAGE))
    assert named == {"array-record", "arrow", "hdf5", "parquet", "tfrecord", "zarr"}
    assert named <= set(extras)
