"""Every example runs in its own process, and prints what is expected."""

import os
import re
import sys
from pathlib import Path

import programs
import pytest
from launched import launched

EXAMPLES = Path(__file__).parent.parent / "examples"
PRINTED = {
    "smallest.py": "60 steps on 8 devices, loss 0.000000",
    "existing_iterator.py": "mean 4, state {'given': 5}",
    "grain_dataset.py": "resumed at epoch 0, position 352",
    "row_source.py": "1000 rows of 16 batches, 100 of them with label 7",
    "checkpoints.py": "steps 31 to 60 on one device, same losses: True",
    "preemption.py": "ended after step 60, first weight 0.708344",
    "inspect_feed.py": "14 batches, 93 rows left out, shards {(24, 32)}",
    "audit_feed.py": "(64, 8, 8) uint8 on 8 devices",
    "token_packing.py": "160 rows before the resume and 777 after it",
    "skip_after_spike.py": "80 steps, loss 0.011921",
    "mixture.py": "of 6400 rows 75% from the web, 25% from books",
    "crop_and_flip.py": "8 devices hold the images that 1 device held: True",
    "slow_training.py": "epoch 1: the loss fell: True",
    "copies.py": "fori_loop, total donated      1 array, in the same memory",
}

FAST = ["smallest.py", "existing_iterator.py", "row_source.py", "checkpoints.py"]
"""One example of each kind; only these run without the slow tests."""


def printed(name):
    optimised = {key: value for key, value in os.environ.items() if key != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    command = [sys.executable, "-W", "error", EXAMPLES / name]
    done = programs.run(command, capture_output=True, text=True, env=optimised)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PRINTED]
)
def test_example(name):
    assert printed(name)[-1] == PRINTED[name]


@pytest.mark.slow
def test_a_loop_that_waits_gets_advice():
    lines = printed("waiting.py")  # the report depends on the speed of this machine
    assert re.match(r".* limits? training|the loop .*|compute .*|the machine is busy: .*", lines[0]), lines[0]
    assert any(line.startswith("advice: ") for line in lines)
    assert any(line.startswith("  fetch ") for line in lines)


@pytest.mark.slow
def test_a_net_learns_photographs():
    found = re.fullmatch(r"400 images for training; of 100 others (\d+)% are recognised", printed("photos.py")[-1])
    assert int(found[1]) >= 90


@pytest.mark.slow
def test_common_advice():
    lines = dict(line.split(": ", 1) for line in printed("advice.py"))
    assert lines["pinned=True"].startswith("no such argument; memory kinds of a device: ")
    assert "pinned_host" in lines["pinned=True"]
    assert lines["in-place updates"] == (
        "x.at[0].set(1) gives other memory; in a compiled step that donates x, the same memory"
    )
    assert lines["donation"].startswith("the donated array is deleted")
    assert lines["transfer guard"].endswith("is refused; device_put before it passes")
    assert lines["sharded input"].endswith("4096 KiB on each of 8 devices replicated, 512 KiB sharded")
    assert lines["gc.collect()"].startswith("an array is freed with its last reference, without it")
    (by_operation,) = re.findall(r"(\d+) ×", lines["one compiled step"])
    many, tree = re.findall(r"(\d+) ×", lines["fewer, larger transfers"])
    assert min(map(int, (by_operation, many, tree))) > 1  # 10 or more on every machine that was tried
    assert re.search(r"\d% of the time", lines["asynchronous dispatch"])


@pytest.mark.slow
def test_a_loop_in_pmap_grows_with_its_length_in_the_first_forms_only():
    few, many = 4, 16
    found = {}
    for line in printed("loop_in_pmap.py")[2:]:
        found[line.split()[0]] = [(int(a), int(b)) for a, b in re.findall(r"(\d+) → (\d+)", line)]
    assert list(found) == ["replicated", "sharded", "scan", "remat", "map"]
    growth = {form: [b / a for a, b in sizes] for form, sizes in found.items()}
    for form, (_, temporary, program) in growth.items():
        assert program > 3 if form in ("replicated", "sharded") else program < 1.05, (form, program)
        assert temporary < 1.05 if form in ("remat", "map") else temporary > 2.5, (form, temporary)
    weights = 64  # KiB; the other arguments are rows, of which a device needs an eighth when they are sharded
    for of_all, own in zip(found["replicated"][0], found["sharded"][0], strict=True):
        assert of_all - weights == 8 * (own - weights)
    assert found["replicated"][0] == tuple(weights + 8 * blocks * 8 for blocks in (few, many))


@pytest.mark.slow
def test_metrics():
    values = dict(line.rsplit(" ", 1) for line in printed("metrics.py"))
    assert values.pop('feedline_rows_total{feed="train",process="0"}') == "80000.0"
    assert 0 <= float(values.pop('feedline_au_ratio{feed="train",process="0"}')) <= 1
    stages = {name.split('stage="')[1].rstrip('"}') for name in values}
    assert stages == {"read", "transform", "stage", "place"}


@pytest.mark.slow
def test_two_processes():
    done = launched(sys.executable, "-W", "error", EXAMPLES / "two_processes.py")
    steps = [line for line in done.stdout.splitlines() if "steps" in line]  # Gloo's threads print there too
    assert steps == ["[0] 60 steps on 4 devices of 2 processes, 400 of 800 rows read here, loss 0.000000"]


@pytest.mark.slow
def test_two_processes_skip_the_same_rows():
    done = launched(sys.executable, "-W", "error", EXAMPLES / "skip_after_spike.py")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[0]") and "loss" in line]
    assert lines == [
        "[0] loss 8.0e+06 in step 61, on rows 24000 to 24399: back to step 50, on from position 25600",
        f"[0] {PRINTED['skip_after_spike.py']}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("digits_convnet.py", 0.98), ("equinox_model.py", 0.97)])
def test_models_of_digits(name, least):
    *before, last = printed(name)
    accuracy = float(re.match(r"test accuracy (0\.\d+) over 360 images", last)[1])
    assert accuracy >= least
    if name == "digits_convnet.py":
        assert [line.split(",")[0] for line in before] == ["step 100", "step 200", "step 300"]
        assert before[-1].endswith(f"test accuracy {accuracy:.4f}")  # both tested the last state
        log = Path(last.rpartition(" ")[2])
        assert log.read_text().count("\n") == 1 + 31  # a header, the first step, and every tenth
    else:
        assert before == ["first test image: a 0, its label is 0"]


def test_no_example_is_left_out():
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("*.py"))
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tests] == []


@pytest.mark.slow
def test_a_keras_loop_that_is_resumed_trains_as_one_that_was_not(tmp_path):
    def last_lines(folder, steps):
        command = [sys.executable, str(EXAMPLES / "keras_loop.py"), str(tmp_path / folder), str(steps)]
        environment = programs.importing(KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")
        ran = programs.run(command, env=environment, capture_output=True, text=True, check=True)
        return ran.stdout.splitlines()[-2:]

    begins, _ = last_lines("stopped", 15)
    assert begins == "begins at row 0"
    begins, resumed = last_lines("stopped", 15)
    assert begins == "begins at row 750"
    assert resumed == last_lines("whole", 30)[1]
