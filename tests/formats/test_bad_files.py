"""Files that are empty or of another format than their name says: an error with their name and a fix."""

import numpy as np
import pytest

import feedline
from feedline._src.formats.registry import MODULES

TEXT = b"no rows, but a line of text\nand\tone, two, three\n" * 200
SUFFIXES = sorted(MODULES.keys() - {".zarr"})  # a folder


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("content", [b"", TEXT, b"\0" * 1536], ids=["empty", "text", "zeros"])
def test_they_are_refused(tmp_path, suffix, content):
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    options = {"dtype": np.dtype((np.uint8, 1111))} if suffix == ".bin" else {}
    with pytest.raises(
        ValueError, match=rf"{path}.*(write it again|check what wrote it)|{path}.*; it is another format"
    ):
        feedline.open_source(path, **options)


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
