"""Files as records: order and labels, bad input, files that change, worker processes."""

import errno
import json
import os
import pickle
import threading

import numpy as np
import pytest

import feedline
from feedline._src.rows.encoded_source import EncodedSource

CONTENT = {
    "cat/1.jpg": b"\xff\xd8 one",
    "cat/10.jpg": b"",
    "cat/2.jpg": b"two" * 50_000,
    "cat-and-dog/1.jpg": b"both",
    "dog/ä.png": b"an umlaut",
}
CLASSES = ["cat", "cat-and-dog", "dog"]


def written(folder, content):
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def photos(tmp_path):
    return written(tmp_path / "photos", CONTENT)


def test_class_folders_give_labels(photos):
    written(photos, {".cache/x.jpg": b"no", "cat/.hidden": b"no"})
    source = feedline.open_source(photos)
    assert isinstance(source, EncodedSource)
    assert (source.classes, tuple(source.fields), len(source)) == (CLASSES, ("file", "label"), 5)
    expected = [
        {"file": data, "label": CLASSES.index(name.partition("/")[0])}
        for name, data in sorted(CONTENT.items(), key=lambda item: item[0].split("/"))
    ]
    rows = np.array([4, 0, 0, 3, 2, 1])
    assert source.records(rows) == [expected[row] for row in rows]
    assert [source[i] for i in range(-5, 0)] == expected
    assert source.file_of(1) == str(photos / "cat/10.jpg")
    assert repr(source) == f"<FolderSource: rows 5, file bytes, label int of 3 classes, from {photos}>"
    assert "int of 3 classes" in source._repr_html_()


def test_a_flat_folder_and_a_glob_give_bytes(photos, monkeypatch):
    monkeypatch.chdir(photos.parent)
    flat, some = feedline.open_source("photos/cat/"), feedline.open_source("photos/*/1.*")
    assert (flat.classes, flat.fields) == (None, None)
    assert flat.records(np.array([2, 0])) == [CONTENT["cat/2.jpg"], CONTENT["cat/1.jpg"]]
    assert [some[i] for i in range(len(some))] == [CONTENT["cat-and-dog/1.jpg"], CONTENT["cat/1.jpg"]]
    assert (some.fields, some.file_of(0)) == (None, "photos/cat-and-dog/1.jpg")
    os.chdir("photos/cat")
    here = feedline.open_source("*.jpg")
    assert (here[0], len(here)) == (CONTENT["cat/1.jpg"], 3)


def test_an_empty_class_folder_keeps_its_label(photos):
    (photos / "bird").mkdir()
    source = feedline.open_source(photos)
    assert source.classes == ["bird", *CLASSES]
    assert [record["label"] for record in source.records(np.arange(5))] == [1, 1, 1, 2, 3]


def test_the_identity_is_of_names_and_content_not_of_the_place(photos, tmp_path):
    identity = feedline.open_source(photos).identity
    assert feedline.open_source(written(tmp_path / "moved", CONTENT)).identity == identity
    assert str(tmp_path) not in str(identity)
    renamed = {name.replace("dog/", "wolf/"): data for name, data in CONTENT.items()}
    changed = CONTENT | {"cat/1.jpg": b"\xff\xd8 One"}
    for name, content in {"renamed": renamed, "changed": changed}.items():
        assert feedline.open_source(written(tmp_path / name, content)).identity != identity


@pytest.mark.parametrize(
    ("content", "path", "message"),
    [
        ({}, "", "at least one row, and the folder .* has no files that are not hidden"),
        ({".a": b""}, "", "at least one row"),
        ({"cat/1.jpg": b"", "README": b""}, "", "has README beside the folder cat.*open_source.*/\\*\\*/"),
        ({"train/cat/1.jpg": b""}, "", "has the folder cat; open .*/train if its folders are the classes"),
        ({"cat/1.jpg": b""}, "*", "a glob must match files, and .*/cat is a folder"),
        ({"cat/1.jpg": b"", "x.npy": b""}, "*", "one format, got , .npy"),
        ({"1.parquet": b"", "z.json": b""}, "", r"1.parquet holds many rows; open .*/\*.parquet"),
        ({"_SUCCESS": b"", "train-00000-of-00001": b""}, "", "holds many rows"),
        ({"1.jpg": b""}, "1.jpg", "files of rows end in"),
    ],
)
def test_what_cannot_be_opened(tmp_path, content, path, message):
    with pytest.raises(ValueError, match=message):
        feedline.open_source(os.path.join(written(tmp_path, content), path))


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*photos; check the path"):
        feedline.open_source(tmp_path / "photos")


