"""The package as a whole: its names, the import directions, and the examples in its docstrings."""

import ast
import doctest
import graphlib
import importlib
import inspect
import json
import pickle
import pkgutil
import re
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path

import numpy as np
import programs
import pytest

import feedline
from feedline._src.errors import as_arguments

ROOT = Path(feedline.__file__).parent
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(ROOT)], "feedline."))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
CORE = {path.removeprefix("_src/"): tree for path, tree in TREES.items() if path.startswith("_src/")}
PUBLIC = (
    "feedline",
    "feedline.checkpoint",
    "feedline.cluster",
    "feedline.images",
    "feedline.metrics",
    "feedline.trainer",
)


# --- names ---


def mirrored(tree):
    """{public name: module} of the imports under `if TYPE_CHECKING`."""
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    names = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom)
        for name in statement.names:
            assert name.asname == name.name  # only in this form does a type checker export the name
            names[name.name] = statement.module
    return names


def tree_of(module):
    return TREES[Path(importlib.import_module(module).__file__).relative_to(ROOT).as_posix()]


@pytest.mark.parametrize("package", PUBLIC)
def test_each_public_name_is_the_object_that_the_type_checker_sees(package):
    module = importlib.import_module(package)
    static = mirrored(tree_of(package))
    assert sorted(module.__all__) == sorted(static)
    assert len(set(module.__all__)) == len(module.__all__)
    for name, where in static.items():
        here = importlib.import_module(where)
        expected = importlib.import_module(f"{where}.{name}") if where == package else getattr(here, name)
        assert module.__getattr__(name) is expected  # also when it was resolved before
        assert getattr(module, name) is expected
        assert name in dir(module)
        assert re.search(rf"\b{name}\b", module.__doc__)
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'Sampler'$"):
        _ = module.Sampler


