"""Errors of damaged files that the cases of all formats do not cover."""

import numpy as np
import pytest

import feedline


def test_an_empty_file_of_metadata_of_zarr(tmp_path):
    (tmp_path / "rows.zarr").mkdir()
    (tmp_path / "rows.zarr" / "zarr.json").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"rows.zarr/zarr.json cannot be read as the metadata of Zarr: .*write it"
    ):
        feedline.open_source(tmp_path / "rows.zarr")


def test_an_error_does_not_quote_thousands_of_damaged_bytes(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", x=np.random.default_rng(0).integers(0, 255, 9000, np.uint8))
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[26:28] = (8000).to_bytes(2, "little")  # the length of the member's name
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(
        ValueError, match=r"x\.npz cannot be read as a \.npz file of numbers: its member 'x'"
    ) as caught:
        feedline.open_source(tmp_path / "x.npz")
    assert len(str(caught.value)) < 1000
