"""Damaged Parquet and Arrow files: rows of the file, or an error that names it; never the end of the process."""

import collections
import sys
from pathlib import Path

import numpy as np
import programs
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

READ = Path(__file__).with_name("read_damaged.py")


def _stream(table, path):
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=10)


def _file(compression):
    return lambda table, path: feather.write_feather(table, path, compression=compression, chunksize=10)


KINDS = {
    "x.parquet": lambda table, path: pq.write_table(table, path, row_group_size=10, store_schema=False),
    "x.arrow": _file("uncompressed"),
    "x.feather": _file("lz4"),
    "stream.arrow": _stream,
}


@pytest.mark.parametrize("name", KINDS)
def test_each_damaged_copy_gives_rows_or_an_error_with_its_name(tmp_path, name):
    random = np.random.default_rng(0)
    columns = {
        "bytes": pa.array([random.bytes(6) for _ in range(20)], pa.binary(6)),
        "flag": pa.array(random.integers(0, 2, 20).astype(bool)),
        "number": pa.array(np.arange(20, dtype=np.int32)),
    }
    if name != "x.parquet":  # has lists of one length only by the Arrow schema in its metadata
        columns["list"] = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(40, dtype=np.int16)), 2)
    KINDS[name](pa.table(columns), tmp_path / name)
    run = programs.run(
        [sys.executable, str(READ), str(tmp_path / name), "400"], capture_output=True, text=True, timeout=300
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, f"copy {lines[-1]} ended the process: {run.stderr[-500:]}"
    outcomes = [line.split(" ", 1)[1] for line in lines]
    kinds = collections.Counter(outcome.split(" ", 1)[0] for outcome in outcomes)
    assert set(kinds) <= {"read", "ValueError", "TypeError", "RowError"}, kinds
    assert kinds["read"] > 100
    assert kinds["ValueError"] > 100
    for outcome in outcomes:
        assert outcome.startswith("read") or "PATH" in outcome or "at least one row" in outcome, outcome
