"""The verdict on batches whose times were written by hand."""

import dataclasses
import itertools
import json
import re

import pytest
from planted import HOW, judged, window

from feedline._src.listen.verdict import ProcessTimes, best_settings, predicted_wait_s, straggler

# --- the verdict ---


@pytest.mark.parametrize("stage", ["read", "host", "place"])
def test_the_largest_stage_binds_if_the_loop_waits(stage):
    times = {"read": 0.004, "host": 0.004, "place": 0.004, stage: 0.022}
    report = judged(window(**times, wait=0.005), HOW)
    assert (report.bound, report.au) == (stage, pytest.approx(10 / 15))
    assert report.headroom[stage] == pytest.approx(10 / 11)
    assert report.headroom["compute"] == pytest.approx(1.5)


def test_python_during_which_the_devices_are_idle_is_no_compute():
    report = judged(window(read=0.001, wait=0.0001, loop=0.030, idle=0.99), HOW)
    assert (report.bound, report.change) == ("loop", None)
    assert report.au == pytest.approx(0.01 * 0.030 / 0.0301)
    assert report.wait_share == pytest.approx(0.0001 / 0.0301)
    assert report.verdict == (
        "Python in the loop limits training: the devices are idle for 99 % of the time, and the loop waits for "
        "input 0 % of the time (AU 1 %)"
    )
    assert ": 30.0 ms the loop's own (devices idle for 29.7 ms), 0.100 ms waiting" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["idle_s"] == pytest.approx(0.0297)


SLOW_DISK = {"read": 0.400, "wait": 0.015, "cpu": 0.001}
SLOW = {"read": 0.060, "wait": 0.020}


def but(how=HOW, **more):
    return dataclasses.replace(how, **more)


DEEP = HOW.having(threads=16, buffer=32, prefetch=32)
HELD = but(gil_wait_s=0.005, may_use_workers=True)
WORKERS, SLOTS = HOW.having(threads=0, workers=2), HOW.having(threads=8, prefetch=1)
HOLDS = {"host": 0.040, "wait": 0.010, "cpu": 0.020}


@pytest.mark.parametrize(
    ("given", "how", "bound", "advice"),
    [
        ({"read": 0.010, "wait": 0.0004}, HOW, "compute", "nothing to change: input could be 2 times as fast "),
        ({"read": 0.001, "late": 0.0004}, HOW, "compute", "nothing to change: input could be 19.2 times as fast"),
        ({"read": 0.002, "wait": 0.0021, "late": 0.0003}, HOW.having(prefetch=0), "read", "threads 2 → 8, prefet"),
        ({"read": 0.001, "idle": 0.3}, HOW, "compute", "nothing to change: input could be 20 times as fast"),
        # input is the limit: with less Python in the loop, the loop would only wait longer
        ({"read": 0.028, "wait": 0.004, "cpu": 0.001, "idle": 0.9}, HOW, "read", "threads 2 → 3"),
        (
            {"read": 0.028, "wait": 0.004, "cpu": 0.001}, HOW, "read",
            "threads 2 → 3, buffer 2 → 3: wait 29 % → 0 %$",
        ),
        (
            {"read": 0.028, "wait": 0.004, "cpu": 0.028}, but(cores=2), "read",
            "no setting helps: reading needs 28.0 ms of processor time a batch on 2 cores",
        ),
        # transfers take longer than the loop
        ({**SLOW, "late": 0.012, "cpu": 0.001}, HOW, "read", ".*: wait 100 % → 100 %$"),
        (SLOW_DISK, DEEP, "read", "no setting helps: reading waits for storage, the network or a lock"),
        (HOLDS, HELD, "host", "workers 0 → 4: "),
        (HOLDS, but(HELD, may_use_workers=False), "host", ".*host work holds the GIL, so"),
        # a transform that sleeps does not hold the GIL, however busy the machine is
        (
            {"host": 0.0088, "cpu": 0.0011, "wait": 0.0024, "loop": 0.002},
            but(HELD, gil_wait_s=0.004, cores=2), "host", "threads 2 → ",
        ),
        (SLOW, but(found=frozenset({"buffer"})), "read", "threads 2 →"),
        (
            SLOW, but(found=frozenset(HOW.settings._fields)), "read",
            "no setting helps: reading waits for storage, the network or a lock",
        ),
        (
            SLOW,
            but(found=frozenset({"threads", "workers"}), searching=True), "read",
            "nothing yet: better values of threads, workers are being looked for",
        ),
        ({"place": 0.4, "wait": 0.015}, DEEP, "place", "no setting helps: ship fewer bytes"),
        ({"wait": 0.0003, "late": 0.0004}, HOW.having(prefetch=1), "place", "prefetch 1 → 2: transfers overlap "),
        ({"read": 0.016, "place": 0.012, "wait": 0.002}, SLOTS, "place", "prefetch 1 → 2: wait 17 % → 0 %"),
        ({"read": 0.012, "place": 0.011, "wait": 0.002}, WORKERS, "place", "no setting helps: ship fewer bytes"),
        ({"read": 0.012, "host": 0.010, "place": 0.009, "wait": 0.002}, WORKERS, "read", "workers 2 → 3: "),
    ],
)  # fmt: skip
def test_what_limits_training_and_what_to_change(given, how, bound, advice):
    report = judged(window(**given), how)
    assert report.bound == bound
    assert re.match(advice, report.advice), report.advice
    assert report.headroom["place"] <= 1 or bound != "place"


