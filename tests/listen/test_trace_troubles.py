"""`feed.trace` used wrongly, ended by exceptions, and written to disks that are full."""

import concurrent.futures
import logging
import os
import resource
import time

import pytest
from limits import limited
from planted import ROWS, Sleeping
from trace_file import ONE, Trace, feed_of

import feedline
from feedline._src.listen import accounts as module
from feedline._src.listen.accounts import Accounts
from feedline._src.listen.trace import file_of_process


def test_a_path_that_cannot_be_written(tmp_path, monkeypatch):
    with feed_of("one thread", tmp_path) as feed:
        (tmp_path / "file").touch()
        for name in ("absent", "file"):
            with pytest.raises(OSError, match=rf"into a folder, and .*{name} is missing or not writable"):
                feed.trace(tmp_path / name / "trace.json").__enter__()
        for path in (tmp_path, "/dev/null"):
            with pytest.raises(OSError, match=f"regular file, and {path} is not one; add a name"):
                feed.trace(path).__enter__()
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(OSError, match="not writable"):
            feed.trace(tmp_path / "trace.json").__enter__()
        assert os.path.exists("/dev/null")
        next(feed)


def test_one_trace_at_a_time(tmp_path):
    with feed_of("one thread", tmp_path) as feed:
        with feed.trace(tmp_path / "a.json"):
            with pytest.raises(ValueError, match="traced already; leave that context first"):
                feed.trace(tmp_path / "b.json").__enter__()
            next(feed)
        with feed.trace(tmp_path / "b.json"):
            next(feed)
        with feed.diagnose(steps=40), pytest.raises(ValueError, match="is not traced while it is diagnosed"):
            feed.trace(tmp_path / "c.json")
    with pytest.raises(ValueError, match="the feed is closed"):
        feed.trace(tmp_path / "c.json")
    assert [len(Trace(tmp_path / name).named("step")) for name in ("a.json", "b.json")] == [1, 1]
    assert not (tmp_path / "c.json").exists()


def test_another_thread_traces_while_the_loop_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_RECORDS", None)  # no record is dropped, however late the tracing thread is

    def trace(number):
        with feed.trace(tmp_path / f"{number}.json") as path:
            time.sleep(0.01)
        return [span.args["step"] for span in Trace(path).named("step")]

    with feedline.Feed(Sleeping(), ROWS, ONE) as feed, concurrent.futures.ThreadPoolExecutor(1) as pool:
        traces = [pool.submit(trace, number) for number in range(20)]
        while not traces[-1].done():
            next(feed)
    steps = [each.result() for each in traces]
    assert all(each == list(range(each[0], each[0] + len(each))) for each in steps if each)
    assert any(steps)


def test_a_batch_that_is_taken_while_another_thread_ends_the_trace(tmp_path, monkeypatch):
    whole = Accounts.record_with

    def later(accounts, recorder):
        if recorder is None:
            next(feed)
        whole(accounts, recorder)

    monkeypatch.setattr(Accounts, "record_with", later)
    with feed_of("one thread", tmp_path) as feed, feed.trace(tmp_path / "trace.json") as path:
        next(feed)
    assert [span.args["step"] for span in Trace(path).named("step")] == [1, 2]  # `Trace` checks the durations


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=repr)
def test_an_exception_passes_on_unchanged_and_the_file_is_written(error, tmp_path):
    with feed_of("one thread", tmp_path) as feed:
        with pytest.raises(type(error)) as caught, feed.trace(tmp_path / "trace.json") as path:  # noqa: PT012
            next(feed)
            raise error
        next(feed)
    assert caught.value is error
    assert (error.__context__, error.__cause__) == (None, None)
    assert len(Trace(path).named("step")) == 1


def test_a_full_disk(tmp_path, caplog):
    """A write beyond the limit on the size of files fails like a write to a full disk."""
    name = "trace.json"
    (tmp_path / name).write_text("of before")
    with feed_of("one thread", tmp_path) as feed:
        with limited(resource.RLIMIT_FSIZE, 400), feed.trace(tmp_path / name):
            next(feed), next(feed)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert f"could not be written to {tmp_path / name}: " in record.message
        assert "File too large. Training goes on; free space on that disk" in record.message
        assert sorted(os.listdir(tmp_path)) == sorted([name, "x.npy"])  # nothing half written
        assert (tmp_path / name).read_text() == "of before"
        next(feed)


def test_each_process_has_its_own_file(tmp_path, monkeypatch):
    assert file_of_process(tmp_path / "a.json", 0, 1) == tmp_path / "a.json"
    assert file_of_process(tmp_path / "a.json.gz", 3, 8) == tmp_path / "a-process3.json.gz"
    assert file_of_process(f"{tmp_path}/a", 0, 2) == tmp_path / "a-process0"
    monkeypatch.chdir(tmp_path)
    assert file_of_process("a.json", 0, 1) == tmp_path / "a.json"  # absolute: the directory may change meanwhile