def test_these_modules_are_public_and_import_nothing_but_for_type_checkers():
    assert {path for path in TREES if not path.startswith("_src/")} == {
        "__init__.py", "__main__.py", "checkpoint.py", "cluster.py", "images.py", "metrics.py", "trainer.py",
    }  # fmt: skip
    for package in PUBLIC:
        at_run_time = [node for node in tree_of(package).body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert {ast.unparse(node) for node in at_run_time} <= {
            "from __future__ import annotations",
            "from typing import TYPE_CHECKING",
            "from feedline._src.lazy import lazily",
            "from feedline._src.version import __version__ as __version__",
        }


def test_a_traceback_names_an_error_as_a_program_imports_it():
    assert traceback.format_exception_only(feedline.RowError("no")) == ["feedline.RowError: no\n"]
    assert pickle.loads(pickle.dumps(feedline.WorkerError)) is feedline.WorkerError


def test_the_names_are_exactly_those_of_the_map():
    assert sorted(feedline.__all__) == [
        "Blocks", "Feed", "FeedError", "FeedOptions", "Lanes", "Limits", "Mixture", "Order", "Packed", "Plan",
        "ProcessError", "Ragged", "Reading", "RowError", "RowSource", "Rows", "StallError", "Statistics", "Store",
        "WorkerError", "building", "checkpoint", "cluster", "convert", "decoded", "images", "load_lanes",
        "local_rows", "metrics", "open_source", "prefetch_to_mesh", "save_lanes", "trainer",
    ]  # fmt: skip


class Documented:
    """The public signatures that do not change. Parameters with a default may follow."""

    def Feed(source, batch_size, sharding, *, order=None, epochs=None, remainder="drop",
             reading=feedline.Reading(threads=None, workers=0, buffer=2, bad_rows="raise"),  # noqa: B008
             transform=None, prefetch=2): ...  # fmt: skip

    def Order(seed=0, shuffle=True): ...
    def Blocks(rows, window): ...
    def Reading(threads=None, workers=0, buffer=2, bad_rows="raise"): ...
    def prefetch_to_mesh(iterable, sharding, prefetch=2): ...
    def local_rows(sharding, batch_size): ...
    def open_source(path_or_glob): ...
    def Lanes(make_lane, count): ...
    def Mixture(sources, weights): ...
    def save_lanes(state, folder): ...
    def load_lanes(folder): ...


class DocumentedFeed:
    """The methods of a feed; `test_properties` has its properties."""

    def __iter__(self): ...
    def __next__(self): ...
    def __len__(self): ...
    def get_state(self): ...
    def set_state(self, state, allow=()): ...
    def seek(self, epoch, position=0): ...
    def rows_of(self, state): ...
    def statistics(self): ...
    def close(self, timeout_s=30): ...
    def __enter__(self): ...
    def __exit__(self, *exception): ...


class DocumentedRowSource:
    """What a user writes to read a format of their own."""

    def __len__(self): ...
    def read(self, rows, out): ...
    def close(self): ...


def assert_signature(real, documented):
    shape = [
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (real, documented)
    ]
    assert shape[0][: len(shape[1])] == shape[1]
    assert all(default is not inspect.Parameter.empty for _, _, default in shape[0][len(shape[1]) :])


def methods(documented):
    return {name: value for name, value in vars(documented).items() if inspect.isfunction(value)}


def test_signatures():
    owners = {Documented: feedline, DocumentedFeed: feedline.Feed, DocumentedRowSource: feedline.RowSource}
    for documented, real in owners.items():
        for name, method in methods(documented).items():
            found = getattr(real, name) if real is feedline else inspect.getattr_static(real, name)
            assert_signature(found, method)
    inspect.signature(feedline.cluster.initialize).bind()


def test_properties():
    for name in ("spec", "epoch", "position", "steps_per_epoch"):
        assert isinstance(inspect.getattr_static(feedline.Feed, name), property)
    assert feedline.RowSource.__annotations__ == {"spec": "Any"}
    assert isinstance(vars(feedline.RowSource)["identity"], property)


def test_what_has_the_methods_is_a_row_source():
    whole = {**methods(DocumentedRowSource), "spec": None, "identity": {}}
    assert isinstance(type("Source", (), whole)(), feedline.RowSource)
    for missing in whole:
        rest = {name: value for name, value in whole.items() if name != missing}
        assert not isinstance(type("Source", (), rest)(), feedline.RowSource)


@pytest.mark.parametrize("name", ["ProcessError", "RowError", "StallError", "WorkerError"])
def test_the_family_of_errors(name):
    assert issubclass(getattr(feedline, name), feedline.FeedError)
    assert issubclass(feedline.FeedError, RuntimeError)
    error = getattr(feedline, name)("no", stage="read", process=0, row=0, file="x.npy")
    assert str(error) == "no [stage read, process 0, row 0, file x.npy]"
    assert (error.stage, error.process, error.row, error.file) == ("read", 0, 0, "x.npy")
    assert str(getattr(feedline, name)("no")) == "no"


def test_an_error_sent_to_other_processes_is_json():
    error = feedline.RowError("no", stage="read", row=np.int64(5), file=Path("x.npy"))
    error.locate(np.int64(5), np.int32(1), np.int64(7))
    told = json.loads(json.dumps(as_arguments(error)))
    again = feedline.ProcessError(**{**told, "process": 3})
    assert str(again) == "RowError: no [stage read, process 3, row 5, epoch 1, position 7, file x.npy]"
    assert (again.row, again.epoch, again.position, again.file) == (5, 1, 7, "x.npy")
    assert as_arguments(KeyboardInterrupt()) == {"message": "KeyboardInterrupt"}


# --- imports ---

OF_FEEDLINE = {
    # what a user calls and sees: imports nothing of feedline
    "version": [],
    "errors": [],
    "options": [],
    # options, plan and state; to plan, feed_options opens the source and calls the transform
    "feed_options": ["plan", "sources.as_source", "loader.form"],
    "plan": ["plan", "order.schedule", "rows", "options"],
    "plan.shardings": ["state", "options"],
    "state": ["order.past", "order.schedule", "errors"],
    # lower parts: they import themselves, options and errors; a comment gives the reason for any other import
    "native": ["native", "errors"],
    "runtime": [],
    "order": ["order", "native", "options"],  # native: the same order in C
    "order.schedule": [],
    "placement": ["plan.shardings", "record", "runtime.threads"],  # the latter: on the thread that places
    "prefetch": ["prefetch", "errors", "options"],
    "record": [],  # values that stages return
    "rows": ["rows", "order", "errors", "options"],  # a source reads the rows at positions of an order
    # where rows come from, and how they become process-local batches
    "files": ["files", "rows.digests", "rows.shards", "native.library", "runtime.exit", "errors", "options"],
    "formats": ["formats", "files", "rows", "runtime.exit", "errors", "options"],
    "sources": ["sources", "formats", "files", "rows", "order", "native", "runtime.exit",
                "plan.asked", "errors", "options"],
    "loader": ["loader", "plan", "rows", "order", "runtime.threads", "record", "errors", "options"],
    # communication between processes, and how they join a run
    "agreement": ["agreement", "order.schedule", "plan.shardings", "errors", "options"],
    "cluster": ["cluster", "agreement", "machine", "errors", "options"],
    "machine": [],
    # what composes the parts above
    "bounds": ["cluster.cores", "machine", "options"],  # what the machine has
    "run": ["plan", "bounds", "rows", "loader", "placement", "prefetch", "record", "order", "agreement", "runtime",
            "options"],
    "build": ["run", "bounds", "sources", "rows", "loader", "placement", "plan", "prefetch.watch",
              "agreement", "state", "runtime.threads", "version", "feed_options", "options"],
    # listeners of a feed; runtime.exit: their threads wait inside jax; run, loader: a diagnosis runs own stages
    "listen": ["listen", "record", "run", "bounds", "loader.form", "placement.place", "prefetch", "order.schedule",
               "rows.bad_rows", "cluster.cores", "runtime.exit", "version", "errors",
               "options"],
    "listen.tokens": ["order.epoch"],
    "feed_base": ["run", "build", "listen", "record", "feed_options", "order.schedule", "agreement.in_step",
                  "agreement.monitor", "placement.place", "prefetch.pipelines", "runtime", "state", "options"],
    "feed": ["feed_base", "prefetch", "build", "plan.asked", "placement", "order.schedule", "loader.lane_files",
             "agreement.monitor", "record", "runtime", "errors", "feed_options", "options"],
    "drop_in": [
        "agreement.monitor", "cluster.cores", "rows.spec", "rows.values", "loader.staging", "placement",
        "plan.shardings",
        "prefetch", "run", "listen", "record", "runtime", "errors", "options",
    ],
    "images": ["image_limits", "sources.decoded", "sources.open_source", "formats.registry",
               "rows.source", "options"],
    "image_limits": [],
    # beside the feed
    "checkpoint": ["loader.lane_files"],
    "trainer": ["trainer", "agreement.step_places", "errors", "options"],  # no stage: `fit` is given an iterator
    "trainer.checkpoints": [
        "trainer.task", "agreement.coordination", "checkpoint", "errors", "loader.lane_files",  # lanes of any feed
    ],
    "trainer.live": ["trainer.loop", "listen.statistics", "listen.report"],  # those of any feed
    "trainer.logs": ["trainer.loop", "listen.statistics"],
    "trainer.memory": ["errors", "listen.statistics", "options"],
    # tools may import everything above, which imports no tool
    "tools": ["tools", "feed", "feed_options",
              "version", "errors", "options", "order", "plan", "listen.words", "rows",
              "sources", "formats", "files", "loader", "agreement", "cluster", "native",
              "trainer", "machine"],
    "lazy": [],
}  # fmt: skip
FROM_OUTSIDE = {
    "checkpoint": ["orbax"],
    "feed": ["grain"],
    "native": ["numpy"],
    "runtime": ["jax"],
    "order": ["numpy"],
    "placement": ["numpy", "jax"],
    "plan": ["numpy", "jax"],
    "listen": ["jax"],
    "listen.tokens": ["numpy"],
    "listen.prometheus": ["jax", "prometheus_client"],
    "rows": ["numpy", "jax"],
    "files": ["numpy"],  # and obstore by `import_module`, because it is optional
    "formats": ["numpy", "jax"],
    "sources": ["numpy", "jax", "grain", "absl"],  # absl: Grain hands its flags to workers of mp_prefetch
    "loader": ["numpy", "jax", "cloudpickle"],  # cloudpickle sends functions of a script to workers, as in Grain
    "agreement": ["numpy", "jax"],
    "cluster": ["jax"],
    "feed_options": ["numpy"],
    "build": ["numpy", "jax"],
    "feed_base": ["numpy", "jax"],
    "drop_in": ["numpy", "jax"],
    "images": ["numpy", "jax"],  # and simplejpeg and cv2 by `require`
    "image_limits": ["numpy"],
    "trainer": ["jax", "flax", "optax", "rich"],
    "trainer.checkpoints": ["jax", "orbax"],
    "trainer.logs": ["tensorboardX"],
    "tools": ["numpy", "ml_dtypes", "jax", "optax", "rich", "tyro"],
}


def imports(tree):
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in MODULES else node.module


def is_within(module, packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def rule(table, path):
    """The most specific entry of a table that covers a file; None if there is none."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return max((name for name in table if is_within(module, [name])), key=len, default=None)


def imports_of_files():
    """Yield (file, module that it imports, whether this module is in feedline) for all files in feedline/_src/."""
    for path, tree in CORE.items():
        for module in imports(tree):
            if path.startswith("tools/") and module in PUBLIC:
                continue  # tools may import what users import
            top = module.partition(".")[0]
            if top == "feedline" or top not in sys.stdlib_module_names:
                yield path, module, top == "feedline"


def test_directions():
    """Each import has an allowance, and each allowance an import."""
    unused = {("feedline", name, to) for name, allowed in OF_FEEDLINE.items() for to in allowed}
    unused |= {("outside", name, to) for name, allowed in FROM_OUTSIDE.items() for to in allowed}
    against = []
    for path, module, inside in imports_of_files():
        table = OF_FEEDLINE if inside else FROM_OUTSIDE
        name = rule(table, path)
        allowed = [
            to for to in table.get(name, []) if is_within(module, [f"feedline._src.{to}" if inside else to])
        ]
        if not allowed:
            against.append(f"{path} imports {module}")
        unused -= {("feedline" if inside else "outside", name, to) for to in allowed}
    assert against == []
    assert sorted(unused) == []


def test_every_part_has_its_directions():
    parts = {path.removesuffix(".py").partition("/")[0] for path in CORE}
    assert parts - {"__init__"} == {name.partition(".")[0] for name in OF_FEEDLINE}


def room_of(path):
    """The room of a file: its folder, or the file itself at the top level."""
    return path.rpartition("/")[0] or path


@pytest.mark.parametrize("unit", [str, room_of], ids=["modules", "rooms"])
def test_imports_form_no_circle(unit):
    """Imports inside functions count, and those for type checkers only."""
    names = {f"feedline._src.{path.removesuffix('.py').replace('/', '.')}": path for path in CORE}
    names = {name.removesuffix(".__init__"): unit(path) for name, path in names.items()}
    edges = {each: set() for each in names.values()}
    for path, tree in CORE.items():
        edges[unit(path)] |= {names[name] for name in imports(tree) if name in names} - {unit(path)}
    graphlib.TopologicalSorter(edges).prepare()  # raises a CycleError that names the circle


def files_with(matches):
    """The files with a syntax node for which `matches` is true."""
    return {path for path, tree in CORE.items() if any(matches(node) for node in ast.walk(tree))}


def reads_process(node):
    """Whether a node imports or uses os.environ, os.getenv, sys.argv or a variant of them."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "argv", "orig_argv"}
    if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys"):
        return any(name.name in names for name in node.names)
    return isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) in ("os", "sys")


def test_the_environment_and_the_arguments_are_read_by_tools_and_cluster_only():
    found = files_with(reads_process)
    by_hand = {"native/library.py"}  # FEEDLINE_PURE_PYTHON: whether the C library is used, not what it does
    by_hand |= {"files/store.py"}  # FEEDLINE_CACHE: where files lie, not what they hold
    assert found
    assert {path for path in found - by_hand if path.partition("/")[0] not in ("tools", "cluster")} == set()


def of_another_package(module):
    """Whether this is a private module of jax or Grain."""
    return "_src" in module.split(".")[1:] and not module.startswith("feedline.")


def test_private_modules_of_jax_stand_in_one_file_and_those_of_grain_nowhere():
    private = files_with(
        lambda node: (
            (isinstance(node, ast.Attribute) and node.attr == "_src")
            or (isinstance(node, ast.ImportFrom) and of_another_package(f"{node.module}.{node.names[0].name}"))
            or (isinstance(node, ast.Import) and any(of_another_package(name.name) for name in node.names))
        )
    )
    assert len(private) <= 1
    assert all(path.startswith("agreement/") for path in private)


LOADED = """
import importlib, json, sys

def loaded(*modules):
    for module in modules:
        importlib.import_module(module)
    return sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names))

steps = [loaded("feedline")]
import feedline
feedline.Order(), feedline.Reading(), feedline.FeedError, feedline.Statistics, feedline.cluster, dir(feedline)
steps.append(loaded())
steps.append(loaded(*json.loads(sys.argv[1])))
print(json.dumps(steps))
"""


def test_what_is_loaded_when():
    pure = [
        "errors", "options", "listen.statistics", "state", "order", "prefetch",
        "runtime.exit", "cluster", "agreement.agree", "agreement.coordination",
        "agreement.all_gather", "agreement.monitor", "agreement.stop",
    ]  # fmt: skip
    modules = [module for module in MODULES if is_within(module, [f"feedline._src.{name}" for name in pure])]
    assert {f"feedline._src.{name}" for name in pure} <= set(modules)
    command = [sys.executable, "-c", LOADED, json.dumps(modules)]
    told = programs.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent)
    first, options, rest = (set(names) for names in json.loads(told.stdout))
    heavy = {"jax", "jaxlib", "grain", "flax", "optax", "absl", "tyro", "rich"}
    assert "feedline" in first
    assert not first & {*heavy, "numpy"}
    assert not options & {*heavy, "numpy"}
    assert not rest & heavy
    assert "numpy" in rest


