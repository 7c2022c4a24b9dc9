"""A feed as an item of an Orbax checkpoint, by Orbax's handlers and by the protocol of its API version 1."""

import importlib
from typing import ClassVar

import grain
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as v1
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

import feedline
from feedline.checkpoint import Restore, Save


def lane(number, count):
    return grain.MapDataset.range(number, 640, count).map(lambda i: {"x": np.int32(i)}).to_iter_dataset()


SOURCES = {"rows": {"x": np.arange(640, dtype=np.int32)}, "lanes": feedline.Lanes(lane, 4)}


@pytest.fixture(params=SOURCES)
def source(request):
    return SOURCES[request.param]


def test_the_manager_saves_a_feed_and_takes_another_there(source, sharding, tmp_path):
    with (
        ocp.CheckpointManager(tmp_path) as manager,
        feedline.Feed(source, 8, sharding) as feed,
        feedline.Feed(source, 16, sharding) as other,
    ):
        for _ in range(3):
            next(feed)
        parts = ocp.args.Composite(state=ocp.args.StandardSave({"w": np.ones(3)}), feed=Save(feed))
        manager.save(3, args=parts)
        following = [next(feed)["x"] for _ in range(2)]  # while the checkpoint is written
        manager.wait_until_finished()
        found = manager.restore(3, args=ocp.args.Composite(feed=Restore(other)))
        assert found.feed["step"] == 3
        assert sorted(np.asarray(next(other)["x"])) == sorted(np.concatenate(following))


def test_version_1_saves_a_feed_and_takes_another_there(source, sharding, tmp_path):
    with feedline.Feed(source, 8, sharding) as feed, feedline.Feed(source, 8, sharding) as other:
        for _ in range(3):
            next(feed)
        v1.save_checkpointables(tmp_path / "3", {"state": {"w": np.ones(3)}, "feed": feed})
        following = next(feed)["x"]
        v1.load_checkpointables(tmp_path / "3", {"feed": other})
        np.testing.assert_array_equal(next(other)["x"], following)


class Bucket(MemoryFileSystem):
    """A bucket in memory, whose paths may begin with gs://, as etils passes them."""

    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://")).removeprefix("/")


def test_a_feed_is_saved_to_a_bucket(source, sharding, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "gcs", Bucket)
    folder = epath.Path(f"gs://bucket/{tmp_path.name}")
    folder.mkdir(parents=True)
    with feedline.Feed(source, 8, sharding) as feed, feedline.Feed(source, 8, sharding) as other:
        next(feed)
        handler = ocp.checkpoint_args.get_registered_handler_cls(Save)()
        handler.save(folder, Save(feed))
        following = next(feed)["x"]
        handler.restore(folder, Restore(other))
        np.testing.assert_array_equal(next(other)["x"], following)
    assert not list(tmp_path.iterdir())
    with feedline.Feed(source, 8, sharding) as feed, pytest.raises(ValueError, match="epath"):
        feedline.save_lanes(feed.get_state() | {"lanes": {}, "writers": []}, str(folder))


@pytest.mark.parametrize(
    "save", [Save, lambda feed: ocp.args.JsonSave(feed.get_state())], ids=["Save", "JsonSave"]
)
def test_json_of_orbax_and_save_write_the_same(save, sharding, tmp_path):
    with feedline.Feed(SOURCES["rows"], 8, sharding) as feed:
        next(feed)
        state = feed.get_state()
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(1, args=ocp.args.Composite(feed=save(feed)))
        next(feed)
        for restore in (Restore(feed), ocp.args.JsonRestore()):
            with ocp.CheckpointManager(tmp_path) as manager:
                assert manager.restore(1, args=ocp.args.Composite(feed=restore)).feed == state
        assert feed.get_state() == state


def test_other_data_are_refused_unless_allowed(sharding, tmp_path):
    other = {"x": np.arange(1, 641, dtype=np.int32)}
    with ocp.CheckpointManager(tmp_path) as manager, feedline.Feed(SOURCES["rows"], 8, sharding) as feed:
        manager.save(0, args=ocp.args.Composite(feed=Save(feed)))
        with feedline.Feed(other, 8, sharding) as changed:
            with pytest.raises(ValueError, match="data"):
                manager.restore(0, args=ocp.args.Composite(feed=Restore(changed)))
            manager.restore(0, args=ocp.args.Composite(feed=Restore(changed, allow=("data",))))
