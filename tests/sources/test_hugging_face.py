"""Datasets of Hugging Face: rows are compared with those of `dataset[i]`, which shares no code with ours."""

import datetime
import os
import pickle
import re
import shutil
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import

import datasets
import grain
import jax
import numpy as np
import pytest
import simplejpeg
from datasets import Array2D, Array3D, ClassLabel, Dataset, Features, Image, List, Value
from rows_read import read_rows
from test_docs import run

import feedline
from feedline._src.rows.source import EncodedSource

pytestmark = pytest.mark.slow

datasets.disable_progress_bars()
COUNT = 40
NUMBERS = Features(
    {
        "small": Value("int8"),
        "real": Value("float32"),
        "flag": Value("bool"),
        "label": ClassLabel(names=["no", "yes"]),
        "tokens": List(Value("int32")),
        "box": List(Value("float64"), length=4),
        "nested": List(List(Value("int16"), length=2)),
        "inner": List(List(Value("float32")), length=2),
        "grey": Array2D((2, 3), "uint8"),
        "cube": Array3D((2, 3, 2), "float32"),
    }
)
WORDS = [f"ä{i}" * (i % 3) for i in range(COUNT)]
JPEGS = [simplejpeg.encode_jpeg(np.full((9, 9 + i, 3), 6 * i, np.uint8)) for i in range(COUNT)]


def numbers(count=COUNT, seed=0):
    draw = np.random.default_rng(seed)
    return Dataset.from_dict(
        {
            "small": draw.integers(-128, 128, count).astype(np.int8),
            "real": draw.normal(size=count).astype(np.float32),
            "flag": draw.integers(0, 2, count).astype(bool),
            "label": draw.integers(0, 2, count),
            "tokens": draw.integers(0, 1 << 30, (count, 5)).tolist(),
            "box": draw.normal(size=(count, 4)).tolist(),
            "nested": draw.integers(0, 99, (count, 3, 2)).tolist(),
            "inner": draw.normal(size=(count, 2, 3)).astype(np.float32).tolist(),
            "grey": draw.integers(0, 255, (count, 2, 3)).astype(np.uint8),
            "cube": draw.normal(size=(count, 2, 3, 2)).astype(np.float32),
        },
        features=NUMBERS,
    )


def saved(dataset, folder, shards=3):
    dataset.save_to_disk(folder, num_shards=shards)
    return datasets.load_from_disk(folder)