PROGRAM = """
import sys
import jax, numpy as np
import feedline
with feedline.Feed({"x": np.zeros((64, 2))}, 8, jax.devices()[0]) as feed:
    next(feed)
print(*sorted(name for name in sys.modules if name.partition(".")[0] == "feedline"))
"""


def test_a_feed_of_arrays_in_memory_needs_few_modules():
    """At most 85: no tool and no trainer, and no code for streams, workers or requests to stores."""
    told = programs.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    needed = told.stdout.split()
    assert len(needed) <= 85
    rooms = {name.removeprefix("feedline._src.").partition(".")[0] for name in needed}
    assert not rooms & {"tools", "trainer"}
    unneeded = {"feedline._src.files.fetcher", "feedline._src.loader.streams", "feedline._src.loader.workers"}
    assert not unneeded & set(needed)


# --- examples ---

WITHOUT_EXAMPLES = ("feedline._src.tools.cli", "feedline._src.tools.train", "feedline.__main__")
WITH_EXAMPLES = {
    "drop_in", "feed", "options", "order.epoch", "order.permutation", "order.schedule",
    "plan.shardings", "sources.lanes", "sources.open_source", "state", "loader.lane_files", "feed_base",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if is_within(name, ("feedline._src.trainer",)) else name
        for name in MODULES
        if not is_within(name, WITHOUT_EXAMPLES)
    ],
)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert failed == 0
    assert attempted or name.removeprefix("feedline._src.") not in WITH_EXAMPLES


