"""The C file compiles without a warning and passes the sanitizers; an install does without it, too."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "feedline" / "native" / "columns.c"
COMPILER = shutil.which("gcc") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def compiled(target, *flags):
    command = [COMPILER, "-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", *flags, SOURCE, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@needs_compiler
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_it_compiles_without_a_warning(tmp_path, level):
    strict = ["-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror"]
    compiled(tmp_path / "columns.so", level, *strict)


@needs_compiler
def test_the_tests_of_the_library_pass_under_the_sanitizers(tmp_path):
    """AddressSanitizer and UndefinedBehaviorSanitizer end the process at the first access outside of an array."""
    sanitized = compiled(
        tmp_path / "columns.so", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    )
    runtime = subprocess.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    tests = [str(ROOT / "tests" / "native" / f"test_native_{name}.py") for name in ("order", "gather", "fill")]
    script = (
        "import pathlib, sys, pytest; from feedline.native import library; "
        f"library.PATH = pathlib.Path({str(sanitized)!r}); assert library.library() is not None; "
        # without conftest.py, whose fixtures import jax: not all of its releases load under the sanitizers
        f"sys.exit(pytest.main(['-q', '--noconftest', '--hypothesis-profile=ci', *{tests!r}]))"
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "FEEDLINE_PURE_PYTHON": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def wheel(folder, **environment):
    """The files of the wheel that pip builds here, and its name. Without isolation: no download."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, ROOT]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found.name, zipfile.ZipFile(found).namelist()


@needs_compiler
def test_a_wheel_holds_the_library_and_serves_any_python(tmp_path):
    name, files = wheel(tmp_path, FEEDLINE_PURE_PYTHON="0")
    assert "-py3-none-linux_" in name
    assert "feedline/native/libcolumns.so.4" in files


@pytest.mark.parametrize(
    "environment", [{"FEEDLINE_PURE_PYTHON": "1"}, {"CC": "false"}, {"CC": "", "PATH": "/nowhere"}], ids=str
)
def test_without_a_compiler_the_wheel_is_a_pure_one(tmp_path, environment):
    name, files = wheel(tmp_path, **{"FEEDLINE_PURE_PYTHON": "0", **environment})
    assert "-py3-none-any" in name
    assert "feedline/native/libcolumns.so.4" not in files
    assert "feedline/native/columns.c" in files
