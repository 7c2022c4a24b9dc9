"""The GPU benchmark: all parts run with small sizes on CPU devices, and the trace of a GPU is read correctly."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """A module of benchmarks/, which is a folder of scripts and no package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    return load


def run(out, *options):
    command = [sys.executable, BENCHMARKS / "gpu.py", "--out", out, "--cpu-devices", "2", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "gpu.json"
    ran = run(out)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_all_parts_run_on_cpu_devices(result):
    sections = result["sections"]
    assert {name: len(found["results"]) for name, found in sections.items()} == {
        "transfer": 2 * 2 * 2,
        "overlap": 4 * 2,
        "utilisation": 3 * 2,
        "feed": 2,
        "registered": 2,
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
    assert {"platform": "cpu", "devices": 2}.items() <= result["machine"].items()
    assert len(result["verdicts"]) == 5
    assert {each["holds"] for each in result["verdicts"]} == {None}  # nothing is judged on a CPU


@pytest.mark.slow
def test_cases_that_do_not_fit_into_the_time_are_listed(tmp_path):
    ran = run(tmp_path / "gpu.json", "--budget-s", "0", "--only", "transfer", "feed")
    assert ran.returncode == 0, ran.stderr
    sections = json.loads((tmp_path / "gpu.json").read_text())["sections"]
    assert not any(found["results"] for found in sections.values())
    assert len(sections["transfer"]["skipped"]) == 8
    assert "0.0 s were left" in sections["feed"]["skipped"]["rows of 256 B"]
    assert sections["overlap"]["skipped"] == {"all": "not among --only"}


def test_a_case_that_fails_is_recorded_and_the_others_run(module):
    found = module("gpu").section({"bad": lambda: 1 // 0, "good": lambda: {"rate": 1.0}}, float("inf"))
    assert found["errors"] == {"bad": "ZeroDivisionError: integer division or modulo by zero"}
    assert [each["rate"] for each in found["results"]] == [1.0]


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


def test_the_share_of_copies_under_compute(module):
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
    found = module("gpu_trace").hidden([first, second, host], "gpu")
    assert found["transfers"] == 3
    assert found["transfer_s"] == pytest.approx(200e-9)
    assert found["compute_s"] == pytest.approx(400e-9)
    assert found["share"] == pytest.approx((50 + 80 + 20) / 200)


def test_no_copy_seen_is_not_a_share(module):
    found = module("gpu_trace").hidden([plane("/device:GPU:0", {"Stream #1": [("gemm", 0, 9)]})], "gpu")
    assert (found["transfers"], found["share"]) == (0, None)


def test_a_trace_without_the_gpu_is_an_error(module):
    host = plane("/host:CPU", {"tf_XLA": [("execute", 0, 1000)]})
    with pytest.raises(RuntimeError, match=r"holds none of gpu's; check that .*CUPTI"):
        module("gpu_trace").hidden([host], "gpu")


def judged(module, platform, share, au, headroom, staged):
    sections = {
        "transfer": [{"leaves": 1, "mb": 63.9, "bytes_per_s": {"staged": {"of_limit": staged}}}],
        "overlap": [{"prefetch": 2, "ahead": 0, "share": share}, {"prefetch": 1, "ahead": 0, "share": 0.0}],
        "utilisation": [{"ahead": 0, "headroom": headroom, "au": {"1": 0.1, "2": au}}],
    }
    result = {
        "machine": {"platform": platform},
        "sections": {name: {"results": found} for name, found in sections.items()},
    }
    return [each["holds"] for each in module("gpu").verdicts(result)]


def test_verdicts(module):
    # transfer; hidden and AU of a loop that looks at each loss; the same of one 8 steps ahead, which is not here
    assert judged(module, "gpu", 0.96, 0.995, 0.1, 0.91) == [True, True, True, None, None]
    assert judged(module, "gpu", 0.94, 0.98, 0.1, 0.89) == [False, False, False, None, None]
    assert judged(module, "gpu", None, 0.98, 0.09, 0.91) == [True, None, None, None, None]
    assert judged(module, "cpu", 0.96, 0.995, 0.1, 0.91) == [None] * 5


@pytest.mark.slow
def test_a_result_is_plotted(module, result, tmp_path):
    pytest.importorskip("matplotlib")
    module("plot_gpu").draw(result, tmp_path / "gpu.png")
    for found in result["sections"].values():
        found["results"] = []
    module("plot_gpu").draw(result, tmp_path / "nothing.png")
    assert (tmp_path / "gpu.png").stat().st_size > (tmp_path / "nothing.png").stat().st_size > 10_000
