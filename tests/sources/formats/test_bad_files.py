"""Files that are empty or of another format than their name says: an error with their name and a fix."""

import numpy as np
import pytest

import feedline
from feedline.sources.file_formats import FORMATS

TEXT = b"no rows, but a line of text\n" * 300
SUFFIXES = sorted(FORMATS.keys() - {".zarr"})  # a folder


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
