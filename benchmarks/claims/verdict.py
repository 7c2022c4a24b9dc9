"""Does the report name the bottleneck that was planted in a real feed, and how long the loop waits?

Reading or the transform sleeps for a multiple of what the loop sleeps. Refuted if the report names another stage
than the planted one; if its wait share differs by more than 0.03 from that by the loop's own clock; if, once its
advice is followed, the wait share differs by more than 0.06 from the predicted one; or if the stalls that
`Feed.diagnose` finds differ by more than 40 % from the planted ones. Other programs disturb these figures.

    python benchmarks/claims/verdict.py --out verdict.json   # a minute
"""

import contextlib
import io
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from shared.script import parser, save
from shared.slow import Slow, computation

import feedline

ROWS, LOOP_S, THREADS = 64, 0.006, 2


def transform_of(seconds):
    def slow(batch, rows):
        time.sleep(seconds * len(rows.index) / ROWS)
        return batch

    return slow if seconds else None


def trained(steps, read=0.0, host=0.0, every=1, prefetch=2, threads=THREADS, buffer=2):
    """(the feed's report after a loop that sleeps, the share of time in `next` by the loop's own clock)."""
    reading = feedline.Reading(threads=threads, buffer=buffer)
    options = {"reading": reading, "prefetch": prefetch, "transform": transform_of(host)}
    drained = prefetch + buffer + 1  # batches that were read ahead
    with feedline.Feed(Slow(read, (4,), ROWS, every), ROWS, jax.devices()[0], **options) as feed:
        waited_s, began = 0.0, 0.0
        for step in range(steps + drained):
            asked = time.perf_counter()
            next(feed)
            ended = time.perf_counter()
            waited_s += ended - asked
            if step == drained - 1:
                began, waited_s = ended, 0.0
            time.sleep(LOOP_S)
        return feed.report(), waited_s / (ended - began)


def planted(steps):
    """Yield (name, options of `trained`, the planted bottleneck), for single stages, pairs, and the loop."""
    for stage in ("read", "host"):
        for factor in (1.2, 2, 5):
            yield f"{stage} × {factor}", {stage: factor * LOOP_S * THREADS, "steps": steps}, stage
    for first, second in (("read", "host"), ("host", "read")):
        slow = {first: 2 * LOOP_S * THREADS, second: 1.2 * LOOP_S * THREADS}
        yield f"{first} × 2, {second} × 1.2", {**slow, "steps": steps}, first
    for factor in (0, 0.5, 0.77):
        yield f"read × {factor}", {"read": factor * LOOP_S * THREADS, "steps": 2 * steps}, "loop"
    yield "no prefetch", {"read": LOOP_S, "host": LOOP_S / 2, "prefetch": 0, "steps": steps}, "read"
    yield "each tenth read × 8", {"read": 8 * LOOP_S, "every": 10, "steps": 3 * steps}, "read"


def reports(steps):
    """Compare the report with each planted bottleneck, and its prediction with a run with the advised settings."""
    for name, options, bound in planted(steps):
        report, waits = trained(**options)
        found = {"planted": name, "expected": bound, "bound": report.bound, "waits": waits}
        found |= {"reported": report.wait_share, "refuted": []}
        if report.bound != bound:
            found["refuted"].append("bound")
        if abs(report.wait_share - waits) > 0.03:
            found["refuted"].append("wait share")
        change = report.change
        if bound != "loop" and change and "workers" not in change.then:
            advised = dict(change.then)
            after, _ = trained(**{**options, **advised})
            found |= {"advised": advised, "predicted": change.wait_share, "after": after.wait_share}
            if abs(after.wait_share - change.wait_share) > 0.06:
                found["refuted"].append("prediction")
        yield found


def ahead(steps):
    """Run a loop that waits only for each tenth step: the devices compute while the loop is in `next`."""
    x, reading = jnp.zeros((ROWS, 64)), feedline.Reading(threads=1)
    busy = computation(x, 2 * LOOP_S)
    with feedline.Feed(Slow(LOOP_S, (4,), ROWS), ROWS, jax.devices()[0], reading=reading) as feed:
        for step in range(1, steps + 1):
            x = busy(x + next(feed)[0, 0])
            if step % 10 == 0:
                x.block_until_ready()
        report = feed.report()
    refuted = [] if report.bound == "compute" and report.au > 0.85 else ["bound"]
    return {"planted": "compute, ahead", "expected": "compute", "bound": report.bound, "refuted": refuted}


def diagnosed(steps):
    """The stalls that `Feed.diagnose` finds, without prefetch, so that the times of the stages add up."""
    fetch_s, host_s = 1.5 * LOOP_S, LOOP_S
    source = Slow(fetch_s, (4,), ROWS, cached=True)
    options = {"transform": transform_of(host_s), "prefetch": 0}
    with feedline.Feed(source, ROWS, jax.devices()[0], **options) as feed, feed.diagnose(steps=steps) as diagnosis:
        for _ in feed:
            time.sleep(LOOP_S)
    stalls = diagnosis.stalls_s
    within = {"fetch": fetch_s, "preparation": host_s}
    refuted = [name for name, seconds in within.items() if abs(stalls[name] - seconds) > 0.4 * seconds]
    return {"planted": "stalls", "expected": within, "found": stalls, "refuted": refuted}


if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--steps", type=int, default=60, help="of each training; below 60 nothing is judged")
    options = asked.parse_args()
    found = [*reports(options.steps), ahead(4 * options.steps)]  # sampling the devices takes a second or two
    with contextlib.redirect_stdout(io.StringIO()):  # hides what the diagnosis prints
        found.append(diagnosed(max(48, 2 * options.steps)))
    for each in found:
        print(f"{each['planted']:24} {each.get('bound', '')!s:8} refuted: {', '.join(each['refuted']) or 'no'}")
    save("verdict", options, results=found)
    if options.steps >= 60 and any(each["refuted"] for each in found):
        sys.exit("refuted")