def test_the_fast_tests_need_only_what_the_small_extra_installs():
    """A file that imports more at its top has slow tests only, so the fast tests do not import it."""
    extras = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    heavy = {re.split(r"[\[>;]", each)[0].replace("-", "_") for each in extras["test-all"][1:]}
    for path in sorted((ROOT.parent / "tests").rglob("*.py")):
        text = path.read_text()
        imports = re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)
        only_slow = re.search(r"^pytestmark = pytest.mark.(slow|nightly)$", text, re.MULTILINE)  # see conftest.py
        assert only_slow or not heavy & set(imports), path


def test_nobody_asks_for_the_class_of_a_source_an_order_or_an_access():
    """Except in the module that defines the class. `feedline.Order`, which users pass, is not such a class."""
    classes = [
        (path, node) for path, tree in CORE.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    ]
    bases = {"Source", "EncodedSource", "RowOrder", "Access"}
    where = {node.name: path for path, node in classes if node.name in {*bases, "Lanes", "LocalBatches"}}
    for _ in range(4):  # levels of inheritance
        where |= {
            node.name: path for path, node in classes if {ast.unparse(base) for base in node.bases} & set(where)
        }
    where |= dict(implementations_of_an_order(classes))
    assert {"ArraySource", "Mixture", "FirstItem", "DecodedSource", "MixtureOrder", "Stream"} <= set(where)
    asked = [
        (path, name)
        for path, tree in CORE.items()
        for node in ast.walk(tree)
        for name in classes_asked_for(node)
        if name in where.keys() - bases and where[name] != path
    ]
    assert asked == []


def classes_asked_for(node):
    """The names of classes in `isinstance(x, module.Class)`, `type(x) is Class`, `type(x) in (Class, ...)`."""
    found = []
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
        found = node.args[1:]
    elif isinstance(node, ast.Compare) and "type" in {getattr(one, "id", 0) for one in ast.walk(node)}:
        found = [node.left, *node.comparators]
    names = [name for each in found for name in ast.walk(each) if isinstance(name, ast.Name | ast.Attribute)]
    return {name.id if isinstance(name, ast.Name) else name.attr for name in names}


def implementations_of_an_order(classes):
    """Name and file of each class with the methods of a `RowOrder`."""
    for path, node in classes:
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        if {"rows_at", "struct", "substitutes"} <= methods and node.name != "RowOrder":
            yield node.name, path
