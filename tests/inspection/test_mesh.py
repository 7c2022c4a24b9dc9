"""Meshes and specs from the command line: what is understood, and what is refused with a change that works."""

import pytest

from feedline._src.tools.inspect.command import parse_mesh, parse_spec

AXES = {"data": 4, "model": 2, "x": 1}


def test_meshes_and_specs():
    assert list(parse_mesh(" model = 2 , data=4096").items()) == [("model", 2), ("data", 4096)]  # in this order
    assert parse_spec("None,model", AXES) == (None, "model")
    assert parse_spec("data+x, None, model", AXES) == (("data", "x"), None, "model")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data", "takes axis names and sizes with commas between, as data=4,model=2, got 'data'"),
        ("data=4,", "got 'data=4,'"),
        ("data=-1", "got 'data=-1'"),
        ("4=data", "got '4=data'"),
        ("data=0", "the size of axis data in --mesh must be at least 1, got 0"),
        ("data=2,data=4", "needs a name of its own, got data twice"),
    ],
)
def test_what_is_no_mesh(text, told):
    with pytest.raises(ValueError, match=told):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "fsdp",
            "takes axes of the mesh, which has data, model, x, got 'fsdp' in 'fsdp'; name one of them",
        ),
        ("data+", r"got '' in 'data\+'"),
        ("none", "got 'none'"),
        ("data,model+data", "each axis of the mesh once, got data twice"),
    ],
)
def test_what_is_no_spec(text, told):
    with pytest.raises(ValueError, match=told):
        parse_spec(text, AXES)
