"""columns.c compiles without a warning and passes the sanitizers; an install without a compiler works, too."""

import os
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "feedline" / "_src" / "native"
SOURCE = "columns.c"
TESTS = [f"test_native_{name}.py" for name in ("order", "gather", "spans")]
COMPILER = shutil.which("gcc") or shutil.which("cc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")


def compiled(target, *flags):
    flags = ["-std=c11", "-fPIC", "-shared", "-fvisibility=hidden", *flags]
    command = [COMPILER, *flags, NATIVE / SOURCE, "-o", target]
    done = programs.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@needs_compiler
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_it_compiles_without_a_warning(tmp_path, level):
    strict = ["-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror"]
    compiled(tmp_path / "library.so", level, *strict)


@needs_compiler
def test_the_tests_of_the_library_pass_under_the_sanitizers(tmp_path):
    """AddressSanitizer and UndefinedBehaviorSanitizer end the process at the first access outside of an array."""
    flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    sanitized = compiled(tmp_path / "library.so", *flags)
    runtime = programs.run(
        [COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    paths = [str(ROOT / "tests" / "native" / test) for test in TESTS]
    script = (
        f"import pathlib, sys, pytest; from feedline._src.native import library; "
        f"library.PATH = pathlib.Path({str(sanitized)!r}); "
        # without conftest.py, whose fixtures import jax: some releases of jax do not load under the sanitizers
        f"sys.exit(pytest.main(['-q', '--noconftest', '-m', 'not slow', '--hypothesis-profile=ci', *{paths!r}]))"
    )
    environment = programs.importing(LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0", FEEDLINE_PURE_PYTHON="0")
    done = programs.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def wheel(folder, **environment):
    """The name and the files of the wheel that pip builds here. Without build isolation, nothing is downloaded."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", folder, ROOT]
    done = programs.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found.name, zipfile.ZipFile(found).namelist()


@needs_compiler
@pytest.mark.parametrize("target", ["", "manylinux_2_17_aarch64"])
def test_a_wheel_holds_the_library_and_serves_any_python(tmp_path, target):
    name, files = wheel(tmp_path, FEEDLINE_PURE_PYTHON="0", FEEDLINE_TARGET=target)
    assert f"-py3-none-{target or 'linux_'}" in name
    assert "feedline/_src/native/libcolumns.so.6" in files


def test_a_wheel_for_a_target_is_never_a_pure_one(tmp_path):
    target = "manylinux_2_17_aarch64"
    with pytest.raises(AssertionError, match=f"the wheel for {target} has no library"):
        wheel(tmp_path, FEEDLINE_PURE_PYTHON="0", FEEDLINE_TARGET=target, CC="false")


def test_an_sdist_holds_the_source_and_no_library(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path]
    programs.run(command, cwd=ROOT, check=True)
    (found,) = tmp_path.iterdir()
    with tarfile.open(found) as archive:
        files = [name.partition("/")[2] for name in archive.getnames()]
    assert f"feedline/_src/native/{SOURCE}" in files
    assert not [file for file in files if ".so" in file]


@pytest.mark.parametrize(
    "environment", [{"FEEDLINE_PURE_PYTHON": "1"}, {"CC": "false"}, {"CC": "", "PATH": "/nowhere"}], ids=str
)
def test_without_a_compiler_the_wheel_is_a_pure_one(tmp_path, environment):
    name, files = wheel(tmp_path, **{"FEEDLINE_PURE_PYTHON": "0", **environment})
    assert "-py3-none-any" in name
    assert not [file for file in files if ".so" in file]
    assert f"feedline/_src/native/{SOURCE}" in files
