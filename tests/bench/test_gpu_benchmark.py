"""The GPU benchmark: all parts run with small sizes on CPU devices, and the trace of a GPU is read correctly."""

import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
from gpu import traced

from feedline._src.tools.bench.workload import Workload

TINY = Workload(depth=3, width=32, inputs=16, outputs=4, rows=64)
CASES = """
import os, subprocess, sys, time

def good(scale):
    return {"good": lambda: {"rate": 1.0}, "bad": lambda: 1 // 0}

def crash(scale):
    return {"good": lambda: {"rate": 2.0}, "bad": lambda: os._exit(7), "later": lambda: {"rate": 3.0}}

def hang(scale):
    def forever():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        open(scale, "w").write(str(child.pid))
        time.sleep(100)
    return {"bad": forever}

def refuses(scale):
    raise ValueError("no cases here")
"""
PARTS = ("transfer", "overlap", "utilisation", "feed", "registered", "pinned", "memory")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(out, *options):
    command = [sys.executable, BENCHMARKS / "gpu" / "gpu.py", "--out", out, "--cpu-devices", "2", *options]
    return programs.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    chosen = ("MB", "prefetch", "× input, 0 ahead", "rows of 256 B", "1,000 steps")  # half of the longest parts
    ran = run(out, "--part", *PARTS, "--case", *chosen)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "device 1 " in ran.stdout
    return json.loads(out.read_text())


@pytest.mark.slow
def test_the_parts_without_child_processes_run_on_cpu_devices(result):
    sections = result["sections"]
    assert {name: len(found["results"]) for name, found in sections.items()} == {
        "transfer": 2 * 2 * 2,
        "overlap": 4 * 2,
        "utilisation": 3,
        "feed": 1,
        "registered": 2,
        "pinned": 2,
        "memory": 1,
    }
    assert not any(found["errors"] or found["skipped"] for found in sections.values())
    assert all(found["wall_s"] > 0 for found in sections.values())
    for each in sections["transfer"]["results"]:
        assert set(each["bytes_per_s"]) == {"pageable", "staged", "pinned"}
        assert all(len(way["samples"]) == 2 and min(way["samples"]) > 0 for way in each["bytes_per_s"].values())
    for each in sections["overlap"]["results"]:
        assert each["transfers"] > 0  # the calls that place, on a CPU
        assert 0 <= each["hidden_s"] <= each["transfer_s"]
        assert each["compute_s"] > 0
    for each in sections["utilisation"]["results"]:
        assert list(each["au"]) == ["0", "1", "2", "3"]
        assert all(au > 0 for au in each["au"].values())
        assert each["headroom"] > -1
    assert all("not supported" in each["unavailable"] for each in sections["registered"]["results"])
    for each in sections["pinned"]["results"]:
        assert set(each["bytes_per_s"]) == {"dlpack", "pinned"}
    (watched,) = sections["memory"]["results"]
    assert (watched["steps"], watched["step_ms"] > 0) == (1000, True)
    assert list(watched["held"]) == ["start", "warm", "end"]
    assert watched["held"]["start"]["live arrays"] < watched["held"]["end"]["live arrays"]
    assert watched["held"]["end"]["slabs"] > 0
    assert not any(each["what"].startswith(("arrays", "slabs")) for each in watched["growths"])
    assert {"platform": "cpu", "devices": 2}.items() <= result["machine"].items()
    assert len(result["verdicts"]) == 7
    assert {each["holds"] for each in result["verdicts"]} == {None}  # nothing is judged on a CPU


@pytest.fixture
def tiny():
    from gpu.scale import QUICK

    return dataclasses.replace(QUICK, training=TINY, square=64, training_rounds=2, training_seconds=0.02)


def results(cases, *names):
    """The figures of these cases."""
    from gpu.apart import section

    found = list(section({name: cases[name] for name in names}, float("inf")))
    assert [kind for kind, *_ in found] == ["results"] * len(names), found
    return [figures for *_, figures in found]


