"""Files as records, local and in a store: order and labels, bad input, files that change."""

import errno
import io
import json
import os
import pickle
import threading

import jax
import numpy as np
import PIL.Image
import pytest

import feedline
from feedline._src.rows.encoded_source import EncodedSource

CONTENT = {
    "cat/1.jpg": b"\xff\xd8 one",
    "cat/10.jpg": b"",
    "cat/2.jpg": b"two" * 50_000,
    "cat-and-dog/1.jpg": b"both",  # in a store listed before "cat/"
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
        assert each.will_read is None or each.will_read(rows, 0)
        assert each.records(rows) == [expected[row] for row in rows]
    assert [source[i] for i in range(-5, 0)] == expected
    assert source.file_of(1) == f"{path}/cat/10.jpg"
    assert repr(source) == f"<FolderSource: rows 5, file bytes, label int of 3 classes, from {path}>"
    assert "int of 3 classes" in source._repr_html_()
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


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("*.jpg", "1.jpg"),
        ("?1.jpg", ""),
        ("[.]1.jpg", ""),
        (".*.jpg", ".1.jpg"),
        ("**/*.jpg", "1.jpg a/1.jpg a/b/1.jpg"),
        ("**/.*.jpg", ".1.jpg a/.1.jpg"),
        ("*/1.jpg", "a/1.jpg"),
        (".h/**/*.jpg", ".h/1.jpg"),
        ("a[!x]1.jpg", ""),
        ("a**/1.jpg", "a/1.jpg"),
    ],
)
def test_a_glob_takes_hidden_names_only_where_it_has_their_dot(place, pattern, found):
    names = ["1.jpg", ".1.jpg", "a/1.jpg", "a/.1.jpg", "a/b/1.jpg", ".h/1.jpg", ".h/.i/1.jpg"]
    path = place.write({name: name.encode() for name in names})
    if found:
        assert b" ".join(place.open(f"{path}/{pattern}")) == found.encode()
    else:
        with pytest.raises(FileNotFoundError, match="matches"):
            place.open(f"{path}/{pattern}")


def test_paths_may_be_relative(photos, monkeypatch):
    monkeypatch.chdir(photos / "cat")
    here = feedline.open_source("*.jpg")
    assert (here[0], here.file_of(0), len(here)) == (CONTENT["cat/1.jpg"], "1.jpg", 3)
    above = feedline.open_source("..")
    assert above.classes == CLASSES
    monkeypatch.chdir("/")
    for source in (here, pickle.loads(pickle.dumps(here))):
        assert (source[0], source.identity) == (CONTENT["cat/1.jpg"], here.identity)
    assert pickle.loads(pickle.dumps(above))[-1] == above[len(above) - 1]


def test_an_empty_class_folder_keeps_its_label(place):
    path = place.write(CONTENT)
    if place.bucket is None:
        os.mkdir(f"{path}/bird")
    else:
        place.write({"bird/": b"", "dog/": b""})  # as some programs mark a folder
    source = place.open(path)
    assert source.classes == ["bird", *CLASSES]
    assert [record["label"] for record in source.records(np.arange(5))] == [1, 1, 1, 2, 3]


def test_the_identity_is_of_names_and_content_not_of_the_place(place, tmp_path):
    source = place.open(place.write(CONTENT))
    assert feedline.open_source(Place(tmp_path, None, None).write(CONTENT, "moved")).identity == source.identity
    assert str(tmp_path) not in str(source.identity)
    renamed = {name.replace("dog/", "wolf/"): data for name, data in CONTENT.items()}
    changed = CONTENT | {"cat/1.jpg": b"\xff\xd8 One"}
    for name, content in {"renamed": renamed, "changed": changed}.items():
        assert place.open(place.write(content, name)).identity != source.identity


@pytest.mark.parametrize(
    ("content", "path", "message"),
    [
        ({".a": b""}, "/", "at least one row, and the folder .* has no files that are not hidden"),
        ({"cat/1.jpg": b"", "README": b"x"}, "/", "has README and cat.*open_source.*/\\*\\*/"),
        ({"a/1.jpg": b"1", "a/b/2.jpg": b"2"}, "/", "has a.1.jpg and a.b.2.jpg"),
        ({"train/cat/1.jpg": b""}, "/", "open a folder whose folders are the classes"),
        ({"cat/1.jpg": b"", "x.npy": b""}, "/**/*.*", "one format, got .jpg, .npy"),
        ({"1.parquet": b"", "z.json": b""}, "/", r"1.parquet holds many rows; open .*/\*.parquet"),
        ({"_SUCCESS": b"", "train-00000-of-00001": b""}, "/", "holds many rows"),
        ({"train/1.arrow": b"", "dataset_dict.json": b"{}"}, "/", "the dataset of one split, .*/train"),
        ({"1.jpg": b""}, "/1.jpg", "files of rows end in"),
    ],
)
def test_what_cannot_be_opened(place, content, path, message):
    with pytest.raises(ValueError, match=message):
        place.open(place.write(content) + path)


