"""Folders of files, local and in a store: names, parts of many files at once, missing and changed files."""

import os
import pickle

import pytest

import feedline
from feedline._src.files.folder import folder_at, folder_of, listed_folder
from feedline._src.rows import digests

FILES = {"b/2": b"22222", "a/1": b"1" * 300_000, "a/3": b"", "a-/4": b"4", ".hidden/5": b"5", "a/.6": b"6"}
VISIBLE = ["a/1", "a/3", "a-/4", "b/2"]


@pytest.fixture(params=["local", "s3"])
def place(request, tmp_path, bucket):
    """(the address of a folder, a function that writes a file into it, one that deletes it)"""
    folder = tmp_path / "folder"

    def write(name, data):
        bucket.objects[f"/corpus/x/{name}"] = data
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    def delete(name):
        del bucket.objects[f"/corpus/x/{name}"]
        (folder / name).unlink()

    for name, data in FILES.items():
        write(name, data)
    return (str(folder) if request.param == "local" else "s3://corpus/x"), write, delete


def test_listed_files_are_read_by_number_also_by_another_process(place, options):
    folder = listed_folder(place[0], options)
    expected = sorted(VISIBLE, key=lambda name: name.split("/"))
    assert list(folder.names) == expected
    for each in (folder, pickle.loads(pickle.dumps(folder))):
        assert each.read(range(len(each.names))) == [FILES[name] for name in expected]
    assert folder.digests([0]) == [digests.of_samples(300_000, [b"1" * 4096] * 16)]
    assert folder.path_of(0) == f"{place[0]}/a/1"


def test_a_listed_file_that_changed_or_is_gone_is_refused(place, options):
    address, write, delete = place
    folder = listed_folder(address, options)
    assert folder.read([0]) == [FILES["a/1"]]
    pickled = pickle.dumps(folder)
    write("a-/4", b"44")
    delete("b/2")
    if folder.in_store:
        for each in (folder, pickle.loads(pickled)):
            with pytest.raises(feedline.FeedError, match="it has 2 bytes and had 1"):
                each.read([list(each.names).index("a-/4")])
    write("a/1", b"0" * 10)
    if not folder.in_store:
        with pytest.raises(feedline.FeedError, match="it was replaced or written to"):
            folder.read([0])
    with pytest.raises(feedline.FeedError, match=r"cannot be found any more|not there any more"):
        folder.read([list(folder.names).index("b/2")])


def test_files_by_name_and_the_proof_that_one_is_missing(place, options):
    address, write, delete = place
    write("mark", b"m")
    folder = folder_at(address, options)
    assert folder.read(["none", "b/2", "none/x", "mark"]) == [None, FILES["b/2"], None, b"m"]
    assert folder.sizes(["a/1", "none"]) == [300_000, None]
    assert folder.folders() == [*([".hidden"] if ".hidden" in folder.folders() else []), "a", "a-", "b"]
    folder.check(["mark"])
    versions = {"mark": folder.versions["mark"]}
    assert folder_at(address, options, versions).read(["mark"]) == [b"m"]
    write("mark", b"another")
    uses = [
        lambda: folder.check(["mark"]),
        lambda: folder_at(address, options, versions).read(["mark"]),
        lambda: folder_at(address, options, versions).sizes(["mark"]),
    ]
    for use in uses:
        with pytest.raises(feedline.FeedError, match="it has 7 bytes and had 1"):
            use()
    delete("mark")
    for use in uses:
        with pytest.raises(feedline.FeedError, match=r"cannot be found any more|not there any more"):
            use()


def test_parts_that_will_be_read_are_fetched_before(place, options, bucket):
    folder = listed_folder(place[0], options)
    files = range(len(folder.names))
    assert folder.will_read(files, 0)
    found = folder.read(files)
    bucket.requests.clear()
    assert folder.read(files) == found
    assert bucket.requests == []
    folder.close()


def test_files_of_a_glob_are_named_relative_to_what_holds_them(tmp_path):
    for name in ("x/a/1", "x/b/2"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(name.encode())
    folder = folder_of([str(tmp_path / name) for name in ("x/b/2", "x/a/1")])
    assert list(folder.names) == [os.path.join("b", "2"), os.path.join("a", "1")]
    assert folder.read([0]) == [b"x/b/2"]
