"""The Python of docs/formats.md runs as it stands."""

import re
from pathlib import Path

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
        "[4 5 6 7] [0 1 2 3 0 0 0 0]",
        "ShapeDtypeStruct(shape=(32, 32, 3), dtype=uint8)",
        "{'image': ShapeDtypeStruct(shape=(3072,), dtype=uint8)}",
        "ShapeDtypeStruct(shape=(3072,), dtype=uint8)",
        "{'score': ShapeDtypeStruct(shape=(), dtype=float64)}",
        "{'embedding': ShapeDtypeStruct(shape=(2,), dtype=float64), "
        "'stars': ShapeDtypeStruct(shape=(), dtype=int64)}",
        "{'embedding': array([2.5, 1. ]), 'stars': np.int64(5)}",
        "{'text': b'good good ', 'stars': np.int64(2)}",
        "ShapeDtypeStruct(shape=(32, 32, 3), dtype=uint8) 999",
        "{'image': b'second', 'label': np.int64(1)}",
        "ShapeDtypeStruct(shape=(3,), dtype=bfloat16)",
    ]
