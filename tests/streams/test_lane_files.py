"""`save_lanes` and `load_lanes`: a checkpoint of lanes is loaded as a whole or refused."""

import json
import re
import resource
import threading

import jax
import numpy as np
import pytest
from background import PATIENCE_S, spawn
from limits import limited

from feedline import load_lanes, save_lanes
from feedline._src.loader.lane_files import read_state

PLACE = {"version": 1, "step": 7, "epoch": 1, "position": 24, "fingerprint": {"format": "3 lanes"}}
LANES = {"0": {"next_index": 8}, "1": None, "2": {"parents": [{"next_index": 3}], "stop": True}}


def state(writers=(0, 0, 0), **place):
    return {**PLACE, **place, "lanes": LANES, "writers": list(writers)}


def test_what_is_saved_is_loaded(tmp_path):
    save_lanes(state(), tmp_path / "not" / "there yet")
    assert load_lanes(tmp_path / "not" / "there yet") == state()
    names = sorted(path.name for path in tmp_path.glob("*/*/*"))
    assert names == [f"lane-0000{lane}-of-00003.json" for lane in range(3)]
    for path in tmp_path.glob("*/*/*"):
        path.write_text(re.sub(r', "checksum": \d+', "", path.read_text()))  # as earlier versions saved it
    assert load_lanes(tmp_path / "not" / "there yet") == state()


def test_each_process_writes_the_lanes_that_it_is_to_save(tmp_path, monkeypatch):
    written = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        save_lanes(state(writers=[2, 0, 2]), tmp_path)
        written.append(sorted(path.name[9] for path in tmp_path.iterdir()))
    assert written == [["1"], ["1"], ["0", "1", "2"]]
    assert load_lanes(tmp_path) == state()


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_missing_lane_is_named(tmp_path, lane):
    save_lanes(state(), tmp_path)
    (tmp_path / f"lane-0000{lane}-of-00003.json").unlink()
    with pytest.raises(
        ValueError, match=rf"all 3 lanes, and .* lacks 1 of them, the first being lane {lane}: a save"
    ):
        load_lanes(tmp_path)


def test_lanes_of_two_steps_are_refused(tmp_path):
    save_lanes(state(), tmp_path)
    save_lanes(state(writers=[0, 1, 1], step=8, position=32), tmp_path)  # process 1 did not save
    with pytest.raises(
        ValueError, match=r"of one step, and lane-00001-of-00003.json has step 7, but lane-00000.* has 8: "
    ):
        load_lanes(tmp_path)


@pytest.mark.parametrize("text", ["", '{"lane": 0', "[1]", "5", '{"lane": 0, "count": 3}'])
def test_a_file_that_is_broken_is_named(tmp_path, text):
    save_lanes(state(), tmp_path)
    (tmp_path / "lane-00002-of-00003.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"lane-00002-of-00003.json is not a file that save_lanes wrote: .*an older"
    ):
        load_lanes(tmp_path)


@pytest.mark.parametrize("text", ["", '{"step": 0', "[1]", "5", pytest.param("[" * 10**5, id="deep")])
def test_a_broken_state_is_named(tmp_path, text):
    (tmp_path / "metadata").write_text(text)
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/metadata must be the state of a feed .*an older checkpoint"
    ):
        read_state(tmp_path)


def test_a_state_that_is_not_json_is_named(tmp_path):
    lanes = {"0": None, "1": {"next_index": np.int64(5)}}
    with pytest.raises(TypeError, match=r"JSON values, and that of lane 1 did not: .*int64.* int\(\)"):
        save_lanes({**PLACE, "lanes": lanes, "writers": [0, 0]}, tmp_path)


def test_an_interrupted_save_leaves_the_earlier_file_whole(tmp_path, monkeypatch):
    save_lanes(state(), tmp_path)
    monkeypatch.setattr("os.fsync", lambda file: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save_lanes(state(step=8), tmp_path)
    assert load_lanes(tmp_path) == state()
    assert len(list(tmp_path.iterdir())) == 3  # and no part of a file


def test_two_threads_may_save_the_same_at_once(tmp_path, monkeypatch):
    both = threading.Barrier(2)
    monkeypatch.setattr("os.fsync", lambda file: both.wait(PATIENCE_S))
    saves = [spawn(lambda: save_lanes(state(), tmp_path)) for _ in range(2)]
    assert [save.result(PATIENCE_S) for save in saves] == [None, None]
    assert load_lanes(tmp_path) == state()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_full_disk_names_the_file_and_leaves_nothing_half_written(tmp_path):
    message = r"could not write a lane \(File too large\).* save to another"
    with pytest.raises(OSError, match=message) as caught, limited(resource.RLIMIT_FSIZE, 64):
        save_lanes(state(), tmp_path / "new")
    assert caught.value.filename == str(tmp_path / "new" / "lane-00000-of-00003.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_what_was_loaded_is_saved_by_process_0(tmp_path, monkeypatch):
    save_lanes(state(), tmp_path / "first")
    for process in (1, 0):
        assert not (tmp_path / "second").exists() or not list((tmp_path / "second").iterdir())
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        save_lanes(load_lanes(tmp_path / "first"), tmp_path / "second")
    assert load_lanes(tmp_path / "second") == load_lanes(tmp_path / "first")


def test_other_states_and_other_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match="save_lanes takes the state of a stream, and this one has no lanes"):
        save_lanes(PLACE, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no file lane-\*-of-\*.json; save_lanes writes them"):
        load_lanes(tmp_path)
    assert json.dumps(state())
