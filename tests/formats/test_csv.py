"""CSV files against the rows that they were written from."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pytest

import feedline

COUNT = 500
ROWS = {"label": np.arange(COUNT), "score": np.arange(COUNT) / 8, "good": np.arange(COUNT) % 2 == 0}


def _text(rows, delimiter=","):
    lines = [delimiter.join(rows), *(delimiter.join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.mark.parametrize(("suffix", "delimiter"), [("csv", ","), ("tsv-00000-of-00001", "\t")])
def test_numbers_are_leaves(tmp_path, is_source_of, suffix, delimiter):
    (tmp_path / f"x.{suffix}").write_bytes(_text(ROWS, delimiter))
    is_source_of(feedline.open_source(tmp_path / f"x.{suffix}"), ROWS)


def test_text_is_bytes(tmp_path):
    (tmp_path / "x.csv").write_bytes('n,text\n1,ä\n2,\n3,"a ""quoted"", line\nand another"\n'.encode())
    source = feedline.open_source(tmp_path / "x.csv")
    texts = [record["text"] for record in source.records(np.array([2, 0, 1]))]
    assert texts == [b'a "quoted", line\nand another', "ä".encode(), b""]
    (tmp_path / "y.csv").write_bytes(b"n,text\n1,\n2,\n")
    assert feedline.open_source(tmp_path / "y.csv", columns=["text"]).records(np.arange(2)) == [b"", b""]


def test_a_type_follows_from_all_rows(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"a\n" + b"1\n" * (1 << 20) + b"1.5\n")
    source = feedline.open_source(tmp_path / "x.csv")
    assert (source.spec["a"].dtype, source[-1]["a"]) == (np.float64, 1.5)
    (tmp_path / "y.csv").write_text(f"a,b,c,d\n1.5,1e300,inf,nan\n{2**70},1.5,{2**53 - 1},-NaN\n")
    source = feedline.open_source(tmp_path / "y.csv")
    np.testing.assert_equal(source[1], {"a": 2.0**70, "b": 1.5, "c": 2.0**53 - 1, "d": np.nan})


@pytest.mark.parametrize(
    ("number", "others"), [(2**63 + 2**20, f"{2**63 - 1},x"), (-(2**63), "NA,x"), (2**53 + 2, "nan,x")]
)
def test_integers_that_float64_rounds_are_refused(tmp_path, number, others):
    (tmp_path / "x.csv").write_text(f"id,t\n1,x\n{number},x\n1e3,x\n{others}\n")
    found = rf"'id' of .*x\.csv has integers that float64 .* {number}; leave it out.*'id': pyarrow\.uint64"
    with pytest.raises(ValueError, match=found):
        feedline.open_source(tmp_path / "x.csv")
    assert feedline.open_source(tmp_path / "x.csv", columns=["t"])[0] == b"x"


def test_missing_numbers_are_nulls(tmp_path, sharding, delivered):
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,1\n,2\nNA,3\n4,4\n5,5\n6,6\n7,7\n8,8\n")
    source = feedline.open_source(tmp_path / "x.csv")
    with pytest.raises(feedline.RowError, match="'a' is null in this row"):
        _ = source[2]
    with pytest.raises(feedline.RowError, match=r"'a' has 2 nulls; fill nulls .*x\.csv"):
        feedline.Feed(source, 8, sharding)
    reading = feedline.Reading(bad_rows="mask", bad_rows_budget=0.5)
    (batch,) = delivered(feedline.Feed(source, 8, sharding, epochs=1, reading=reading))
    assert sorted(np.asarray(batch["a"])[np.asarray(batch["valid"])].tolist()) == [1, *range(4, 9)]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"a,b\n", "at least one row, got .* with none"),
        (b"a,b\n1,2\n1,2,3\n", "cannot be read as a CSV file: .*Expected 2 columns, got 3.*correct the line"),
        (b"a,b\n1,2024-01-01\n", r"'b' is date32.*cast it: .*columns=\['a'\]"),
        ("a,b\n1,2\n".encode("utf-16"), "cannot be read as a CSV file: .*as UTF-8"),
        (b"a,b\x80\n1,2\n", "cannot be read as a CSV file: .*decode"),
        (b"a,b\n1,2\n3,4", "must end with a line break.*append one"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, data, found):
    (tmp_path / "x.csv").write_bytes(data)
    with pytest.raises((ValueError, TypeError), match=found) as error:
        feedline.open_source(tmp_path / "x.csv")
    assert str(tmp_path / "x.csv") in str(error.value)


def test_files_beyond_cache_bytes_are_refused_with_a_line_that_converts_them(tmp_path, is_source_of):
    rows = {name: ROWS[name] for name in ("label", "score")}
    for i in range(2):
        (tmp_path / f"{i}.csv").write_bytes(_text(rows))
    for cache_bytes, found in ((4000, "4[0-9]{3} bytes of text"), (7000, "8000 bytes in memory")):
        with pytest.raises(ValueError, match=rf"0\.csv has {found}; raise .*write_dataset.pyarrow\.csv\.open_csv"):
            feedline.open_source(tmp_path / "0.csv", cache_bytes=cache_bytes)
    with pytest.raises(
        ValueError, match=r"cache_bytes=9000 together, and the 2 files from .*0\.csv on have 16000 bytes"
    ):
        feedline.open_source(tmp_path / "*.csv", cache_bytes=9000)
    assert len(feedline.open_source(tmp_path / "*.csv", cache_bytes=16_000)) == 2 * COUNT
    pa.dataset.write_dataset(pa.csv.open_csv(tmp_path / "0.csv"), tmp_path / "converted", format="parquet")
    is_source_of(feedline.open_source(tmp_path / "converted" / "*.parquet"), rows)
