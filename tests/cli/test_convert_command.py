"""`feedline convert`: what it prints, what it opens, and how it ends."""

from pathlib import Path

import numpy as np
import pytest
from rows_read import read_rows

import feedline
from feedline._src.tools.main import main

ROWS = {"image": np.arange(120, dtype=np.uint8).reshape(10, 3, 4), "label": np.arange(10) << 40}
MODULE = """
import numpy as np
import feedline

columns = {"x": np.arange(5)}

def make_source():
    return feedline.open_source("rows.npz", columns=["label"])

class Stopped:
    spec = make_source().spec
    identity = {}
    def __len__(self):
        return 10
    def read(self, rows, out):
        if 6 in rows:
            raise KeyboardInterrupt
        out["label"][:] = rows
    def close(self):
        pass

stopped = Stopped()
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    np.savez("rows.npz", **ROWS)
    name = f"mine_{tmp_path.name.replace('-', '_')}"  # a new name for each test: Python keeps modules
    Path(f"{name}.py").write_text(MODULE)
    return name


@pytest.mark.parametrize("form", ["array_record", "npy", "parquet", "zarr"])
def test_the_printed_line_opens_the_rows(form, capsys):
    assert main(["convert", "rows.npz", "out/", "--format", form, "--rows-per-shard", "4"]) == 0
    said, line = capsys.readouterr().out.splitlines()
    groups = ", in groups of 4" if form in ("parquet", "zarr") else ""
    assert said == f"10 rows in 3 files{groups}, written and read back; open them with"
    source = eval(line, {"feedline": feedline, "np": np})
    out = read_rows(source)
    for name, array in ROWS.items():
        assert out[name].dtype == array.dtype
        np.testing.assert_array_equal(out[name], array)


def test_sources_of_a_module(here, capsys):
    assert main(["convert", f"{here}:make_source", "labels"]) == 0
    assert main(["convert", f"{here}:columns", "columns"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("feedline.")] == [
        "feedline.open_source('labels/*.npy')",
        "feedline.open_source('columns/*.npy')",
    ]
    assert feedline.open_source("labels/*.npy")[3] == {"label": 3 << 40}
    assert main(["convert", f"{here}:no_such", "out"]) == 2
    assert f"loading {here}:no_such failed with AttributeError" in capsys.readouterr().err


def test_options_say_how_a_path_is_opened(here, capsys):
    assert main(["convert", "rows.npz", "labels", "--columns", "label"]) == 0
    assert feedline.open_source("labels/*.npy")[3] == {"label": 3 << 40}
    np.arange(11, dtype=np.uint16).tofile("tokens.bin")
    assert main(["convert", "tokens.bin", "tokens", "--dtype", "uint16", "--window", "3"]) == 0
    assert feedline.open_source("tokens/*.npy")[2].tolist() == [6, 7, 8]
    dtype = "[('x', 'uint16', (2,)), ('y', 'bfloat16')]"
    assert main(["convert", "tokens.bin", "pairs", "--dtype", dtype, "--format", "array_record"]) == 2
    np.arange(12, dtype=np.uint16).tofile("pairs.bin")
    assert main(["convert", "pairs.bin", "pairs", "--dtype", dtype, "--format", "array_record"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert eval(line, {"feedline": feedline, "np": np})[2]["x"].tolist() == [6, 7]
    assert main(["convert", f"{here}:make_source", "out", "--columns", "x"]) == 2
    assert main(["convert", "tokens.bin", "out", "--dtype", "no_such"]) == 2
    err = capsys.readouterr().err
    assert f"--columns is for a path, and {here}:make_source is a source that is open already" in err
    assert "--dtype must be a dtype of NumPy, got 'no_such'" in err


def test_control_c_keeps_finished_files(here, capsys):
    assert main(["convert", f"{here}:stopped", "out", "--rows-per-shard", "3"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == (
        "feedline: interrupted; finished files are in out.partial; run the same command to continue"
    )
    names = sorted(path.name for path in Path("out.partial").iterdir())
    assert names == ["conversion.json", "rows-00000-of-00004.npy", "rows-00001-of-00004.npy"]