@pytest.mark.slow
def test_the_part_modes(tiny):
    from gpu.training import modes_cases

    cases = modes_cases(tiny)
    assert list(cases) == [
        "bfloat16",
        "jit_single",
        "jit_multi",
        "pmap",
        "largest jit_single",
        "largest jit_multi",
    ]
    reduced, single = results(cases, "bfloat16", "jit_single")
    assert (reduced["compute"], reduced["rows"], reduced["flops"]) == ("bfloat16", 64, TINY.flops)
    rates = reduced["flops_per_s_samples"]
    assert set(rates) == {"step", "fed", "layer", "square"}
    assert all(len(of) == 2 and min(of) > 0 for of in rates.values())
    shares = [
        step / max(products)
        for step, *products in zip(rates["step"], rates["layer"], rates["square"], strict=True)
    ]
    assert reduced["of_matmul"] == pytest.approx(sum(shares) / 2)
    assert (single["mode"], single["devices"], single["doubled"]["rows"]) == ("jit_single", 1, 128)
    assert single["of_matmul"] > 0
    with pytest.raises(RuntimeError, match='figures of the case "jit_multi", which are missing'):
        cases["largest jit_multi"]()


@pytest.mark.slow
def test_a_product_is_timed_by_its_operations(monkeypatch):
    import jax
    from gpu import training

    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:2], ("data",)), jax.P("data"))
    clock = iter(range(100))
    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    # one call of 16 products in two ticks of the clock: begin, the loop's condition, end
    assert training._products(64, 32, "bfloat16", sharding)(0) == 2 * 64 * 32**2 * 16 / 2


@pytest.mark.slow
def test_the_part_practices(tiny):
    from gpu.training import practices_cases

    cases = practices_cases(tiny)
    assert {"donate_state", "bfloat16", "remat_all", "asynchronous_saves"} < set(cases)
    (found,) = results(cases, "bfloat16")
    assert len(found["ratios"]) == 2
    assert min(found["on"]["step_ms"], found["off"]["step_ms"], found["ratio"]) > 0


@pytest.mark.slow
def test_a_part_is_merged_into_the_file_and_the_parent_initialises_no_backend(result, tmp_path):
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps(result))
    program = (
        "from gpu import gpu; code = gpu.main(); from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized(); raise SystemExit(code)"
    )
    options = ["--out", out, "--cpu-devices", "2", "--part", "registered", "--case", "4 MB"]
    command = [sys.executable, "-c", program, *options]
    ran = programs.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=400, check=False)
    assert ran.returncode == 0, ran.stderr
    merged = json.loads(out.read_text())
    again, before = merged["sections"].pop("registered"), result["sections"]["registered"]
    assert merged["sections"] == {
        name: found for name, found in result["sections"].items() if name != "registered"
    }
    assert [each["case"] for each in again["results"]] == ["1 MB", "4 MB"]
    assert again["results"][0] == before["results"][0]  # was not chosen
    assert again["results"][1]["wall_s"] != before["results"][1]["wall_s"]


def test_a_part_that_is_measured_again_replaces_its_cases():
    from gpu.saved import begun

    old = {
        "results": [{"case": "a 1"}, {"case": "a 2"}],
        "errors": {"b 1": "x", "the part": "y"},
        "skipped": {"c": "z"},
    }
    assert begun(old, []) == begun(None, ["a"]) == {"results": [], "errors": {}, "skipped": {}}
    assert begun(old, ["1"]) == {"results": [{"case": "a 2"}], "errors": {}, "skipped": {"c": "z"}}


