"""The Python of docs/stores.md runs, against a store on this machine."""

import io
import tarfile

import numpy as np
import PIL.Image
from test_arrays_in_stores import npy
from test_docs import run


def test_stores(bucket, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEEDLINE_CACHE", str(tmp_path / "other"))
    photos = io.BytesIO()
    with tarfile.open(fileobj=photos, mode="w") as archive:
        for i in range(100):
            for name, data in ((f"{i:03}.bin", bytes([i]) * 16), (f"{i:03}.cls", b"%d" % (i % 10))):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    bucket.objects = {
        "/image.npy": npy(np.zeros((200, 4, 4), np.uint8)),
        "/label.npy": npy(np.arange(200, dtype=np.int32) % 10),
        "/tokens.bin": np.arange(1000, dtype=np.uint16).tobytes(),
        "/photos.tar": photos.getvalue(),
    }
    for i in range(70):
        image = io.BytesIO()
        PIL.Image.fromarray(np.full((40, 50, 3), i, np.uint8)).save(image, "jpeg")
        bucket.objects[f"/photos/{'ab'[i % 2]}/{i}.jpg"] = image.getvalue()
    bucket.objects = {f"/my-bucket{path}": data for path, data in bucket.objects.items()}
    names = run("docs/stores.md", bucket="s3://my-bucket")
    assert "my-bucket" not in str(names["saved"])
    step, tokens, windows, pixels, images, counts = capsys.readouterr().out.splitlines()
    assert (step, tokens, windows, pixels) == ("20", "30 (33,)", "(8, 33)", "(64, 4, 4)")
    assert images == "(64, 32, 32, 3) (64,)"
    assert int(counts.split()[0]) > 4
