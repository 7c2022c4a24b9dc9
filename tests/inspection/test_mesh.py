"""Meshes and specs from the command line: what is understood, and what is refused with a change that works."""

import pytest

from feedline._src.tools.inspect.command import parse_mesh, parse_spec

AXES = {"data": 4, "model": 2, "x": 1}


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("data=4", {"data": 4}),
        ("data=4,model=2", {"data": 4, "model": 2}),
        (" model = 2 , data=1 ", {"model": 2, "data": 1}),  # in the order in which they are named
        ("data=4096", {"data": 4096}),
    ],
)
def test_meshes(text, axes):
    assert list(parse_mesh(text).items()) == list(axes.items())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("data", "takes axis names and sizes with commas between, as data=4,model=2, got 'data'"),
        ("data=4,", "got 'data=4,'"),
        ("data=-1", "got 'data=-1'"),
        ("4=data", "got '4=data'"),
        ("data=two", "got 'data=two'"),
        ("data=0", "the size of axis data in --mesh must be at least 1, got 0"),
        ("data=2,data=4", "needs a name of its own, got data twice"),
    ],
)
def test_what_is_no_mesh(text, told):
    with pytest.raises(ValueError, match=told):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("data", ("data",)),
        ("data,model", ("data", "model")),
        ("None,model", (None, "model")),
        ("None", (None,)),
        ("data+x, None, model", (("data", "x"), None, "model")),
    ],
)
def test_specs(text, entries):
    assert parse_spec(text, AXES) == entries


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "fsdp",
            "takes axes of the mesh, which has data, model, x, got 'fsdp' in 'fsdp'; name one of them or None",
        ),
        ("data,", "got '' in 'data,'"),
        ("data+", r"got '' in 'data\+'"),
        ("none", "got 'none'"),
        ("data,data", "each axis of the mesh once, got data twice"),
        ("data,model+data", "got data twice"),
    ],
)
def test_what_is_no_spec(text, told):
    with pytest.raises(ValueError, match=told):
        parse_spec(text, AXES)
