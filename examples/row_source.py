"""Your own RowSource: rows of a SQLite table, read many at a time.

python examples/row_source.py
"""

import hashlib
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline


class SqliteImages:
    """The table images(id INTEGER PRIMARY KEY, pixels BLOB, label INTEGER), whose ids are 0 to n - 1."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = sqlite3.connect(path, check_same_thread=False)
        self._lock = threading.Lock()
        self._count = self._connection.execute("SELECT COUNT(*) FROM images").fetchone()[0]
        self.spec = {
            "image": jax.ShapeDtypeStruct((8, 8), np.uint8),
            "label": jax.ShapeDtypeStruct((), np.int32),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """Identifies the data when a checkpoint is restored: the number of rows, and a digest of some of them."""
        digest = hashlib.sha256()
        for pixels, label in self._fetch(sorted({0, self._count // 2, self._count - 1})):
            digest.update(pixels + label.to_bytes(4, "little"))
        return {"kind": "sqlite images", "count": self._count, "sampled": digest.hexdigest()}

    def __len__(self) -> int:
        return self._count

    def read(self, rows: np.ndarray, out: dict[str, np.ndarray]) -> None:
        """Called with rows in any order and with repeats, from several threads at once."""
        ids, offsets = np.unique(rows, return_inverse=True)
        pixels, labels = zip(*self._fetch(ids.tolist()), strict=True)
        out["image"][:] = np.frombuffer(b"".join(pixels), np.uint8).reshape(-1, 8, 8)[offsets]
        out["label"][:] = np.array(labels, np.int32)[offsets]

    def close(self) -> None:
        self._connection.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Only for Reading(workers=...): each worker process opens the file for itself."""
        return SqliteImages, (self._path,)

    def _fetch(self, ids: Sequence[int]) -> list[tuple[bytes, int]]:
        query = f"SELECT pixels, label FROM images WHERE id IN ({','.join(map(str, ids))}) ORDER BY id"
        with self._lock:
            return self._connection.execute(query).fetchall()


def write(path: Path, count: int) -> None:
    """Stands in for your data: all pixels of an image equal its label."""
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE images (id INTEGER PRIMARY KEY, pixels BLOB, label INTEGER)")
        rows = ((i, bytes([i % 10] * 64), i % 10) for i in range(count))
        connection.executemany("INSERT INTO images VALUES (?, ?, ?)", rows)
    connection.close()


def main() -> None:
    path = Path(tempfile.mkdtemp()) / "images.sqlite"
    write(path, count=1000)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))

    source = SqliteImages(path)
    seen = []
    with feedline.Feed(source, batch_size=64, sharding=sharding, epochs=1, remainder="pad") as feed:
        for batch in feed:
            image, label = np.asarray(batch["image"]), np.asarray(batch["label"])
            assert (image == label[:, None, None]).all()  # the pixels and the label of one row
            seen += label[np.asarray(batch["valid"])].tolist()
    source.close()  # a feed closes only what it opened itself, from a path
    print(f"{len(seen)} rows of {len(feed)} batches, {seen.count(7)} of them with label 7")


if __name__ == "__main__":
    main()
