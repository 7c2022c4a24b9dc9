"""Images as rows: what is cropped, what is decoded, and what is refused. Pillow is the oracle."""

import dataclasses
import io
import itertools

import jax
import numpy as np
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image

import feedline
from feedline import Feed, Order, Reading, RowError
from feedline._src.images import ImageDecoder, uniform
from feedline._src.sources.decoded import Row

HEIGHT, WIDTH = 400, 600
PLACES = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
"""An image that says where each pixel is: red grows from left to right, green from top to bottom."""
PLACES[..., 0] = np.linspace(0, 255, WIDTH).round()
PLACES[..., 1] = np.linspace(0, 255, HEIGHT).round()[:, None]


def encoded(array, kind="png", **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


def jpeg(array, **options):
    return encoded(array, "jpeg", **{"quality": 95, "subsampling": 0, **options})


def decoder(size=64, crop="center", flip=False, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), orient=False):
    return ImageDecoder(size, crop, flip, scale, ratio, orient, None, None)


def run(data, key=0, **options):
    decode = decoder(**options)
    out = {"image": np.full((decode.size, decode.size, 3), 77, np.uint8)}
    decode(data, out, Row(0, 0, 0, key))
    return out["image"]


def by_pillow(array, box, size):
    """The box (top, left, height, width) of the array, resized by Pillow to a square of `size` pixels."""
    top, left, height, width = box
    whole = Image.fromarray(array).resize((size, size), Image.BILINEAR, (left, top, left + width, top + height))
    return np.asarray(whole)


def difference(one, other):
    return np.abs(one.astype(int) - other.astype(int)).mean()


@pytest.mark.parametrize(("kind", "size"), [("jpeg", 16), ("jpeg", 500), ("png", 20), ("webp", 224)])
def test_the_centre_is_the_largest_square(kind, size):
    photo = load_sample_image("china.jpg")[:HEIGHT, :WIDTH]
    for image, box, most in (photo, (0, 100, 400, 400), 7), (PLACES.transpose(1, 0, 2), (100, 0, 400, 400), 2):
        data = jpeg(image) if kind == "jpeg" else encoded(image, kind, lossless=True)
        assert difference(run(data, size=size), by_pillow(image, box, size)) < most  # Pillow smooths more


def box_of(image):
    """Where the crop of `PLACES` was: its edges as shares of the image."""
    left, right = np.sort(image[:, [0, -1], 0].astype(float).mean(axis=0)) / 255
    top, bottom = image[[0, -1], :, 1].astype(float).mean(axis=1) / 255
    return left, right, top, bottom


@pytest.mark.parametrize("data", [jpeg(PLACES), encoded(PLACES)], ids=["jpeg", "png"])
def test_random_crops_have_the_sizes_and_shapes_asked_for(data):
    options = {"crop": "random", "scale": (0.2, 0.5), "ratio": (0.5, 2.0), "size": 200}
    boxes = [box_of(run(data, key, **options)) for key in range(200)]
    left, right, top, bottom = np.array(boxes).T
    area = (right - left) * (bottom - top)
    shape = (right - left) * WIDTH / ((bottom - top) * HEIGHT)
    assert 0.18 < area.min() < 0.23
    assert 0.45 < area.max() < 0.53
    assert 0.47 < shape.min() < 0.6
    assert 1.7 < shape.max() < 2.1
    assert max(left.min(), top.min()) < 0.02
    assert min(right.max(), bottom.max()) > 0.98
    assert abs(np.log(shape).mean()) < 0.15
    assert len({tuple(box) for box in boxes}) > 190


def test_half_of_the_images_are_mirrored():
    data = jpeg(PLACES)
    mirrored = [
        bool(run(data, key, flip=True)[0, 0, 0] > run(data, key, flip=True)[0, -1, 0]) for key in range(200)
    ]
    assert 70 < sum(mirrored) < 130
    key = mirrored.index(True)
    np.testing.assert_array_equal(run(data, key, flip=True), run(data, key)[:, ::-1])
    crops = [run(data, key, flip=flip, crop="random") for flip in (False, True)]
    np.testing.assert_array_equal(crops[1], crops[0][:, ::-1])  # the flip does not change which part is cropped