def test_folders_that_are_none(photos, store):
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*none; check the path"):
        feedline.open_source(photos / "none")
    with pytest.raises(ValueError, match=r"a glob must match files, and .*/cat is a folder"):
        feedline.open_source(photos / "*")
    with pytest.raises(ValueError, match="a web server does not list its files, so a folder must lie in s3://"):
        feedline.open_source(f"{store.url}/train/")


def test_links(photos):
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


def test_a_feed_decodes_images(place):
    files = {}
    for i in range(24):
        file = io.BytesIO()
        PIL.Image.fromarray(np.full((9, 8, 3), 10 * i, np.uint8)).save(file, "png")
        files[f"{'ab'[i % 2]}/{i:02}.png"] = file.getvalue()
    source = feedline.images.decode(place.open(place.write(files)), size=8)
    assert (source.will_read is None) == (place.bucket is None)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with feedline.Feed(source, 8, sharding, epochs=1) as feed:
        batches = [jax.device_get(batch) for batch in feed]
    assert sorted(int(image.mean()) for b in batches for image in b["image"]) == [10 * i for i in range(24)]
    assert all((b["image"].mean(axis=(1, 2, 3)) // 10 % 2 == b["label"]).all() for b in batches)


def test_files_that_change_are_an_error(place):
    path = place.write(CONTENT)
    source = place.open(path)
    if place.bucket is None:  # a local file is noted when it is read first
        assert source[0]["file"] == CONTENT["cat/1.jpg"]
    place.write({"cat/1.jpg": b"longer than it was"})
    with pytest.raises(feedline.FeedError, match=r"must not change.* has 18 bytes and had 6") as caught:
        source[0]
    assert type(caught.value) is feedline.FeedError
    assert caught.value.file == f"{path}/cat/1.jpg"


def test_a_deleted_file_is_no_bad_row(photos):
    source = feedline.open_source(photos)
    (photos / "cat/1.jpg").unlink()
    for use in (lambda: source[0], lambda: source.identity):
        with pytest.raises(feedline.FeedError, match="cannot be found any more") as caught:
            use()
        assert not isinstance(caught.value, feedline.RowError)


def test_a_store_in_trouble_is_no_bad_row(bucket, tmp_path):
    place = Place(tmp_path, bucket, feedline.Store(cache=tmp_path, patience_s=0.2))
    source = place.open(place.write(CONTENT))
    bucket.fault = lambda *request: 503
    assert source.will_read(np.array([3]), 0)
    with pytest.raises(feedline.FeedError, match=r"within patience_s=0\.2") as caught:
        source[3]
    assert not isinstance(caught.value, feedline.RowError)
    bucket.fault = lambda *request: None
    assert source[3]["file"] == CONTENT["cat-and-dog/1.jpg"]
    source.close()


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


def test_each_file_is_fetched_once_and_many_at_a_time(bucket, options, tmp_path):
    place = Place(tmp_path, bucket, options)
    files = {f"{i:03}.png": os.urandom(3000) for i in range(400)}
    source = place.open(place.write(files))
    bucket.latency_s = 0.2
    bucket.requests.clear()
    rows = np.arange(400)
    for start in range(0, 400, 100):
        source.will_read(rows[start : start + 100], start // 100)
    assert source.records(rows[::-1].copy()) == list(files.values())[::-1]
    assert len(bucket.gets()) <= 410  # some late ones are hedged
    assert bucket.most_at_once > 16
    bucket.requests.clear()
    assert place.open("s3://corpus/photos/").records(rows[:5])
    assert len(bucket.gets()) == 1  # the listing


def test_threads_read_many_files_without_descriptors(tmp_path):
    for i in range(3000):
        (tmp_path / f"{i}.txt").write_bytes(b"%d" % i)
    before = len(os.listdir("/proc/self/fd"))
    source = pickle.loads(pickle.dumps(feedline.open_source(tmp_path)))
    names = sorted(f"{i}.txt" for i in range(3000))
    found = {}

    def read(rows):
        found[rows[0]] = [record.decode() + ".txt" for record in source.records(rows)] == [names[r] for r in rows]

    rows = np.random.default_rng(0).permutation(3000)
    threads = [threading.Thread(target=read, args=(some,)) for some in np.array_split(rows, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [True] * 4
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer, once earlier tests let go of theirs
    source.close()
