"""ArrayRecord files of records of one size, against the arrays that they were written from."""

import jax
import numpy as np
import pytest
from rows_read import read_rows
from written_formats import write_records

import feedline

RECORD = np.dtype([("image", np.uint8, (4, 3)), ("label", "<i4")])


def _records(count, seed=0):
    random = np.random.default_rng(seed)
    records = np.empty(count, RECORD)
    records["image"], records["label"] = random.integers(0, 255, (count, 4, 3)), random.integers(-9, 9, count)
    return records


def test_groups_of_records_read_the_same_and_warn(tmp_path, is_source_of):
    records = _records(500)
    write_records(tmp_path / "x.array_record", [record.tobytes() for record in records], "group_size:64")
    with pytest.warns(UserWarning, match=r"x\.array_record was written in groups of 64 .* 'group_size:1'") as told:
        source = feedline.open_source(tmp_path / "x.array_record", dtype=RECORD)
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="groups of 64"):  # the unpickled source opens the file again
        is_source_of(source, {"image": records["image"], "label": records["label"]})


def test_a_record_of_another_size_is_named(tmp_path):
    records = [record.tobytes() for record in _records(50)]
    write_records(tmp_path / "a.array_record", records)
    write_records(tmp_path / "b.array_record", [*records[:7], b"short", *records[8:]])
    source = feedline.open_source(tmp_path / "?.array_record", dtype=RECORD)
    with pytest.raises(feedline.RowError, match=r"16 bytes of dtype .*, but a record has 5 bytes") as error:
        read_rows(source, np.arange(100)[::-1])
    assert (error.value.row, error.value.file) == (57, str(tmp_path / "b.array_record"))


def test_closing_a_source_does_not_disturb_a_read_of_another_thread(tmp_path):
    write_records(tmp_path / "x.array_record", [b"abc", b"de"])
    source = feedline.open_source(tmp_path / "x.array_record")
    assert source[0] == b"abc"
    reader = source._tables[0].close.__self__._opened[1]  # what another thread reads from
    source.close()
    assert reader.read([1]) == [b"de"]
    assert source[1] == b"de"


def test_what_is_refused(tmp_path):
    path = tmp_path / "x.array_record"
    write_records(path, [record.tobytes() for record in _records(2000)])
    (tmp_path / "cut.array_record").write_bytes(path.read_bytes()[:-70_000])
    with pytest.raises(ValueError, match=r"cut\.array_record cannot be read as an ArrayRecord file"):
        feedline.open_source(tmp_path / "cut.array_record", dtype=RECORD)
    write_records(tmp_path / "none.array_record", [])
    with pytest.raises(ValueError, match=r"at least one row, got .*none\.array_record with none"):
        feedline.open_source(tmp_path / "none.array_record", dtype=RECORD)
    write_records(path, [b"abcd"])
    with pytest.raises(ValueError, match=r"give open_source dtype=.*x\.array_record"):
        feedline.open_source(path, columns=["x"])
    with pytest.raises(TypeError, match=r"are bytes; .*decoded.*, or if all records have one size, give .* dtype"):
        feedline.Feed(path, 1, jax.devices()[0])
