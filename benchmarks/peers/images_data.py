"""Makes the JPEGs of the benchmark of images once, from photographs that installed packages ship."""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import simplejpeg

from feedline._src.cluster.cores import own_cores

sys.path.append(str(Path(__file__).with_name("tasks")))  # where the peers' processes find it, too

from marked import MOST, marked_image

PHOTOS = {
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "grace_hopper": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
}
"""{class: (the package that ships the photograph, its path there)}. Photographs that are missing are left out."""
FILE_BYTES = 108_000
"""The largest size of a file; the mean is 100 kB."""
_QUALITIES = (40, 98)
_CLASSES_OF_MARKED = 4
Image = npt.NDArray[np.uint8]


def photos() -> dict[str, Path]:
    """The photographs that are installed: {class: file}."""
    found = {}
    for name, (package, path) in PHOTOS.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None and (file := Path(spec.origin).parent / path).exists():
            found[name] = file
    return found


def photo_jpegs(work: Path, count: int) -> Path:
    """A folder of `count` JPEGs in class folders, one for each photograph; kept for the next run."""
    files = photos()
    digest = hashlib.sha256(json.dumps([*files, FILE_BYTES]).encode()).hexdigest()[:8]
    originals = {name: cv2.imread(str(file), cv2.IMREAD_COLOR_RGB) for name, file in files.items()}
    names = list(originals)

    def one(index: int) -> tuple[str, bytes]:
        name = names[index % len(names)]
        return name, _of_about(FILE_BYTES, _cut(originals[name], np.random.default_rng([0, index])))

    return _folder(work / f"photos-{count}-{digest}", one, count)


def marked_jpegs(work: Path) -> Path:
    """A folder of images that can be recognised after a crop, in order in class folders; kept for the next run."""

    def one(index: int) -> tuple[str, bytes]:
        name = f"class_{index * _CLASSES_OF_MARKED // MOST}"
        return name, simplejpeg.encode_jpeg(marked_image(index), quality=95)

    return _folder(work / f"marked-{MOST}", one, MOST)


def described(folder: Path) -> dict[str, Any]:
    """How many files there are, their mean size, and how many of each class."""
    files = [file for classes in folder.iterdir() for file in classes.iterdir()]
    return {
        "files": len(files),
        "mean_bytes": round(sum(file.stat().st_size for file in files) / len(files)),
        "classes": {classes.name: len(list(classes.iterdir())) for classes in sorted(folder.iterdir())},
        "photographs": {name: "/".join(PHOTOS[name]) for name in photos()},
    }


def _cut(photo: Image, rng: np.random.Generator) -> Image:
    """A part of the photograph, slightly turned, of 500 × 375 to 640 × 480 pixels."""
    width = int(rng.integers(500, 641))
    height = round(width * 0.75)
    tall, wide = photo.shape[:2]
    shrink = min(wide / width, tall / height) * rng.uniform(0.5, 0.95)
    turn = np.deg2rad(rng.uniform(-8, 8))
    half = (abs(np.array([width, height]) * shrink) / 2).clip(max=np.array([wide, tall]) / 2)
    middle = rng.uniform(half, np.array([wide, tall]) - half)
    rotation = shrink * np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    matrix = np.column_stack([rotation, middle - rotation @ (width / 2, height / 2)])
    how = cv2.INTER_CUBIC | cv2.WARP_INVERSE_MAP
    cut: Image = cv2.warpAffine(photo, matrix, (width, height), flags=how, borderMode=cv2.BORDER_REFLECT)
    return cut[:, ::-1].copy() if rng.random() < 0.5 else cut


def _of_about(size: int, image: Image) -> bytes:
    """The JPEG of the highest quality that has no more than `size` bytes."""
    low, high = _QUALITIES
    best = simplejpeg.encode_jpeg(image, quality=low, colorsubsampling="420")
    while high - low > 1:
        middle = (low + high) // 2
        data = simplejpeg.encode_jpeg(image, quality=middle, colorsubsampling="420")
        low, high, best = (middle, high, data) if len(data) <= size else (low, middle, best)
    return best


def _folder(folder: Path, one: Callable[[int], tuple[str, bytes]], count: int) -> Path:
    """Write the files `one(0)`, `one(1)` ... to class folders, unless an earlier run completed this folder."""
    if folder.exists():
        return folder
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    with concurrent.futures.ThreadPoolExecutor(own_cores()) as pool:
        made: Iterable[tuple[str, bytes]] = pool.map(one, range(count))
        for index, (name, data) in enumerate(made):
            (part / name).mkdir(parents=True, exist_ok=True)
            (part / name / f"{index:05d}.jpg").write_bytes(data)
    part.rename(folder)
    return folder
