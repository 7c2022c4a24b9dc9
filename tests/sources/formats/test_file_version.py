"""A file that was replaced, rewritten or removed since it was opened is refused."""

import os

import pytest

from feedline._src.errors import FeedError
from feedline._src.sources.formats.file_version import FileVersion


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(16))
    return path


def test_the_same_file_passes_also_through_its_descriptor(path):
    version = FileVersion.of(path)
    version.check(path)
    with path.open("rb") as file:
        assert FileVersion.of_open(file.fileno()) == version


def replaced_by_an_equal_copy(path):
    copy = path.with_suffix(".new")
    copy.write_bytes(path.read_bytes())
    os.replace(copy, path)


def rewritten(path):
    before = path.stat().st_mtime_ns
    path.write_bytes(bytes([1] * 16))
    os.utime(path, ns=(before + 1, before + 1))


def truncated(path):
    os.truncate(path, 8)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (replaced_by_an_equal_copy, "another file lies at its path"),
        (rewritten, "it was written to"),
        (truncated, "it has 8 bytes and had 16"),
        (os.remove, "it cannot be found any more"),
    ],
)
def test_a_changed_file_is_refused(path, change, found):
    version = FileVersion.of(path)
    change(path)
    with pytest.raises(FeedError, match=found) as error:
        version.check(path)
    assert error.value.file == str(path)
    assert error.value.stage == "read"
