"""Tar archives: what WebDataset writes is read as it reads it; what is no archive of records is refused."""

import gzip
import os
import tarfile

import numpy as np
import pytest
from tar_files import write_tar
from webdataset import TarWriter, tariterators

import feedline

SAMPLES = [
    {"__key__": f"photos/v1.0/{i:04}", "jpg": os.urandom(3000 * i), "cls": b"%d" % i, "seg.png": b"s" * i}
    for i in range(5)
]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def test_records_are_those_of_webdataset(tmp_path):
    with TarWriter(str(tmp_path / "a.tar"), encoder=False) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    source = feedline.open_source(tmp_path / "a.tar")
    assert sorted(source.fields) == ["cls", "jpg", "seg.png"]
    with open(tmp_path / "a.tar", "rb") as file:
        members = tariterators.tar_file_expander([{"url": "a.tar", "stream": file}])
        theirs = [{name: each[name] for name in source.fields} for each in tariterators.group_by_keys(members)]
    assert theirs == [{name: sample[name] for name in source.fields} for sample in SAMPLES]
    assert source.records(np.array([4, 0, 0, 3, 2, 1])) == [theirs[i] for i in (4, 0, 0, 3, 2, 1)]
    some = feedline.open_source(tmp_path / "a.tar", columns=["cls"])
    assert (some[4], some.fields) == ({"cls": b"4"}, ("cls",))
    assert some.identity != source.identity


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_part_of_a_record_is_left_out(tmp_path, form):
    folder, long = tarfile.TarInfo("x"), "folder/" * 15
    folder.type = tarfile.DIRTYPE
    members = [
        folder, ("README", b"no"), ("._1.jpg", b"mac"), ("__meta__/info.json", b"{}"), (f"{long}1.JPG", b"one"),
        (f"{long}1.txt", b"1"), (f"{long}2.txt", b"2"), (f"{long}2.jpg", b"two"),
    ]  # fmt: skip
    source = feedline.open_source(write_tar(tmp_path / "x.tar", members, form))
    assert [source[0], source[1]] == [{"jpg": b"one", "txt": b"1"}, {"jpg": b"two", "txt": b"2"}]


def link(name, kind):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "1.jpg"
    return info


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "it must have records, and .*x.tar has none"),
        ([("1.jpg", b""), ("1.txt", b""), ("2.jpg", b"")], "'2' has jpg, but the first record, '1', has jpg, txt"),
        ([("1.jpg", b""), ("1.jpg", b"")], "each field once, and '1.jpg' comes .* a second time"),
        ([("1.jpg", b""), ("1.JPG", b"")], "each field once, and '1.JPG' comes"),
        ([("1.jpg", b""), ("2.jpg", b""), ("1.txt", b"")], "adjacent, .*'1.txt' comes after .*--sort=name"),
        ([("1.jpg", b""), link("2.jpg", tarfile.SYMTYPE)], "regular files, and '2.jpg' is a link.*--dereference"),
        ([("1.jpg", b""), link("2.jpg", tarfile.LNKTYPE)], "regular files, and '2.jpg' is a link"),
        ([link("2.jpg", tarfile.GNUTYPE_SPARSE)], "regular files, and '2.jpg' is .*sparse"),
        ([link("2.jpg", tarfile.FIFOTYPE)], "regular files, and '2.jpg' is a link, sparse or special"),
        ([("a/../../1.jpg", b"")], "names must not lead out of a folder, and a member is named 'a/../../1.jpg'"),
    ],
)
def test_archives_that_are_no_records(tmp_path, members, message):
    with pytest.raises(ValueError, match=message):
        feedline.open_source(write_tar(tmp_path / "x.tar", members))


def test_files_with_different_fields_are_refused(tmp_path):
    write_tar(tmp_path / "1.tar", [("1.jpg", b"")])
    write_tar(tmp_path / "2.tar", [("2.png", b"")])
    with pytest.raises(ValueError, match=r"files must have the same fields, and .*2.tar has png, .*1.tar has jpg"):
        feedline.open_source(tmp_path / "*.tar")
    write_tar(tmp_path / "2.tar", [])
    assert len(feedline.open_source(tmp_path / "*.tar")) == 1


MEMBERS = [("1.jpg", b"one" * 300), ("1.txt", b"1"), ("2.jpg", b"two"), ("2.txt", b"2")]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: bytes(10240), "it must have records, and .* has none"),
        (gzip.compress, "cannot be read as a tar archive of records"),
        (lambda data: data[:700], "members must lie within the archive, and '1.jpg' has 900 bytes .* has 700"),
        (lambda data: data[:1536], "must end with blocks of zeros, and .* truncated"),
        (lambda data: data[:1600], "must end|cannot be read"),
        (lambda data: data.replace(b"2.jpg", b"?.jpg", 1), "must end after its"),
        (lambda data: data + data, "must end after its last member"),
    ],
)
def test_damaged_archives(tmp_path, damage, message):
    path = write_tar(tmp_path / "x.tar", MEMBERS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        feedline.open_source(path)