def test_a_key_always_gives_the_same_crop():
    """These boxes must never change: a run that resumes relies on them."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]  # SplitMix64
    assert [uniform(1234567, i) for i in range(1, 5)] == [(number >> 11) * 2.0**-53 for number in published]
    decode = decoder(size=100, crop="random", flip=True)
    boxes = [tuple(decode.box(HEIGHT, WIDTH, key)) for key in (12345, 1, 2**64 - 1)]
    assert boxes == [(19, 70, 240, 202), (45, 85, 354, 408), (18, 35, 381, 459)]
    image = run(encoded(PLACES), key=12345, crop="random", flip=True, size=100)
    top, left, height, width = boxes[0]
    edges = (left / WIDTH, (left + width) / WIDTH, top / HEIGHT, (top + height) / HEIGHT)
    assert box_of(image) == pytest.approx(edges, abs=0.01)


def test_a_jpeg_is_decoded_no_larger_than_needed(monkeypatch):
    asked = []
    whole = simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *a, **o: asked.append(out := whole(*a, **o)) or out)
    run(jpeg(np.tile(PLACES, (4, 4, 1))), size=100)
    assert asked[0].shape[0] < 210  # of 1600
    run(jpeg(PLACES), size=260)  # decoding at three quarters of the size would take longer than at full size
    assert asked[1].shape == (400, 600, 3)


def of_mode(mode, kind, **options):
    file = io.BytesIO()
    image = Image.fromarray(load_sample_image("flower.jpg")).convert(mode)
    if mode == "RGBA":
        image.putalpha(200)  # encoders leave out an alpha channel of 255
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind", "tolerance"),
    [("L", "jpeg", 3), ("CMYK", "jpeg", 6), ("L", "png", 3), ("LA", "png", 3), ("RGBA", "png", 3), ("P", "png", 3),
     ("1", "png", 30), ("I;16", "png", 140), ("RGBA", "webp", 5), ("RGB", "bmp", 3), ("RGB", "tiff", 3),
     ("P", "gif", 3), ("RGB", "ppm", 3), ("L", "ppm", 3), ("RGB", "avif", 6), ("RGBA", "avif", 6)],
)  # fmt: skip
def test_other_colours_become_rgb(mode, kind, tolerance):
    data = of_mode(mode, kind)
    image = run(data, size=200)
    wanted = by_pillow(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), (0, 106, 427, 427), 200)
    assert difference(image, wanted) < tolerance
    if mode in ("L", "LA"):
        assert (image[..., :1] == image).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_exif_orientation_is_an_option(turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    data = jpeg(PLACES, exif=exif)
    np.testing.assert_array_equal(run(data), run(jpeg(PLACES)))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    side = (0, 100) if upright.shape[1] > upright.shape[0] else (100, 0)
    assert difference(run(data, orient=True), by_pillow(upright, (*side, 400, 400), 64)) < 3


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**64 - 1), st.booleans())
@settings(max_examples=60)
def test_any_size(height, width, size, key, as_jpeg):
    array = np.full((height, width, 3), (10, 120, 230), np.uint8)
    data = jpeg(array) if as_jpeg else encoded(array)
    image = run(data, key, size=size, crop="random", flip=True)
    assert np.abs(image.astype(int) - (10, 120, 230)).max() <= 3


PHOTO = load_sample_image("flower.jpg")
WHOLE = {"jpeg": jpeg(PHOTO), "png": encoded(PHOTO), "webp": encoded(PHOTO, "webp")}


CUT_BELOW = jpeg(
    PHOTO[:213].repeat(3, axis=0)[:, :213]
)  # of 639 rows, the crop has rows 213 to 426, and the last rows are missing
DAMAGED = {
    "empty": (b"", "an image must not be empty, and this one has 0 bytes"),
    "text": (
        b"Dear reader, this is a text.",
        r"must be a whole JPEG.* begins with b'Dear reader, thi' and has 28",
    ),
    "PGM of 10 bits": (b"P5 # grey\n1 1 1023\n\3\xff", "must be 255 or 65535, got 1023"),
    "below the crop": (CUT_BELOW[: len(CUT_BELOW) * 9 // 10] + CUT_BELOW[-2:], "premature end"),
    **{
        f"{kind} cut at {at}": (data[: int(len(data) * at)], r"\w")
        for kind, data in WHOLE.items()
        for at in (0.001, 0.5)
    },
}


def test_the_digits_of_a_bitmap_need_no_spaces():
    image = run(b"P1 5000 40\n" + 40 * (2500 * b"10" + b"\n"), size=1)
    assert abs(int(image.mean()) - 127) <= 1


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_image_is_refused(case):
    data, message = DAMAGED[case]
    with pytest.raises(ValueError, match=message):
        run(data)


# --- as rows of a feed ---


@pytest.fixture
def photos(tmp_path):
    for row, (name, kind) in enumerate(itertools.product(["cat", "dog"], ["jpeg", "png", "webp"])):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{row}.{kind}").write_bytes(encoded(np.roll(PLACES, 50 * row, axis=2 - row % 2), kind))
    return tmp_path


def test_a_folder_of_classes(photos):
    source = feedline.images.decode(photos, size=32)
    assert source.spec == {
        "image": jax.ShapeDtypeStruct((32, 32, 3), np.uint8),
        "label": jax.ShapeDtypeStruct((), np.int32),
    }
    with Feed(source, 6, jax.devices()[0], order=Order(shuffle=False)) as feed:
        batch = next(feed)
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    for row in range(6):
        np.testing.assert_array_equal(batch["image"][row], source[row]["image"])


def test_crops_differ_between_epochs_and_not_between_runs(photos):
    def batches(threads):
        source = feedline.images.decode(photos, 32, "random", flip=True)
        with Feed(source, 2, jax.devices()[0], epochs=2, reading=Reading(threads=threads)) as feed:
            return [jax.device_get(batch) for batch in feed]

    one, other = batches(1), batches(4)
    assert all((a["image"] == b["image"]).all() for a, b in zip(one, other, strict=True))
    rows = np.concatenate([batch["image"] for batch in one])
    assert len({row.tobytes() for row in rows}) == 12


def test_a_damaged_image_is_a_bad_row(photos):
    path = photos / "cat/0.jpeg"
    path.write_bytes(path.read_bytes()[:3000])
    source = feedline.images.decode(photos, 32)
    order = Order(shuffle=False)
    with Feed(source, 6, jax.devices()[0], order=order) as feed, pytest.raises(RowError) as error:
        next(feed)
    assert (error.value.row, error.value.file) == (0, str(path))
    with Feed(source, 6, jax.devices()[0], order=order, reading=Reading(bad_rows="mask")) as feed:
        assert next(feed)["valid"].tolist() == [False] + [True] * 5


@pytest.mark.parametrize(
    ("value", "label"), [(np.int64(-3), -3), (np.bool_(True), 1), (np.float32(2.0), 2), (b"7\n", 7), ("-12", -12)]
)
def test_a_label_is_an_integer_or_its_digits(value, label):
    assert labelled(value) == label


@pytest.mark.parametrize(
    "value", [2.7, np.float32("nan"), b"1_0", b"07", b"-0", b"+1", b" 1", b"1.0", b"", "\u0663", b"\xff", None, 1j]
)
def test_a_label_that_is_no_exact_integer_is_refused(value):
    with pytest.raises(
        ValueError, match=r"a label must be an integer, or its digits .* and this one is "
    ) as error:
        labelled(value)
    assert repr(value) in str(error.value)


def labelled(value):
    """The label that is decoded from a record whose label is `value`."""
    decode = dataclasses.replace(decoder(), image="image", label="label")
    out = {"image": np.empty((64, 64, 3), np.uint8), "label": np.empty((), np.int32)}
    decode({"image": WHOLE["jpeg"], "label": value}, out, Row(0, 0, 0, 0))
    return int(out["label"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be at least 1"),
        ({"crop": "centre"}, 'crop must be "center" or "random"'),
        ({"scale": (0, 1)}, r"scale must be \(least, greatest\), above 0 and at most 1, got \(0, 1\)"),
        ({"scale": 0.5}, r"scale must be \(least, greatest\), .* got 0.5"),
        ({"ratio": (2, 1)}, r"ratio must be \(least, greatest\), finite and above 0, got \(2, 1\)"),
        ({"ratio": (1, float("inf"))}, "finite and above 0"),
        ({"image": "photo"}, "must have the field of the image, 'photo', and has file, label; give image="),
        ({"label": "class"}, "must have the field of the label, 'class'"),
    ],
)  # fmt: skip
def test_wrong_options(photos, options, message):
    with pytest.raises(ValueError, match=message):
        feedline.images.decode(photos, **options)
