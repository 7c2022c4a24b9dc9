"""Files as records, local and in a store: order and labels, bad input, files that change."""

import os
import pickle
import threading

import numpy as np
import pytest
from background import PATIENCE_S

import feedline
from feedline._src.rows.source import EncodedSource

CONTENT = {
    "cat/1.jpg": b"\xff\xd8 one",
    "cat/10.jpg": b"",
    "cat/2.jpg": b"two" * 50_000,
    "cat-and-dog/1.jpg": b"both",  # a store lists it before "cat/"
    "dog/ä.png": b"an umlaut",
}
CLASSES = ["cat", "cat-and-dog", "dog"]


class Place:
    """A folder of files, local or in a store."""

    def __init__(self, root, bucket, options):
        self.root, self.bucket, self.options = root, bucket, options

    def write(self, content, name="photos"):
        for file, data in content.items():
            if self.bucket is not None:
                self.bucket.objects[f"/corpus/{name}/{file}"] = data
            else:
                (self.root / name / file).parent.mkdir(parents=True, exist_ok=True)
                (self.root / name / file).write_bytes(data)
        return f"s3://corpus/{name}" if self.bucket is not None else str(self.root / name)

    def delete(self, file, name="photos"):
        if self.bucket is not None:
            del self.bucket.objects[f"/corpus/{name}/{file}"]
        else:
            (self.root / name / file).unlink()

    def open(self, path, **options):
        return feedline.open_source(path, store=self.options, **options)


@pytest.fixture(params=["local", "store"])
def place(request, tmp_path):
    bucket = request.getfixturevalue("bucket") if request.param == "store" else None
    return Place(tmp_path, bucket, request.getfixturevalue("options"))


@pytest.fixture
def photos(tmp_path):
    return tmp_path / Place(tmp_path, None, None).write(CONTENT)


def test_class_folders_give_labels(place):
    path = place.write(CONTENT | {".cache/x.jpg": b"no", "cat/.hidden": b"no"})
    source = place.open(f"{path}/")
    assert isinstance(source, EncodedSource)
    assert (source.classes, tuple(source.fields), len(source)) == (CLASSES, ("file", "label"), 5)
    expected = [
        {"file": data, "label": CLASSES.index(name.partition("/")[0])}
        for name, data in sorted(CONTENT.items(), key=lambda item: item[0].split("/"))
    ]
    rows = np.array([4, 0, 0, 3, 2, 1])
    for each in (source, pickle.loads(pickle.dumps(source))):
        assert each.records(rows) == [expected[row] for row in rows]
    assert source.file_of(1) == f"{path}/cat/10.jpg"
    assert repr(source) == f"<FolderSource: rows 5, file bytes, label int of 3 classes, from {path}>"
    assert place.open(path).identity == source.identity
    with pytest.raises(IndexError, match="rows are 0 to 4, got 2 to 5"):
        source.records(np.array([2, 5]))
    with pytest.raises(ValueError, match=r"columns is for .*; leave it out"):
        place.open(path, columns=["file"])


def test_a_flat_folder_and_a_glob_give_bytes(place):
    path = place.write(CONTENT)
    flat, some = place.open(f"{path}/cat/"), place.open(f"{path}/*/1.*")
    assert (flat.classes, flat.fields) == (None, None)
    assert flat.records(np.array([2, 0])) == [CONTENT["cat/2.jpg"], CONTENT["cat/1.jpg"]]
    assert [some[i] for i in range(len(some))] == [CONTENT["cat-and-dog/1.jpg"], CONTENT["cat/1.jpg"]]
    assert (some.fields, some.file_of(0)) == (None, f"{path}/cat-and-dog/1.jpg")
    assert len(place.open(f"{path}/**/*.jpg")) == 4


