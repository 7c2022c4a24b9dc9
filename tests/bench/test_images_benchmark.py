"""The benchmark of images: a short run, and how a crop of an image is recognised."""

import json
import sys
from pathlib import Path

import cv2
import numpy as np
import programs
import pytest
import simplejpeg
from marked import MOST, marked_image, recognised

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers" / "images.py"
HERE = ["images_limit", "images_feedline", "images_grain"]


@pytest.mark.slow
def test_it_runs_in_this_interpreter(tmp_path):
    out = tmp_path / "images.json"
    options = ["--quick", "--environments", "none", "--work", tmp_path, "--out", out]
    command = [sys.executable, SCRIPT, *options, "--only", *HERE, "images_spdl"]
    ran = programs.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1, ran.stderr  # because SPDL is not installed
    result = json.loads(out.read_text())
    assert list(result["failures"]) == ["images_spdl"]
    assert {check["entrant"]: (check["right"], check["rows"]) for check in result["checks"]} == dict.fromkeys(
        HERE, (True, MOST)
    )
    found = result["standings"]["12288"]
    assert found["best_other"] == "images_grain"
    assert found["entrants"]["images_feedline"]["of_limit"]["rounds"] == 2
    assert result["data"]["files"] == 48


def cropped(index, mirrored=False):
    """A marked image after JPEG, cropped to half of its width and height."""
    whole = simplejpeg.decode_jpeg(simplejpeg.encode_jpeg(marked_image(index), quality=95))
    part = cv2.resize(whole[40:160, 100:260], (64, 64))
    return part[:, ::-1] if mirrored else part


@pytest.mark.parametrize("index", [0, 17, MOST - 1])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_crop_is_recognised(index, mirrored):
    seen = recognised(cropped(index, mirrored))
    assert (seen.index, seen.mirrored) == (index, mirrored)
    assert (seen.height, seen.width) == (pytest.approx(0.5, abs=0.02), pytest.approx(0.5, abs=0.02))
    assert seen.fits((0.08, 1.0), (3 / 4, 4 / 3))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda image: image[::-1],  # upside down: the recognised height is negative
        lambda image: image[..., ::-1],  # BGR
        lambda image: cv2.resize(image[28:36, 28:36], (64, 64)),  # too small an area
        lambda image: cv2.resize(image[:, 20:40], (64, 64)),  # too narrow
        lambda image: np.concatenate([image[:32], image[:32]]),
    ],
)
def test_a_wrong_image_is_noticed(spoil):
    seen = recognised(spoil(cropped(17)))
    assert seen.index != 17 or not seen.fits((0.08, 1.0), (3 / 4, 4 / 3))
