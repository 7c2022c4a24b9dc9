"""What `open_source` refuses to open: objects that are no paths, files of text, and addresses of no store."""

from pathlib import Path

import grain
import numpy as np
import pyarrow as pa
import pytest

import feedline

DOCS = Path(__file__).parents[2] / "docs"
STORES = "stores are read by addresses with s3://, gs://, az://, http.*"


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"x": np.arange(3)}, TypeError, "a path, a glob or a .*, got a dict; other sources need not be opened"),
        (grain.MapDataset.range(3), TypeError, "other sources need not be opened"),
        (pa.table({"x": [1]}), TypeError, r"a table is not a source, .* got a Table; pass \{name: table\[name\]"),
        ("", ValueError, r"a path must name a file or a folder, got an empty one; the working directory is '\.'"),
        ("file:///data/x.npy", ValueError, f"{STORES}got file:///data/x.npy;"),
        ("hf://data/*.parquet", ValueError, f"{STORES}, got hf:"),
    ],
    ids=str,
)
def test_what_is_no_path_and_no_address_is_refused(given, error, match):
    with pytest.raises(error, match=match):
        feedline.open_source(given)


@pytest.mark.parametrize(
    ("name", "page"), [("rows.json", "text"), ("rows.json.zst", "formats"), ("rows.txt", "text")]
)
def test_files_of_text_name_the_page_that_says_what_to_do(tmp_path, name, page):
    with pytest.raises(ValueError, match=rf"files of rows end in .*, got .*{name}; .*docs/{page}\.md") as caught:
        feedline.open_source(tmp_path / name)
    if page == "text":
        assert "docs/text.md#files-of-tokens" in str(caught.value)
        assert "## files of tokens" in (DOCS / "text.md").read_text().lower()