VARIANTS = {
    "in memory": lambda dataset, _: dataset,
    "on disk": saved,
    "shuffled": lambda dataset, folder: saved(dataset, folder).shuffle(seed=1),
    "repeated rows": lambda dataset, folder: saved(dataset, folder).select([3, 3, 39, 0, 3]),
    "rows joined": lambda dataset, folder: datasets.concatenate_datasets(
        [dataset, saved(dataset, folder).shuffle(seed=1)]
    ),
    "some of a format": lambda dataset, folder: saved(dataset, folder).with_format("numpy", ["grey", "label"]),
    "all of a format": lambda dataset, folder: saved(dataset, folder).with_format(
        "numpy", ["grey"], output_all_columns=True
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_are_those_of_the_dataset(tmp_path, variant):
    dataset = VARIANTS[variant](numbers(), str(tmp_path / "saved"))
    source = feedline.open_source(dataset)
    expected = [dict(row) for row in dataset]
    assert len(source) == len(expected) > 0
    assert source.spec.keys() == expected[0].keys()
    rows = np.random.default_rng(1).permutation(np.arange(2 * len(source)) % len(source))
    for name, found in read_rows(source, rows).items():
        np.testing.assert_array_equal(found, [expected[row][name] for row in rows], err_msg=name)
    with pytest.raises(IndexError):
        read_rows(source, [len(source)])
    copy = pickle.loads(pickle.dumps(source))
    assert (copy.identity, copy.spec) == (source.identity, source.spec)


def test_dtypes_are_those_of_the_columns():
    source = feedline.open_source(numbers())
    assert {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in source.spec.items()} == {
        "small": "int8[]", "real": "float32[]", "flag": "bool[]", "label": "int64[]", "tokens": "int32[5]",
        "box": "float64[4]", "nested": "int16[3, 2]", "inner": "float32[2, 3]", "grey": "uint8[2, 3]",
        "cube": "float32[2, 3, 2]",
    }  # fmt: skip


def test_a_feed_goes_on_after_the_dataset_was_moved_and_cut_into_other_files(tmp_path):
    dataset = saved(numbers(), tmp_path / "here").shuffle(seed=5)
    with feedline.Feed(feedline.open_source(dataset), 8, jax.devices()[0]) as feed:
        for _ in range(7):  # into the second epoch
            rows = feed.rows_of(feed.get_state())
            batch = next(feed)
            np.testing.assert_array_equal(batch["grey"], dataset[rows]["grey"])
            np.testing.assert_array_equal(batch["tokens"], dataset[rows]["tokens"])
        state = feed.get_state()
        expected = [next(feed) for _ in range(3)]
    again = saved(dataset, tmp_path / "there", 2)  # a save copies the rows in their new order
    shutil.rmtree(tmp_path / "here")
    with feedline.Feed(feedline.open_source(again), 8, jax.devices()[0]) as feed:
        feed.set_state(state)
        for batch in expected:
            jax.tree.map(np.testing.assert_array_equal, next(feed), batch)


def test_the_identity_follows_the_rows_only(tmp_path):
    dataset = saved(numbers(), tmp_path / "a")
    identity = feedline.open_source(dataset).identity
    for same in (numbers(), saved(dataset, tmp_path / "b", 5)):
        assert feedline.open_source(same).identity == identity
    shuffled = dataset.shuffle(seed=1)
    of_shuffled = feedline.open_source(shuffled).identity
    assert of_shuffled == feedline.open_source(shuffled.flatten_indices()).identity != identity
    changed = dataset.map(lambda row: {"real": -row["real"]})
    renamed = dataset.rename_column("real", "imaginary")
    for other in (feedline.open_source(changed), feedline.open_source(renamed, columns=["imaginary"])):
        assert other.identity != identity


# --- images, text and bytes ---


def encoded():
    return Dataset.from_dict(
        {
            "image": JPEGS,
            "text": WORDS,
            "label": [i % 2 for i in range(COUNT)],
            "box": [[i, 2.0 * i] for i in range(COUNT)],
        },
        features=Features(
            {
                "image": Image(),
                "text": Value("string"),
                "label": ClassLabel(names=["a", "b"]),
                "box": List(Value("float32")),
            }
        ),
    )


@pytest.mark.parametrize("select", [None, [5, 5, 39, 0]])
def test_images_and_text_are_encoded_rows(select):
    dataset = encoded() if select is None else encoded().select(select)
    source = pickle.loads(pickle.dumps(feedline.open_source(dataset)))
    assert isinstance(source, EncodedSource)
    assert source.fields == ("image", "text", "label", "box")
    assert repr(source).endswith("image bytes, text bytes, label int64[], box float32[2], from datasets.Dataset>")
    order = np.random.default_rng(0).integers(0, len(dataset), 60)
    for row, record in zip(order.tolist(), source.records(order), strict=True):
        original = row if select is None else select[row]
        assert record["image"] == JPEGS[original]
        assert (record["text"].decode(), record["label"]) == (dataset[row]["text"], dataset[row]["label"])
        np.testing.assert_array_equal(record["box"], dataset[row]["box"])
    assert feedline.open_source(dataset, columns=["text"])[2].decode() == dataset[2]["text"]
    assert feedline.open_source(dataset, columns=["label", "box"]).spec["box"].shape == (2,)


def test_a_null_is_a_bad_row_of_encoded_rows(tmp_path):
    texts = [*WORDS[:10], None, *WORDS[11:]]
    dataset = Dataset.from_dict({"text": texts})
    source = feedline.open_source(dataset)
    assert source[9] == WORDS[9].encode()
    with pytest.raises(feedline.RowError, match=r"'text' is null in this row; .*row 10") as failure:
        source.records(np.array([3, 10]))
    assert failure.value.row == 10
    no_image = Dataset.from_dict({"image": [JPEGS[0], None]}, features=Features({"image": Image()}))
    with pytest.raises(feedline.RowError, match="'image' is null"):
        _ = feedline.open_source(no_image)[1]


# --- what is refused ---


def of(values, kind):
    return Dataset.from_dict(
        {"x": values, "good": [0] * len(values)}, features=Features({"x": kind, "good": Value("int8")})
    )


DAY = datetime.datetime(2026, 11, 22)
REFUSED = {
    "ragged": (lambda: of([[1], [1, 2]], List(Value("int8"))), ValueError, "must have lists of one length.*; pad"),
    "time": (lambda: of([DAY], Value("timestamp[us]")), TypeError, "dataset.cast_column.*#hugging-face-datasets"),
    "empty": (lambda: of([], Value("int8")), ValueError, "at least one row"),
    "a transform": (
        lambda: of([1], Value("int8")).with_transform(lambda rows: rows),
        ValueError,
        r"pass the dataset itself to the feed.*with_format\(None\)",
    ),
    "splits": (
        lambda: datasets.DatasetDict(train=of([1], Value("int8")), test=of([1], Value("int8"))),
        TypeError,
        r"a DatasetDict with the splits 'train', 'test'; pass one of them, dataset\['train'\]",
    ),
    "a stream": (lambda: of([1], Value("int8")).to_iterable_dataset(), TypeError, "without streaming=True"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    make, kind, message = REFUSED[case]
    dataset = make()
    with pytest.raises(kind, match=message):
        feedline.open_source(dataset)
    if kind is TypeError and case not in ("splits", "a stream"):
        assert feedline.open_source(dataset, columns=["good"]).spec.keys() == {"good"}


def test_nulls_are_known_when_a_feed_is_built_and_replaced_if_it_shall():
    source = feedline.open_source(of([[1, 2], None, [3, 4], [5, 6]], List(Value("int8"), length=2)))
    with pytest.raises(feedline.RowError, match=r"'x' has 1 null; fill nulls"):
        feedline.Feed(source, 4, jax.devices()[0])
    reading = feedline.Reading(bad_rows="substitute")
    order = feedline.Order(shuffle=False)
    with feedline.Feed(source, 4, jax.devices()[0], order=order, epochs=1, reading=reading) as feed:
        rows = np.asarray(next(feed)["x"])
        assert feed.statistics().bad_rows == 1
    np.testing.assert_array_equal(rows[[0, 2, 3]], [[1, 2], [3, 4], [5, 6]])


def test_nulls_and_lists_of_rows_that_were_left_out_do_not_matter():
    dataset = of([[1, 2], None, [3, 4]], List(Value("int8"), length=2))
    left = dataset.filter(lambda value: value is not None, input_columns=["x"])
    np.testing.assert_array_equal(feedline.open_source(left)[1]["x"], [3, 4])
    parts = [of(rows, List(Value("int8"))) for rows in ([None] * 2, [None, [1, 2]])]  # the first part has no list
    np.testing.assert_array_equal(feedline.open_source(datasets.concatenate_datasets(parts))[3]["x"], [1, 2])
    ragged = of([[1, 2], [1], [3, 4]], List(Value("int8"))).select([2, 0])
    with pytest.raises(ValueError, match="flatten_indices"):
        feedline.open_source(ragged)
    np.testing.assert_array_equal(feedline.open_source(ragged.flatten_indices())[0]["x"], [3, 4])


def test_damage_is_an_error(tmp_path):
    folder = tmp_path / "saved"
    saved(of([[1, 2], [3, 4], [5, 6]], List(Value("int32"))), folder, 1)
    (path,) = folder.glob("*.arrow")
    offsets, others = np.array([0, 2, 4, 6], np.int32), np.array([0, 4, 2, 6], np.int32)
    assert path.read_bytes().count(offsets.tobytes()) == 1
    path.write_bytes(path.read_bytes().replace(offsets.tobytes(), others.tobytes()))
    with pytest.raises(ValueError, match="column 'x' must have lists of one length"):
        feedline.open_source(datasets.load_from_disk(folder))
    beyond = np.array([0, 2, 4, 600], np.int32)
    path.write_bytes(path.read_bytes().replace(others.tobytes(), beyond.tobytes()))
    with pytest.raises(ValueError, match=r"the table of this dataset is damaged, in .*arrow: .*; make"):
        feedline.open_source(datasets.load_from_disk(folder))


# --- folders of save_to_disk ---


@pytest.mark.parametrize("variant", ["some of a format", "shuffled"])
def test_a_saved_folder_is_the_dataset_that_it_loads_as(tmp_path, variant):
    VARIANTS[variant](numbers(), str(tmp_path / "first")).save_to_disk(tmp_path / "saved", num_shards=1)
    expected = feedline.open_source(datasets.load_from_disk(tmp_path / "saved"))
    source = feedline.open_source(tmp_path / "saved")
    assert (source.spec, source.identity) == (expected.spec, expected.identity)
    for opened in (source, pickle.loads(pickle.dumps(source))):
        for row in range(len(expected)):
            jax.tree.map(np.testing.assert_array_equal, opened[row], expected[row])


def test_images_of_an_imagefolder_are_read_from_their_paths(tmp_path):
    for i in range(6):
        (tmp_path / "images" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "images" / "ab"[i % 2] / f"{i}.jpg").write_bytes(JPEGS[i])
    dataset = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "images"), split="train", cache_dir=str(tmp_path / "cache")
    )
    source = feedline.open_source(dataset.select([5, 0, 3]))
    copy = pickle.loads(pickle.dumps(source))
    dataset.save_to_disk(tmp_path / "saved")  # with the bytes of the images
    inside = feedline.open_source(datasets.load_from_disk(tmp_path / "saved").select([5, 0, 3]))
    assert source.identity == copy.identity == inside.identity
    expected = [JPEGS[5], JPEGS[0], JPEGS[1]]  # "train" has a/0, a/2, a/4, b/1, b/3, b/5
    for opened in (source, copy, inside):
        records = opened.records(np.arange(3))
        assert [(record["image"], record["label"]) for record in records] == list(
            zip(expected, [1, 0, 1], strict=True)
        )
    (tmp_path / "images" / "a" / "0.jpg").write_bytes(JPEGS[7])
    with pytest.raises(feedline.FeedError, match=r"must not change while a feed reads it.*a/0\.jpg") as changed:
        source.records(np.arange(3))
    assert not isinstance(changed.value, feedline.RowError)
    (tmp_path / "images" / "b" / "1.jpg").unlink()
    with pytest.raises(feedline.RowError, match=r"there is none at '.*b/1\.jpg'; .*save_to_disk") as missing:
        copy.records(np.array([0, 2, 0]))
    assert missing.value.row == 2


def test_a_damaged_folder_is_refused(tmp_path):
    saved(of(range(6), Value("int32")), tmp_path / "saved", 1)
    (path,) = (tmp_path / "saved").glob("*.arrow")
    whole = path.read_bytes()
    for data in (whole[:-8], whole[:-100], b"", b"no Arrow"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"saved cannot be read as a folder of Dataset\.save_to_disk"):
            feedline.open_source(tmp_path / "saved")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(path.name)):
        feedline.open_source(tmp_path / "saved")


def test_caches_of_map_are_no_rows(tmp_path):
    dataset = saved(of(range(6), Value("int32")), tmp_path / "saved", 2)
    dataset.map(lambda row: {"x": row["x"] + 100})
    (cache,) = (tmp_path / "saved").glob("cache-*.arrow")
    with pytest.raises(ValueError, match=rf"{cache.name} is such a cache; open the folder by its path: .*/saved'"):
        feedline.open_source(tmp_path / "saved" / "*.arrow")
    assert [row["x"] for row in feedline.open_source(tmp_path / "saved")] == list(range(6))
    assert len(feedline.open_source(tmp_path / "saved" / "data-*.arrow")) == 6
    assert feedline.open_source(cache)[0]["x"] == 100
    (tmp_path / "saved" / "state.json").unlink()  # as in the folder of load_dataset
    with pytest.raises(ValueError, match=rf"{cache.name} is such a cache; .*leave the cache out, by the glob"):
        feedline.open_source(tmp_path / "saved" / "*.arrow")


# --- row by row, files and workers ---


def test_a_feed_reads_the_dataset_itself_row_by_row(tmp_path):
    dataset = of([[1, 2], [3, 4]], List(Value("int8")))
    order = feedline.Order(shuffle=False)
    told = r"feedline.open_source\(dataset\) reads the memory"
    with pytest.warns(UserWarning, match=told) as caught:
        feed = feedline.Feed(dataset, 2, jax.devices()[0], order=order)
    with pytest.warns(UserWarning, match=told) as caught_of_mixture:
        feedline.Mixture({"a": dataset}, {"a": 1})
    assert caught[0].filename == caught_of_mixture[0].filename == __file__  # the line of the user
    with feed:
        np.testing.assert_array_equal(next(feed)["x"], [[1, 2], [3, 4]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transformed = dataset.with_transform(lambda rows: {"y": [np.array(x) * 10 for x in rows["x"]]})
        for source in (transformed, grain.MapDataset.source(transformed)):
            with feedline.Feed(source, 2, jax.devices()[0], order=order) as feed:
                np.testing.assert_array_equal(next(feed)["y"], [[10, 20], [30, 40]])


def test_a_file_that_is_deleted_or_written_to(tmp_path):
    dataset = saved(numbers(), tmp_path / "a", 1)
    (path,) = [Path(file["filename"]) for file in dataset.cache_files]
    source, shuffled = feedline.open_source(dataset), feedline.open_source(dataset.shuffle(seed=0))
    sent = pickle.dumps(source)
    expected = shuffled[3]
    whole = path.read_bytes()
    path.unlink()
    jax.tree.map(np.testing.assert_array_equal, shuffled[3], expected)  # still mapped
    with pytest.raises(feedline.FeedError, match="cannot be found any more"):
        pickle.loads(sent)
    with pytest.raises(FileNotFoundError, match=f"there is no file {path}"):
        feedline.open_source(dataset)
    path.write_bytes(whole)
    with pytest.raises(feedline.FeedError, match=r"it was replaced by another file|was written to"):
        pickle.loads(sent)
    texts = saved(Dataset.from_dict({"text": WORDS}), tmp_path / "b", 1)
    dataset, (path,) = datasets.load_from_disk(tmp_path / "a"), [Path(f["filename"]) for f in texts.cache_files]
    source, records = feedline.open_source(dataset), feedline.open_source(texts)
    for changed in (path, Path(dataset.cache_files[0]["filename"])):
        with changed.open("ab") as file:
            file.write(b"more")
    for opened in (source, records):
        with pytest.raises(feedline.FeedError, match="a file must not change while a feed reads it"):
            _ = opened[0]


def test_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run("docs/formats.md", "\n## Hugging Face datasets", "\n## Converting")
    assert capsys.readouterr().out.splitlines() == ["(40, 4)", "True"]
