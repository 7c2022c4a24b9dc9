"""The pair of `.bin` and `.idx` of Megatron-LM, written here byte by byte as its IndexedDatasetBuilder does."""

import pickle
import struct

import numpy as np
import pytest

import feedline

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}
DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6]], [[]], [[7, 8, 9, 10], [11], [12, 13]]]
"""Four documents: each is a list of sequences, and a sequence is a list of tokens."""


def index_of(documents, dtype, modes=False):
    """The bytes of the `.idx`."""
    sequences = [sequence for document in documents for sequence in document]
    data = b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([CODES[dtype]])
    data += len(sequences).to_bytes(8, "little") + (len(documents) + 1).to_bytes(8, "little")
    for sequence in sequences:
        data += struct.pack("<i", len(sequence))
    at = 0
    for sequence in sequences:
        data += struct.pack("<q", at)
        at += len(sequence) * np.dtype(dtype).itemsize
    first = 0
    for document in documents:
        data += struct.pack("<q", first)
        first += len(document)
    return data + struct.pack("<q", first) + (bytes(len(sequences)) if modes else b"")


def tokens_of(documents, dtype):
    """The bytes of the `.bin`."""
    flat = [token for document in documents for sequence in document for token in sequence]
    return b"".join(np.array(token, f"<{np.dtype(dtype).str[1:]}").tobytes() for token in flat)


def pair(folder, documents=DOCUMENTS, dtype="uint16", name="corpus", modes=False):
    (folder / f"{name}.idx").write_bytes(index_of(documents, dtype, modes))
    (folder / f"{name}.bin").write_bytes(tokens_of(documents, dtype))
    return folder / f"{name}.idx"


def check(source, dtype=np.uint16, documents=DOCUMENTS):
    """Assert that the rows of a `Ragged` are the documents."""
    assert len(source) == len(documents)
    for row, document in enumerate(documents):
        tokens = [token for sequence in document for token in sequence]
        got = source[row]
        assert got["tokens"].dtype == dtype
        assert got["tokens"].tolist() == tokens + [0] * (len(got["tokens"]) - len(tokens))
        assert got["tokens_length"] == len(tokens)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("modes", [False, True], ids=["text", "multimodal"])
def test_documents_are_ragged_rows(tmp_path, dtype, modes):
    source = feedline.Ragged({"tokens": pair(tmp_path, dtype=dtype, modes=modes)}, pad_to=(4, 8))
    check(source, np.dtype(dtype))
    flat = np.frombuffer(tokens_of(DOCUMENTS, dtype), dtype)
    same = feedline.Ragged({"tokens": (flat, np.array([0, 4, 6, 6, 13]))}, pad_to=(4, 8))
    assert source.identity == same.identity


def test_windows_go_over_all_tokens_of_each_file(tmp_path):
    pair(tmp_path, name="a")
    pair(tmp_path, [[[20, 21, 22]], [[23, 24]]], name="b")
    source = feedline.open_source(tmp_path / "*.idx", window=4, stride=3, columns=["tokens"])
    expected = [[1, 2, 3, 4], [4, 5, 6, 7], [7, 8, 9, 10], [10, 11, 12, 13], [20, 21, 22, 23]]
    assert [source[row]["tokens"].tolist() for row in range(len(source))] == expected
    assert source.file_of(4) == str(tmp_path / "b.bin")


def test_a_shard_without_documents_counts_none(tmp_path):
    for name, documents in (("a", DOCUMENTS), ("b", []), ("c", [[[7]]])):
        pair(tmp_path, documents, name=name)
    check(feedline.Ragged({"tokens": tmp_path / "*.idx"}, pad_to=(8,)), documents=[*DOCUMENTS, [[7]]])
    assert feedline.Packed(tmp_path / "*.idx", 8).tokens == 14
    windows = feedline.open_source(tmp_path / "*.idx", window=1, columns=["tokens"])
    assert (len(windows), windows[13]["tokens"].tolist()) == (14, [7])
    with pytest.raises(ValueError, match="at least one row"):
        feedline.Packed(tmp_path / "b.idx", 8)


def test_another_process_reads_the_same_pair_or_none(tmp_path):
    source = feedline.Ragged({"tokens": pair(tmp_path, name="[1]corpus")}, pad_to=(8,))  # a name, not a glob
    assert source.picklable
    sent = pickle.dumps(source)
    check(pickle.loads(sent))
    pair(tmp_path, [[[1]]], name="[1]corpus")
    with pytest.raises(feedline.FeedError, match=r"corpus\.bin|its size changed from 26 to 2 bytes"):
        pickle.loads(sent)


GOOD = index_of(DOCUMENTS, "uint16")  # header, 7 lengths, 7 offsets, first sequence of each document
LENGTHS, FIRSTS = 34, 34 + 12 * 7


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (GOOD[:33], "it does not begin with the bytes of an .idx"),
        (GOOD[:-1], "promises 158 bytes, or 7 more, but there are 157"),
        ((3, 7), "it does not begin with the bytes of an .idx"),
        ((9, 2), "version must be 1 .* got 2 and 8"),
        ((17, 0), "code of its dtype 1 to 8, got 1 and 0"),
        ((25, 255), "its header promises"),
        ((LENGTHS + 3, 255), "must follow each other"),
        ((FIRSTS, 1), "its document indices must ascend"),
        ((FIRSTS + 8, 6), "its document indices must ascend"),
        ((FIRSTS + 32, 8), "its document indices must ascend"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, data, match):
    path = pair(tmp_path)
    if isinstance(data, tuple):  # (offset of a byte, its new value)
        data = GOOD[: data[0]] + bytes([data[1]]) + GOOD[data[0] + 1 :]
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"corpus\.idx cannot be read as an \.idx of Megatron-LM: .*{match}"):
        feedline.Ragged({"tokens": path}, pad_to=(8,))


def test_files_that_do_not_belong_together_are_refused(tmp_path):
    path = pair(tmp_path)
    with pytest.raises(ValueError, match=r"documents differ in length: pass window=.* feedline\.Ragged"):
        feedline.open_source(path)
    path.with_suffix(".bin").write_bytes(bytes(24))
    for opened in (lambda: feedline.open_source(path, window=2), lambda: feedline.Ragged({"x": path}, (8,))):
        with pytest.raises(ValueError, match=r"corpus\.bin must have the 26 .*corpus\.idx describes, and has 24"):
            opened()
    path.with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no file .*corpus\.bin"):
        feedline.open_source(path, window=2)
    pair(tmp_path)
    pair(tmp_path, dtype="int32", name="other")
    with pytest.raises(ValueError, match=r"tokens of one dtype, got \['int32', 'uint16'\]"):
        feedline.open_source(tmp_path / "*.idx", window=2)
    with pytest.raises(ValueError, match=r"largest bucket must hold every row, and row 3 of 'x' has length 7"):
        feedline.Ragged({"x": path}, pad_to=(4,))
    with pytest.raises(ValueError, match=r"or open the \.idx of Megatron-LM beside it"):
        feedline.open_source(path.with_suffix(".bin"), window=2)