def test_a_file_of_another_machine_or_of_other_sizes_is_refused(tmp_path):
    from gpu import saved
    from gpu.scale import QUICK, Scale

    out = tmp_path / "gpu.json"
    machine = {**dict.fromkeys(saved._SAME, "x"), "load": 0.5}
    fresh = saved.opened(out, machine, QUICK)
    assert fresh["sections"] == {}
    saved.save(out, fresh)
    assert saved.opened(out, {**machine, "load": 1.0}, QUICK) == fresh
    for name in ("device_kind", "jax", "driver", "environment"):
        with pytest.raises(saved.OtherResult, match=f"{name} was 'x' and is 'y'.* Give a new file for --out"):
            saved.opened(out, {**machine, name: "y"}, QUICK)
    with pytest.raises(saved.OtherResult, match="the size rounds was 2 and is 5"):
        saved.opened(out, machine, Scale())
    for other in ("{", "[]", '{"benchmark": "feed"}', '{"benchmark": "gpu", "options": {}}'):
        out.write_text(other)
        with pytest.raises(saved.OtherResult, match="is no result of this version of gpu"):
            saved.opened(out, machine, QUICK)
        assert out.read_text() == other


@pytest.mark.slow
def test_the_command_refuses_a_file_of_another_machine(result, tmp_path):
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({**result, "machine": {**result["machine"], "device_kind": "NVIDIA H200"}}))
    before = out.read_text()
    ran = run(out, "--part", "memory")
    assert (ran.returncode, out.read_text()) == (2, before)
    assert "device_kind was 'NVIDIA H200' and is 'cpu'" in ran.stderr