def test_the_identity_is_of_names_and_content_not_of_the_place(place, tmp_path):
    source = place.open(place.write(CONTENT))
    assert feedline.open_source(Place(tmp_path, None, None).write(CONTENT, "moved")).identity == source.identity
    assert str(tmp_path) not in str(source.identity)
    glob = feedline.open_source(tmp_path / "moved" / "**" / "*.*")
    assert place.open(place.write(CONTENT) + "/**/*.*").identity == glob.identity
    renamed = {name.replace("dog/", "wolf/"): data for name, data in CONTENT.items()}
    changed = CONTENT | {"cat/1.jpg": b"\xff\xd8 One"}
    for name, content in {"renamed": renamed, "changed": changed}.items():
        assert place.open(place.write(content, name)).identity != source.identity
    (tmp_path / "moved" / "ant").mkdir()  # an empty class, before all others
    assert feedline.open_source(tmp_path / "moved").identity != source.identity


@pytest.mark.parametrize(
    ("content", "path", "message"),
    [
        ({".a": b""}, "/", "at least one row, and the folder .* has no files except hidden ones"),
        ({"cat/1.jpg": b"", "README": b"x"}, "/", "has README and cat.*open_source.*/\\*\\*/"),
        ({"a/1.jpg": b"1", "a/b/2.jpg": b"2"}, "/", "has a.1.jpg and a.b.2.jpg"),
        ({"cat/1.jpg": b"", "x.npy": b""}, "/**/*.*", "one format, got .jpg, .npy"),
        ({"1.parquet": b"", "z.json": b""}, "/", r"1.parquet holds many rows; open .*/\*.parquet"),
        ({"train/1.arrow": b"", "dataset_dict.json": b"{}"}, "/", "the dataset of one split, .*/train"),
        ({"1.jpg": b""}, "/1.jpg", "files of rows end in"),
    ],
)
def test_what_cannot_be_opened(place, content, path, message):
    with pytest.raises(ValueError, match=message):
        place.open(place.write(content) + path)


def test_files_that_change_are_an_error(place):
    path = place.write(CONTENT)
    source = place.open(path)
    if place.bucket is None:  # the version of a local file is noted at the first read
        assert source[0]["file"] == CONTENT["cat/1.jpg"]
    place.write({"cat/1.jpg": b"longer than it was"})
    with pytest.raises(feedline.FeedError, match=r"must not change.* (replaced|from 6 to 18)") as caught:
        source[0]
    assert type(caught.value) is feedline.FeedError
    assert caught.value.file == f"{path}/cat/1.jpg"
    place.delete("dog/ä.png")
    with pytest.raises(feedline.FeedError, match=r"cannot be found any more|no longer exists"):
        source[4]


def test_a_file_that_cannot_be_read_is_a_bad_row(photos):
    source = feedline.open_source(photos)
    (photos / "cat/10.jpg").unlink()
    (photos / "cat/10.jpg").mkdir()
    with pytest.raises(feedline.RowError, match="the bytes of a row must be readable, and") as caught:
        source.records(np.arange(5))
    assert (caught.value.row, caught.value.file) == (1, str(photos / "cat/10.jpg"))


def test_each_file_is_fetched_once_and_many_at_a_time(bucket, options, tmp_path):
    place = Place(tmp_path, bucket, options)
    files = {f"{i:03}.png": os.urandom(3000) for i in range(400)}
    source = place.open(place.write(files))
    bucket.requests.clear()
    rows, many = np.arange(400), threading.Event()

    def until_many(method, path, part):
        if bucket.most_at_once > 16:
            many.set()
        assert many.wait(PATIENCE_S)

    bucket.fault = until_many  # no request is answered before 17 are there
    for start in range(0, 400, 100):
        source.will_read(rows[start : start + 100], start // 100)
    assert source.records(rows[::-1].copy()) == list(files.values())[::-1]
    assert len(bucket.gets()) == 400
    bucket.requests.clear()
    assert place.open("s3://corpus/photos/").records(rows[:5])
    assert len(bucket.gets()) == 1  # the listing; the files are cached
