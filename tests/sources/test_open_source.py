"""What `open_source` refuses to open: objects that are no paths, and files of text."""

from pathlib import Path

import grain
import numpy as np
import pyarrow as pa
import pytest

import feedline

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"x": np.arange(3)}, "a path, a glob or a .*, got a dict; other sources need not be opened"),
        (grain.MapDataset.range(3), "other sources need not be opened"),
        (pa.table({"x": [1]}), r"a table is no source, .* got a Table; pass \{name: table\[name\]"),
    ],
    ids=["arrays", "dataset", "table"],
)
def test_what_needs_no_opening(given, match):
    with pytest.raises(TypeError, match=match):
        feedline.open_source(given)


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("rows.json", "text#files-of-tokens"),
        ("rows.json.zst", "formats"),
        ("rows.txt", "text#files-of-tokens"),
    ],
)
def test_files_of_text_name_the_page_that_says_what_to_do(tmp_path, name, page):
    page, _, anchor = page.partition("#")
    with pytest.raises(ValueError, match=rf"files of rows end in .*, got .*{name}; .*docs/{page}\.md") as caught:
        feedline.open_source(tmp_path / name)
    assert f"docs/{page}.md#{anchor}".rstrip("#") in str(caught.value)
    assert f"## {anchor.replace('-', ' ')}" in (DOCS / f"{page}.md").read_text().lower()


@pytest.mark.parametrize(
    ("address", "match"),
    [
        ("", r"a path must name a file or a folder, and is empty; the working directory is '\.'"),
        (
            "file:///data/x.npy",
            "stores are read by addresses with s3://, gs://, az://, http.*got file:///data/x.npy;",
        ),
        ("hf://data/*.parquet", "stores are read by addresses with s3://, .*, got hf:"),
    ],
)
def test_what_is_no_path_and_no_address_is_refused(address, match):
    with pytest.raises(ValueError, match=match):
        feedline.open_source(address)
