"""The data sets of `feedline train`: the digits, a user's files, and disjoint training and test parts."""

import gzip
import importlib.resources

import numpy as np
import pytest
from rows_read import read_rows

import feedline
from feedline._src.sources.arrays import ArraySource
from feedline._src.tools.train.labelled import DIGITS, Holdout, from_files


@pytest.mark.slow
def test_the_digits_are_those_of_scikit_learn():
    assert "CC BY 4.0" in (DIGITS / "README.md").read_text()
    packed = importlib.resources.files("sklearn.datasets.data").joinpath("digits.csv.gz").read_bytes()
    table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",").astype(np.int32)
    is_test = np.arange(len(table)) % 5 == 0
    for part, rows in (("train", table[~is_test]), ("test", table[is_test])):
        np.testing.assert_array_equal(np.load(DIGITS / part / "image.npy"), rows[:, :-1] * 15)
        np.testing.assert_array_equal(np.load(DIGITS / part / "label.npy"), rows[:, -1])


@pytest.mark.parametrize("count", [2, 5, 6, 10, 1003])
def test_every_row_is_in_one_part_and_in_order(count):
    whole = ArraySource([{"x": np.arange(count)}])
    train, test = (read_rows(Holdout(whole, part))["x"].tolist() for part in ("train", "test"))
    assert test == [r for r in range(count) if r % 5 == 0]
    assert train == [r for r in range(count) if r % 5]
    assert Holdout(whole, "train").identity != Holdout(whole, "test").identity


def save(path, image, label):
    np.savez(path, image=image, label=label)
    return path


def test_labels_of_the_test_part_are_classes_of_the_training_part(tmp_path):
    train = save(tmp_path / "train.npz", np.zeros((8, 2)), np.arange(8) % 3)
    test = save(tmp_path / "test.npz", np.zeros((8, 2)), np.arange(8) % 5)
    assert from_files(train).classes == 3
    assert from_files(test, train).classes == 5
    few = save(tmp_path / "few.npz", np.zeros((2, 2)), np.array([2, 0]))
    assert from_files(train, few).classes == 3
    with pytest.raises(ValueError, match=r"classes of the training data, 0 to 2 in .*, but .*test.npz has 4; add"):
        from_files(train, test)


IMAGE = np.zeros((10, 4))


def test_any_format_with_these_columns_is_read(tmp_path):
    rows = {"image": IMAGE, "label": np.arange(10) % 3, "more": IMAGE}
    feedline.convert(rows, tmp_path / "rows", format="parquet")
    found = from_files(tmp_path / "rows" / "*.parquet")
    assert (len(found.train), len(found.test), found.classes) == (8, 2, 3)
    assert found.train.spec.keys() == {"image", "label"}


@pytest.mark.parametrize(
    ("label", "told"),
    [
        (np.eye(10), r"one integer a row, .*rows.npz has float64\[10\]; turn one-hot .* argmax"),
        (np.zeros(10), r"one integer a row, .*rows.npz has float64\[\]"),
        (np.arange(10) - 1, "class numbers 0, 1, 2, …, but .*rows.npz has -1 to 8 in 10 rows; numpy.unique"),
        (np.arange(10) * 1000, "has 0 to 9000 in 10 rows"),
        (np.arange(9), "same number of rows"),
    ],
)
def test_refused_labels(label, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        from_files(save(tmp_path / "rows.npz", IMAGE, label))
