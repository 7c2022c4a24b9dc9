"""Digests of files and arrays differ if the data differ."""

import numpy as np

from feedline._src.rows import digests


def test_a_file_is_known_by_its_size_and_its_bytes(tmp_path):
    data = bytes(100_000)
    for name, content in {"a": data, "b": data, "longer": data + b"0", "last": data[:-1] + b"1", "": b""}.items():
        (tmp_path / f"x{name}").write_bytes(content)
    a, b, longer, last, none = (
        digests.of_file(tmp_path / f"x{name}") for name in ("a", "b", "longer", "last", "")
    )
    assert a == b
    assert a[0] == last[0] == 100_000
    assert len({str(digest) for digest in (a, longer, last, none)}) == 4


def test_an_array_is_known_by_its_form_and_its_rows():
    x = np.arange(300).reshape(100, 3)
    changed = x.copy()
    changed[-1, -1] = 0
    arrays = (x, x.astype(np.int32), x.reshape(50, 6), x[:99], changed, x[:0])
    assert len({str(digests.of_array(array)) for array in arrays}) == len(arrays)
    assert digests.of_array(x) == digests.of_array(np.asfortranarray(x))
    assert digests.of_array(np.broadcast_to(np.int8(1), 1 << 54))[1] == [1 << 54]
