"""The Python of docs/sources.md runs as it stands."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        exec(compile(block, "<sources.md>", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "(20, 8, 8, 3) int32",
        "<ArraySource: rows 100, image uint8[8, 8], label int64[], from digits.npz>",
        "9",
        "10",
        "['cat', 'dog'] {'file': b'a picture of a dog', 'label': 1}",
        "3 animals/cat/1.txt",
        "<Ragged: rows 120, tokens uint8[32], tokens_length int32[], pad_to 8, 16, 32>",
        "[(2, 8), (2, 16), (2, 32)]",
        "(8, 16)",
    ]