def test_a_link_to_nothing_and_an_option_of_another_format(photos):
    with pytest.raises(ValueError, match=r"columns is for .*; leave it out"):
        feedline.open_source(photos, columns=["file"])
    (photos / "cat/3.jpg").symlink_to("gone.jpg")
    with pytest.raises(ValueError, match=r"3.jpg is a link to a file that does not exist"):
        feedline.open_source(photos)
    (photos / "cat/3.jpg").unlink()
    (photos / "cat/3.jpg").symlink_to("1.jpg")
    assert feedline.open_source(photos)[3]["file"] == CONTENT["cat/1.jpg"]


def test_a_feed_refuses_bytes_and_says_what_to_do(photos):
    for source in (photos, feedline.open_source(photos)):
        with pytest.raises(
            TypeError, match=r"rows of <FolderSource.* are bytes.*feedline.decoded\(source, decode"
        ):
            feedline.Feed(source, 2, None)


def test_files_that_change_are_an_error(photos):
    source = feedline.open_source(photos)
    source[0]
    (photos / "cat/1.jpg").write_bytes(b"longer than it was")
    with pytest.raises(feedline.FeedError, match=r"must not change while.*has 18 bytes and had 6"):
        source[0]
    (photos / "cat/1.jpg").unlink()
    with pytest.raises(feedline.FeedError, match="cannot be found any more"):
        source[0]
    with pytest.raises(feedline.FeedError, match=r"cannot be found any more|No such file"):
        _ = source.identity
    with pytest.raises(IndexError, match="rows are 0 to 4, got 2 to 5"):
        source.records(np.array([2, 5]))


def test_a_file_that_cannot_be_read_is_a_bad_row(photos):
    source = feedline.open_source(photos)
    (photos / "cat/10.jpg").unlink()
    (photos / "cat/10.jpg").mkdir()
    with pytest.raises(feedline.RowError, match="the bytes of a row must be readable, and") as caught:
        source.records(np.arange(5))
    assert (caught.value.row, caught.value.file) == (1, str(photos / "cat/10.jpg"))


def test_names_need_not_be_text(tmp_path):
    (tmp_path / "b.jpg").write_bytes(b"text")
    with open(os.fsencode(tmp_path) + b"/\xff.jpg", "wb") as file:
        file.write(b"no text")
    source = feedline.open_source(tmp_path)
    assert source.records(np.array([1, 0])) == [b"no text", b"text"]
    assert os.fsencode(source.file_of(1)).endswith(b"/\xff.jpg")
    json.dumps(source.identity)


def test_too_many_open_files_are_no_bad_row(photos, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.EMFILE, "Too many open files")

    source = feedline.open_source(photos)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        feedline.FeedError, match=r"no more can be opened .*raise the limit \(ulimit -n\)"
    ) as caught:
        source[0]
    assert not isinstance(caught.value, feedline.RowError)


def test_many_files_in_little_time_and_without_descriptors(tmp_path):
    for i in range(3000):
        (tmp_path / f"{i}.txt").write_bytes(b"%d" % i)
    before = len(os.listdir("/proc/self/fd"))
    source = pickle.loads(pickle.dumps(feedline.open_source(tmp_path)))
    names = sorted(f"{i}" + ".txt" for i in range(3000))
    rows = np.random.default_rng(0).permutation(3000)
    found = []
    threads = [
        threading.Thread(target=lambda some=some: found.append((some, source.records(some))))
        for some in np.array_split(rows, 4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for some, records in found:
        assert [record.decode() + ".txt" for record in records] == [names[row] for row in some]
    assert len(os.listdir("/proc/self/fd")) == before
    source.close()
