"""Raw binary files and windows of tokens, against NumPy slicing."""

import numpy as np
import pytest

import feedline

RECORD = np.dtype([("image", np.uint8, (4, 3)), ("label", "<i4")])


def _cut(shards, length, stride):
    """Windows shard by shard, in a loop."""
    return np.array([shard[i : i + length] for shard in shards for i in range(0, len(shard) - length + 1, stride)])


@pytest.mark.parametrize("kind", ["bin", "npy"])
@pytest.mark.parametrize(("length", "stride"), [(8, None), (9, 8), (8, 3), (1, 1), (64, 64)])
def test_windows_never_cross_the_border_of_a_file(tmp_path, is_source_of, kind, length, stride):
    shards = [np.random.default_rng(i).integers(0, 1 << 16, n, np.uint16) for i, n in enumerate((200, 64, 5, 131))]
    for i, shard in enumerate(shards):
        shard.tofile(tmp_path / f"{i}.bin")
        np.save(tmp_path / f"{i}.npy", shard)
    dtype = {"dtype": np.uint16} if kind == "bin" else {}
    source = feedline.open_source(
        tmp_path / f"*.{kind}", window=length, stride=stride, columns=["tokens"], **dtype
    )
    is_source_of(source, {"tokens": _cut(shards, length, stride or length)})


def test_raw_records_are_dicts_of_their_fields(tmp_path, is_source_of):
    random = np.random.default_rng(0)
    records = np.empty(50, RECORD)
    records["image"], records["label"] = random.integers(0, 255, (50, 4, 3)), random.integers(0, 9, 50)
    for i in range(2):
        records[i * 30 : i * 30 + 30].tofile(tmp_path / f"{i}.bin")
    np.save(tmp_path / "records.npy", records)
    for source in (
        feedline.open_source(tmp_path / "?.bin", dtype=RECORD),
        feedline.open_source(tmp_path / "records.npy"),
    ):
        is_source_of(source, {"image": records["image"], "label": records["label"]})
    only = feedline.open_source(tmp_path / "records.npy", columns={"label": "keys are ordered"}.keys())
    is_source_of(only, {"label": records["label"]})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, r"x\.bin cannot be read .* raw bytes do not say what they are"),
        ({"dtype": np.uint64}, ValueError, r"divides the size of the file, got dtype=uint64 and 100 bytes"),
        ({"dtype": object}, TypeError, "numbers of a fixed size, got dtype"),
        ({"dtype": "V"}, TypeError, "numbers of a fixed size, got dtype"),
        ({"dtype": "U4"}, ValueError, "100 bytes"),
        ({"dtype": "U5"}, TypeError, "holds numbers and booleans"),
        ({"dtype": np.uint8, "window": 101}, ValueError, "whose windows have 101 elements"),
        ({"dtype": np.uint8, "window": 0}, ValueError, "window must be at least 1"),
        ({"dtype": np.uint8, "stride": 4}, ValueError, "stride=4 with window=None"),
        ({"dtype": np.uint8, "window": 4, "stride": 5}, ValueError, "1 to window, got stride=5"),
        ({"dtype": np.uint8, "columns": "tokens"}, TypeError, "columns must be a sequence of names"),
        ({"dtype": np.uint8, "columns": {"tokens"}}, TypeError, "columns must be a sequence of names"),
        ({"dtype": np.uint8, "columns": 3}, TypeError, "columns must be a sequence of names"),
        ({"dtype": np.uint8, "columns": ["a", "b"]}, ValueError, "array, so columns must have one name for it"),
        ({"dtype": np.uint8, "cache_bytes": 1}, ValueError, r"cache_bytes is for .*\.parquet"),
    ],
)
def test_invalid_options_are_refused(tmp_path, options, error, match):
    np.arange(100, dtype=np.uint8).tofile(tmp_path / "x.bin")
    with pytest.raises(error, match=match):
        feedline.open_source(tmp_path / "x.bin", **options)
