"""`Lines` splits chunks into whole lines and prefixes each with its process."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline._src.tools.launch.lines import Lines


@given(st.lists(st.binary(max_size=20).map(lambda chunk: chunk.replace(b"a", b"\n"))))
def test_the_lines_do_not_depend_on_the_chunks(chunks):
    lines = Lines(3)
    written = b"".join([lines.add(chunk) for chunk in chunks] + [lines.end()])
    whole = b"".join(chunks)
    ended = whole if whole.endswith(b"\n") or not whole else whole + b"\n"
    assert written == b"".join(b"[3] " + line + b"\n" for line in ended.split(b"\n")[:-1])


def test_a_very_long_line_is_split():
    lines = Lines(0)
    piece = b"x" * (1 << 16)
    assert lines.add(piece) == b""
    assert lines.add(piece + b"y") == 2 * (b"[0] " + piece + b"\n")
    assert lines.end() == b"[0] y\n"
    assert lines.end() == b""


def test_the_newest_lines_of_both_streams_are_kept():
    out = Lines(1)
    err = Lines(1, out.last)
    out.add(b"".join(b"%d\n" % number for number in range(100)))
    err.add(b"Error\n")
    assert list(out.last) == [(b"[1] ", b"%d" % number) for number in range(81, 100)] + [(b"[1] ", b"Error")]


@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ("number", rb"\[12\] a\n\[12\] b\n"),
        ("slurm", rb"12: a\n12: b\n"),
        ("time", rb"(\[12 \d\d:\d\d:\d\d\.\d{3}\] [ab]\n){2}"),
        ("none", rb"a\nb\n"),
    ],
)
def test_labels(label, shown):
    lines = Lines(12, label=label)
    written = lines.add(b"a\nb\n")
    assert re.fullmatch(shown, written)
    assert b"".join(prefix + line + b"\n" for prefix, line in lines.last) == written
