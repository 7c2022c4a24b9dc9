"""Parts of JPEGs have the pixels that simplejpeg decodes, bit for bit; damage up to the part is left to it."""

import concurrent.futures
import functools
import importlib
import itertools
import random
import sys

import cv2
import numpy as np
import programs
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st

from feedline._src.native import jpeg
from feedline._src.native.jpeg import Box, part_decoder

compiled = pytest.mark.skipif(
    part_decoder() is None, reason="the library was not built, or there is no libjpeg-turbo"
)
SAMPLINGS = {"444": 0x111111, "422": 0x211111, "420": 0x221111, "440": 0x121111, "411": 0x411111, "grey": None}
RESTARTS = [0, 0, 1, 2, 7, 100]


@functools.cache
def texture():
    """Smooth parts, sharp edges, and noise: short codes and long ones."""
    down, right, colour = np.ogrid[:400, :500, :3]
    smooth = 127 + 120 * np.sin(down / (31 + colour) + right / 47)
    noise = np.random.default_rng(0).normal(0, 1 + 60 * (right > 250), (400, 500, 3))
    return np.clip(smooth + noise + 90 * ((down // 37 + right // 51) % 2), 0, 255).astype(np.uint8)


def encoded(height, width, at, sampling, quality, restarts=0, progressive=False, optimize=False):
    image = np.ascontiguousarray(np.roll(texture(), at, (0, 1))[:height, :width])
    if sampling == "grey":
        image = image[..., :1]
    options = {
        cv2.IMWRITE_JPEG_QUALITY: quality,
        cv2.IMWRITE_JPEG_RST_INTERVAL: restarts,
        cv2.IMWRITE_JPEG_PROGRESSIVE: int(progressive),
        cv2.IMWRITE_JPEG_OPTIMIZE: int(optimize),
    }
    if sampling != "grey":
        options[cv2.IMWRITE_JPEG_SAMPLING_FACTOR] = SAMPLINGS[sampling]
    return cv2.imencode(".jpg", image, [value for pair in options.items() for value in pair])[1].tobytes()


def smaller(size, shrink):
    return -(-size[0] // shrink), -(-size[1] // shrink)


def by_simplejpeg(data, size, shrink, box):
    height, width = smaller(size, shrink)
    whole = simplejpeg.decode_jpeg(data, min_height=height, min_width=width)
    return whole[box.top : box.top + box.height, box.left : box.left + box.width]


@st.composite
def parts(draw, size):
    """How many times smaller an image of this size is decoded, and a part of that."""
    shrink = draw(st.sampled_from([1, 1, 2, 4, 8]))
    height, width = smaller(size, shrink)
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    return shrink, Box(top, left, draw(st.integers(1, height - top)), draw(st.integers(1, width - left)))


sizes = st.tuples(st.integers(1, 60) | st.integers(1, 400), st.integers(8, 60) | st.integers(8, 500))


@compiled
@given(st.data(), sizes, st.sampled_from(sorted(SAMPLINGS)), st.integers(1, 100), st.sampled_from(RESTARTS))
@settings(max_examples=300, deadline=None)
def test_a_part_has_the_pixels_of_the_whole_image(data, size, sampling, quality, restarts):
    at = data.draw(st.tuples(st.integers(0, 399), st.integers(0, 499)))
    encoded_image = encoded(*size, at, sampling, quality, restarts, optimize=data.draw(st.booleans()))
    shrink, box = data.draw(parts(size))
    found = part_decoder().part(encoded_image, size, shrink, box)
    assert found is not None
    np.testing.assert_array_equal(found, by_simplejpeg(encoded_image, size, shrink, box))


@compiled
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_narrow_parts_at_all_places(sampling):
    """Where a part has one column of colours, libjpeg-turbo would interpolate them in another way."""
    for width, shrink in itertools.product((33, 34, 48, 66), (1, 2, 4, 8)):
        data = encoded(20, width, (3, 250), sampling, 80)
        height, columns = smaller((20, width), shrink)
        whole = by_simplejpeg(data, (20, width), shrink, Box(0, 0, height, columns))
        for left, wide in itertools.product(range(columns), (1, 2, 3)):
            box = Box(height // 2, left, 1, min(wide, columns - left))
            found = part_decoder().part(data, (20, width), shrink, box)
            np.testing.assert_array_equal(found, whole[height // 2 :][:1, left : left + wide])


@compiled
def test_an_image_of_many_rows_and_columns():
    size, box = (4000, 3001), Box(1990, 1503, 500, 700)
    image = np.tile(texture(), (10, 7, 1))[: size[0], : size[1]]
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=85, colorsubsampling="420")
    for shrink, part in ((1, box), (2, Box(900, 700, 600, 700)), (8, Box(0, 0, 500, 376))):
        found = part_decoder().part(data, size, shrink, part)
        np.testing.assert_array_equal(found, by_simplejpeg(data, size, shrink, part))


@compiled
def test_threads_have_memory_of_their_own():
    jobs = []
    for i in range(40):
        size = (80 + 5 * i, 100 + 3 * i)
        data, box = encoded(*size, (i, 9 * i), sorted(SAMPLINGS)[i % 6], 50 + i), Box(i, i, 60, 90)
        jobs.append((data, size, 1, box, by_simplejpeg(data, size, 1, box)))

    def wrong(seed):
        order = random.Random(seed).choices(jobs, k=100)
        return sum((part_decoder().part(*job[:4]) != job[4]).any() for job in order)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong, range(4))) == [0] * 4


@compiled
@pytest.mark.parametrize("change", [{"progressive": True}, {"size": (7, 7)}], ids=str)
def test_an_unusual_image_is_left_to_simplejpeg(change):
    size = change.pop("size", (100, 120))
    data = encoded(*size, (0, 0), "420", 90, **change)
    assert simplejpeg.decode_jpeg(data).shape == (*size, 3)
    assert part_decoder().part(data, size, 1, Box(0, 0, *size)) is None


@compiled
@pytest.mark.parametrize("restarts", [0, 3])
def test_an_image_without_its_end_is_left_to_simplejpeg(restarts):
    """The part is the first rows, and the data are cut further below."""
    size, box = (200, 240), Box(0, 0, 20, 20)
    data = encoded(*size, (0, 0), "420", 90, restarts)
    assert part_decoder().part(data, size, 1, box) is not None
    for cut in (data[: len(data) * 3 // 4], data[:-2], data[:-1], data[:1], b""):
        assert part_decoder().part(cut, size, 1, box) is None


def damaged_images(count, seed):
    """JPEGs of all kinds with a byte or more changed, put in, or left out, and their sizes before that."""
    draw = random.Random(seed)
    for _ in range(count):
        size = draw.randint(8, 90), draw.randint(8, 120)
        sampling, restarts = draw.choice(sorted(SAMPLINGS)), draw.choice(RESTARTS)
        at = draw.randrange(400), draw.randrange(500)
        data = bytearray(encoded(*size, at, sampling, draw.randint(5, 100), restarts, draw.random() < 0.05))
        for _ in range(draw.choice([1, 1, 1, 2, 5])):
            place = draw.randrange(draw.choice([len(data), len(data), min(len(data), 700)]))
            kind = draw.random()
            if kind < 0.6:
                data[place] ^= 1 << draw.randrange(8)
            elif kind < 0.75:
                data[place] = draw.choice([0x00, 0xFF, draw.randrange(256)])
            elif kind < 0.85:
                data[place:place] = draw.randbytes(draw.randint(1, 4))
            elif kind < 0.95:
                del data[place : min(len(data) - 20, place + draw.randint(1, 4))]
            else:
                del data[max(20, place) :]
        yield bytes(data), draw


def verdicts(count, seed):
    """Decode damaged images: {verdict: how many}. An assertion fails where pixels are not those of simplejpeg."""
    found = {"refused": 0, "whole": 0, "part": 0, "damaged elsewhere": 0}
    for data, draw in damaged_images(count, seed):
        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        except (ValueError, KeyError):
            found["refused"] += 1
            continue
        if space in ("CMYK", "YCCK") or height * width > 1 << 21:
            continue
        size, shrink = (height, width), draw.choice([1, 1, 2, 4, 8])
        tall, wide = smaller(size, shrink)
        top, left = draw.randrange(tall), draw.randrange(wide)
        box = Box(top, left, draw.randint(1, tall - top), draw.randint(1, wide - left))
        part = part_decoder().part(data, size, shrink, box)
        if part is None:
            found["whole"] += 1
            continue
        try:
            whole = by_simplejpeg(data, size, shrink, box)
        except ValueError:  # as it should: it reads what comes after the part, too
            found["damaged elsewhere"] += 1
            continue
        found["part"] += 1
        np.testing.assert_array_equal(part, whole)
    return found


@compiled
@pytest.mark.slow
def test_damaged_images_have_the_pixels_of_simplejpeg_if_any():
    """In a process of its own with little memory, so that an access outside of it cannot go unnoticed for long."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); "
        "import test_native_jpeg; print(test_native_jpeg.verdicts(4000, 1))"
    )
    done = programs.run([sys.executable, "-c", script], capture_output=True, text=True, env=programs.importing())
    assert done.returncode == 0, done.stderr[-3000:]
    found = eval(done.stdout)
    assert found["part"] > 500
    assert found["whole"] > 500


def test_without_the_library_there_is_no_decoder(monkeypatch, tmp_path):
    monkeypatch.setattr(jpeg, "PATH", tmp_path / "missing.so")
    assert part_decoder.__wrapped__() is None


@compiled
def test_without_libjpeg_turbo_there_is_no_decoder(monkeypatch):
    monkeypatch.setattr(jpeg, "_libjpegs", lambda: iter(["/nowhere/libjpeg.so.62", "libc.so.6"]))
    assert part_decoder.__wrapped__() is None


@compiled
def test_another_decoder_of_jpegs_is_not_used_if_its_pixels_differ(monkeypatch):
    simplejpeg_ = importlib.import_module("simplejpeg")
    whole = simplejpeg_.decode_jpeg
    monkeypatch.setattr(
        simplejpeg_, "decode_jpeg", lambda *a, **o: whole(*a, **o, fastdct=True, fastupsample=True)
    )
    assert part_decoder.__wrapped__() is None


def test_a_library_that_cannot_be_loaded_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("FEEDLINE_PURE_PYTHON", "0")
    path = tmp_path / "broken.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(jpeg, "PATH", path)
    with pytest.raises(ImportError, match=r"cannot be loaded .* install feedline again"):
        part_decoder.__wrapped__()