@pytest.mark.parametrize(
    ("given", "how"),
    [
        ({"read": 0.0008, "place": 0.0004, "cpu": 0.0005, "wait": 0.0019}, HOW),
        ({"read": 0.0008, "place": 0.0004, "wait": 0.0016, "late": 0.0003}, but(gil_wait_s=0.006)),
        # reading holds the GIL, but only for a fraction of the loop's time
        ({"read": 0.006, "loop": 0.100, "wait": 0.019, "cpu": 0.006}, HELD),
        ({"read": 0.012, "place": 0.006, "wait": 0.0019}, WORKERS),
    ],
)
def test_no_stage_is_named_that_its_own_figures_clear(given, how):
    report = judged(window(**given), how)
    assert min(report.headroom[stage] for stage in ("read", "host", "place")) > 1.6
    assert (report.bound, report.change) == ("machine", None)
    assert report.verdict == (
        "the machine is busy: threads of the feed wait for the GIL or a processor, and the loop waits for input "
        "16 % of the time (AU 84 %)"
    )
    assert report.advice.startswith("no setting helps: end other programs on ")


def test_uneven_reads_are_named_unless_threads_wait_for_the_gil():
    """A Python thread that spins delays some reads, too; then a larger buffer would not help."""
    even = window(read=0.0, host=0.010, cpu=0.0005, wait=0.0019)
    uneven = [each._replace(read_s=0.080 if i % 10 == 0 else 0.0) for i, each in enumerate(even.batches)]
    given = dataclasses.replace(even, batches=uneven)
    report = judged(given, HOW)
    assert report.bound == "read"
    assert report.verdict.startswith("reading limits training, although alone it is fast enough on average: ")
    assert {*report.change.then} in ({"buffer"}, {"prefetch"})
    held = judged(given, but(gil_wait_s=0.006))
    assert (held.bound, held.change) == ("machine", None)
    holds_the_gil = window(place=0.015, read=0.001, wait=0.006, cpu=0.016)
    assert judged(holds_the_gil, HELD.having(threads=8, prefetch=8)).bound == "place"


@pytest.mark.parametrize(
    ("make_s", "how", "wait_s"),
    [  # a loop of 6 ms; batch i begins when i - 5 is taken (buffer=4: i - 7, buffer=8: i - 11, stream: i - 3)
        ([0.048] + 9 * [0.0], HOW, (0.048 - 5 * 0.006) / 10),
        ([0.048] + 9 * [0.0], HOW.having(buffer=4), (0.048 - 7 * 0.006) / 10),
        ([0.048] + 9 * [0.0], HOW.having(buffer=8), 0.0),
        (2 * [0.050] + 18 * [0.0], HOW, (0.050 - 5 * 0.006) / 20),  # the second thread reads meanwhile
        (3 * [0.050] + 17 * [0.0], HOW, (0.050 - 5 * 0.006 + 0.050 - 0.006 - 0.006) / 20),
        (3 * [0.050] + 27 * [0.0], but(HOW.having(buffer=1), stream=True), (3 * 0.050 - (3 + 2) * 0.006) / 30),
        (10 * [0.024], HOW.having(buffer=8), 0.024 / 2 - 0.006),
        (10 * [0.011], HOW, 0.0),
    ],
)
def test_the_predicted_wait_for_uneven_batches(make_s, how, wait_s):
    even = window(count=10 * len(make_s), loop=0.006)
    batches = [each._replace(read_s=make_s[i % len(make_s)]) for i, each in enumerate(even.batches)]
    now = but(how, window=dataclasses.replace(even, batches=batches))
    assert predicted_wait_s(now, now) == pytest.approx(wait_s, rel=0.01, abs=1e-6)