def test_a_case_that_fails_is_recorded_and_the_others_run():
    from gpu.apart import section

    found = list(section({"bad": lambda: 1 // 0, "good": lambda: {"rate": 1.0}}, float("inf")))
    assert found[0] == ("errors", "bad", "ZeroDivisionError: integer division or modulo by zero")
    assert found[1][:2] == ("results", "good")
    assert found[1][2]["rate"] == 1.0


@pytest.fixture
def failing(monkeypatch, tmp_path):
    """A module with parts that fail, which their processes can import."""
    (tmp_path / "failing_parts.py").write_text(CASES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("failing_parts")
    del sys.modules["failing_parts"]


@pytest.mark.slow
def test_a_part_that_fails_does_not_end_the_others(failing, monkeypatch, capfd):
    from gpu import gpu

    monkeypatch.setattr(gpu, "PARTS", {n: (getattr(failing, n), 1.0) for n in ("crash", "refuses", "good")})
    saved = []
    result = {"machine": {"platform": "cpu"}, "sections": {}}
    gpu.measure(result, None, list(gpu.PARTS), [], 100, lambda result: saved.append(json.dumps(result)))
    crash, refuses, good = (result["sections"][name] for name in gpu.PARTS)
    assert [each["rate"] for each in crash["results"]] == [2.0]  # kept, although the process died after it
    assert crash["errors"] == {"the part": "its process died with exit code 7"}
    assert refuses["errors"] == {"the part": "ValueError: no cases here"}
    assert [each["rate"] for each in good["results"]] == [1.0]
    assert good["errors"] == {"bad": "ZeroDivisionError: integer division or modulo by zero"}
    assert len(saved) == 2 + 1 + 2  # after each case
    assert "no cases here" in capfd.readouterr().err


@pytest.mark.slow
def test_cases_that_do_not_fit_into_the_time_are_listed(failing, monkeypatch):
    from gpu import gpu

    monkeypatch.setattr(gpu, "PARTS", {"good": (failing.good, 1.0)})
    result = {"machine": {"platform": "cpu"}, "sections": {}}
    gpu.measure(result, None, ["good"], ["goo"], 0, lambda result: None)
    found = result["sections"]["good"]
    assert (found["results"], found["errors"]) == ([], {})
    assert found["skipped"] == {"good": "0.0 s were left, and a case took up to 0.0 s"}


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_its_child_processes(failing, monkeypatch, tmp_path, capfd):
    from gpu import apart

    monkeypatch.setattr(apart, "_GRACE_S", 8)
    note = tmp_path / "pid"
    (found,) = apart.part(failing.hang, str(note), [], time.monotonic() + 2)
    assert found == ("errors", "the part", "it hung or was too slow, and was ended after 10 s")
    status = Path("/proc", note.read_text(), "stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child process of the part is still there")
    assert "in forever" in capfd.readouterr().err  # where it hung


def plane(name, lines):
    """A plane of a trace: {line: [(event, start, end), …]}, in ns."""
    return SimpleNamespace(
        name=name,
        lines=[
            SimpleNamespace(
                name=line,
                events=[
                    SimpleNamespace(name=event, start_ns=start, duration_ns=end - start)
                    for event, start, end in events
                ],
            )
            for line, events in lines.items()
        ],
    )


def test_the_share_of_copies_under_compute():
    first = plane(
        "/device:GPU:0",
        {
            "Stream #13(Kernel)": [("gemm", 100, 200), ("fusion", 150, 300), ("gemm", 400, 500)],
            "Stream #14(MemcpyH2D)": [
                ("MemcpyH2D", 0, 100),  # before the first kernel: there is nothing to lie under
                ("MemcpyH2D", 250, 350),  # half under
                ("MemcpyH2D", 420, 520),  # 80 of the 80 that count
                ("MemcpyD2H", 300, 400),
                ("Memset", 300, 400),
            ],
            "XLA Ops": [("copy", 300, 400)],
        },
    )
    second = plane("/device:GPU:1", {"Stream #13": [("CudaGraphExec:2", 0, 100), ("MemcpyH2D", 20, 40)]})
    host = plane("/host:CPU", {"tf_XLA": [("execute", 0, 1000)]})
    found = traced.hidden([first, second, host], "gpu")
    assert found["transfers"] == 3
    assert found["transfer_s"] == pytest.approx(200e-9)
    assert found["compute_s"] == pytest.approx(400e-9)
    assert found["share"] == pytest.approx((50 + 80 + 20) / 200)


def test_no_copy_seen_is_not_a_share():
    found = traced.hidden([plane("/device:GPU:0", {"Stream #1": [("gemm", 0, 9)]})], "gpu")
    assert (found["transfers"], found["share"]) == (0, None)


def test_a_trace_without_the_gpu_is_an_error():
    host = plane("/host:CPU", {"tf_XLA": [("execute", 0, 1000)]})
    with pytest.raises(RuntimeError, match=r"holds none of gpu's; check that .*CUPTI"):
        traced.hidden([host], "gpu")


def judged(platform, share, au, headroom, staged, of_matmul=0.61, growths=()):
    from gpu.report import verdicts

    sections = {
        "transfer": [{"leaves": 1, "mb": 63.9, "bytes_per_s": {"staged": {"of_limit": staged}}}],
        "overlap": [{"prefetch": 2, "ahead": 0, "share": share}, {"prefetch": 1, "ahead": 0, "share": 0.0}],
        "utilisation": [{"ahead": 0, "headroom": headroom, "au": {"1": 0.1, "2": au}}],
        "modes": [{"mode": "pmap", "of_matmul": 0.1}, {"compute": "bfloat16", "of_matmul": of_matmul}],
        "memory": [{"growths": list(growths)}],
    }
    result = {
        "machine": {"platform": platform},
        "sections": {name: {"results": found} for name, found in sections.items()},
    }
    return [each["holds"] for each in verdicts(result)]


def test_verdicts():
    # transfer; hidden and AU of a loop that looks at each loss; the same of one 8 steps ahead, which is not here;
    # the bfloat16 step; memory
    assert judged("gpu", 0.96, 0.995, 0.1, 0.91) == [True, True, True, None, None, True, True]
    assert judged("gpu", 0.94, 0.98, 0.1, 0.89, 0.59, ["host"]) == [False, False, False, None, None, False, False]
    assert judged("gpu", None, 0.98, 0.09, 0.91) == [True, None, None, None, None, True, True]
    assert judged("cpu", 0.96, 0.995, 0.1, 0.91) == [None] * 7


def test_verdicts_of_parts_that_were_not_measured():
    from gpu.report import verdicts

    assert {each["holds"] for each in verdicts({"machine": {"platform": "gpu"}, "sections": {}})} == {None}