def test_a_report_as_values_is_json_and_has_all_that_the_text_says():
    report = judged(window(read=0.028, wait=0.004, cpu=0.001), HOW)
    values = json.loads(json.dumps(report.to_dict()))
    assert values["bound"] == "read"
    now, then = (values["change"][when] for when in ("now", "then"))
    assert (now, then) == ({"threads": 2, "buffer": 2}, {"threads": 3, "buffer": 3})
    assert values["settings"] == {"threads": 2, "workers": 0, "buffer": 2, "prefetch": 2}
    text = str(report)
    assert text.startswith("reading limits training: the loop waits for input 29 % of the time (AU 71 %)\n")
    assert text.endswith("advice: threads 2 → 3, buffer 2 → 3: wait 29 % → 0 %")


def test_no_more_than_32_batches_are_read_ahead():
    found = best_settings(but(window=window(read=2.0, wait=1.0)), {"threads", "buffer"}, max_threads=64)
    assert found[0] == HOW.settings._replace(threads=64, buffer=32)


# --- several processes ---


def process(number, read=0.004, **times):
    return ProcessTimes.of(but(window=window(read=read, place=0.001, **times), process=number))


def test_the_process_that_reads_slowly_is_the_straggler():
    """The others wait for it inside the step, so their loops' own times are long."""
    others = [process(0, loop=0.020), process(1, read=0.040, wait=0.010), process(2, loop=0.020)]
    found = straggler(others)
    assert (found.process, found.stage, found.stage_s) == (1, "read", 0.040)
    assert found.others_s == pytest.approx(0.004)
    assert {straggler(list(each)) for each in itertools.permutations(others)} == {found}
    assert straggler(others[:2]) == found
    workers = others[1]._replace(stages_s={"read": 0.040, "host": 0.0, "place": 0.050}, limits=("read", "host"))
    assert straggler([others[0], workers]).stage == "read"  # workers read while a thread places
    here = judged(window(read=0.004, place=0.001, loop=0.020), HOW, others)
    assert (here.bound, here.au, here.change) == ("straggler", pytest.approx(0.5), None)
    assert here.verdict == (
        "process 1 holds up the others: its reading takes 40.0 ms a batch, 4.00 ms in the others; the loop "
        "waits for input 50 % of the time (AU 50 %)"
    )
    assert here.advice == "look at process 1: its own report says what to change"
    there = judged(window(read=0.040, place=0.001, wait=0.010, cpu=0.001), but(process=1), others)
    assert there.bound == "straggler"
    assert "threads" in there.change.then


def test_a_process_that_is_a_little_slower_holds_up_others_that_do_not_wait():
    """Otherwise their own reports would say that nothing has to change, or blame Python in the loop."""
    others = [process(0, read=0.040, loop=0.020), process(1, read=0.046, wait=0.010)]
    here = judged(window(read=0.040, place=0.001, loop=0.0205, idle=0.9), HOW, others)
    assert (here.bound, here.straggler.process) == ("straggler", 1)


def test_no_straggler():
    slow, alike = process(0, read=0.040, wait=0.010), process(1, read=0.040, wait=0.010)
    fast_enough = [process(0), process(1, read=0.012)]
    held_up = [process(0), process(1, read=0.012, wait=0.002)]  # it waits, but its input is faster than its loop
    assert [straggler(each) for each in ([], [slow], [slow, alike], fast_enough, held_up)] == [None] * 5
    most_alike = [process(i, read=0.040, wait=0.010) for i in (1, 2, 3)]
    transfers = [process(0), process(1, late=0.003)]
    for others, bound in ((held_up, "machine"), (most_alike, "read"), (transfers, "place")):
        report = judged(window(read=0.004), HOW, others)
        assert (report.bound, report.advice[:17]) == (bound, "look at process 1")
        assert not report.waits
        assert "fast enough" not in report.verdict  # which the other process may not be
