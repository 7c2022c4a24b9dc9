"""The package as a whole: its names, the import directions, and the examples in its docstrings."""

import ast
import doctest
import graphlib
import importlib
import inspect
import json
import pkgutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import programs
import pytest

import feedline
from feedline import cluster, trainer
from feedline.errors import as_arguments

ROOT = Path(feedline.__file__).parent
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(ROOT)], "feedline."))
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
LAZY = {
    "feedline": (feedline, "__init__.py"),
    "feedline.cluster": (cluster, "cluster/__init__.py"),
    "feedline.trainer": (trainer, "trainer/__init__.py"),
}


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
            assert name.asname == name.name  # the form in which a type checker takes it as exported
            names[name.name] = statement.module
    return names


@pytest.mark.parametrize("package", LAZY)
def test_each_public_name_is_the_object_that_the_type_checker_sees(package):
    module, path = LAZY[package]
    static = mirrored(TREES[path])
    assert sorted(module.__all__) == sorted(static)
    assert len(set(module.__all__)) == len(module.__all__)
    for name, where in static.items():
        here = importlib.import_module(where)
        expected = importlib.import_module(f"{where}.{name}") if where == package else getattr(here, name)
        assert module.__getattr__(name) is expected  # also when it was resolved before
        assert getattr(module, name) is expected
        assert name in dir(module)


@pytest.mark.parametrize("package", LAZY)
def test_another_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'Sampler'$"):
        _ = LAZY[package][0].Sampler


def test_the_names_are_exactly_those_of_the_map():
    assert sorted(feedline.__all__) == [
        "Blocks", "Feed", "FeedError", "Lanes", "Limits", "Mixture", "Order", "ProcessError", "Ragged", "Reading",
        "RowError", "RowSource", "Rows", "StallError", "Statistics", "Store", "WorkerError", "cluster", "convert",
        "decoded",
        "images",
        "load_lanes", "local_rows", "open_source", "prefetch_to_mesh", "save_lanes", "trainer",
    ]  # fmt: skip


class Documented:
    """The public signatures that do not change. More may follow, by keyword and with a default."""

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
    """The methods and properties of a feed."""

    spec = epoch = position = steps_per_epoch = property()

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
    return [(documented, name) for name, value in vars(documented).items() if inspect.isfunction(value)]


@pytest.mark.parametrize(("documented", "name"), methods(Documented))
def test_signatures(documented, name):
    assert_signature(getattr(feedline, name), getattr(documented, name))


@pytest.mark.parametrize(
    ("documented", "name"), [*methods(DocumentedFeed), *methods(DocumentedRowSource)], ids=lambda value: str(value)
)
def test_methods(documented, name):
    real = {DocumentedFeed: feedline.Feed, DocumentedRowSource: feedline.RowSource}[documented]
    assert_signature(vars(real)[name], vars(documented)[name])


def test_properties():
    for name in ("spec", "epoch", "position", "steps_per_epoch"):
        assert isinstance(vars(feedline.Feed)[name], property)
    assert feedline.RowSource.__annotations__ == {"spec": "Any"}
    assert isinstance(vars(feedline.RowSource)["identity"], property)


def test_initialize_needs_no_argument():
    inspect.signature(feedline.cluster.initialize).bind()


def test_what_has_the_methods_is_a_row_source():
    members = {name: vars(DocumentedRowSource)[name] for _, name in methods(DocumentedRowSource)}
    whole = {**members, "spec": None, "identity": {}}
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
    # what a user calls and sees: nothing but options and errors, and a state the cursor that it holds
    "version": [],
    "errors": [],
    "options": [],
    "notebook": [],
    "statistics": ["notebook"],
    "state": ["order.past", "order.schedule", "errors"],
    # the lower rooms: no sibling but options and errors, and what a comment gives a reason for
    "native": [],
    "runtime": ["runtime"],
    "order": ["order", "native", "options"],  # native: the same order in C
    "order.schedule": [],
    "placement": ["placement", "runtime.jax_settings"],  # on the thread that places
    "placement.plan": ["options"],
    "prefetch": ["prefetch", "errors", "options"],
    "observe": ["observe", "options"],  # values that stages return, and what follows from them
    "observe.devices": ["runtime.exit", "runtime.ending"],  # its threads wait inside jax
    "tuning": ["tuning", "observe", "options"],
    "observe.metrics": ["observe.report", "statistics"],
    "observe.prometheus": ["observe.metrics", "observe.recent_report", "options"],
    "rows": ["rows", "order.schedule", "notebook", "errors"],  # order.schedule: where in the run a bad row is
    # what rows are read from, and the two ways to process-local batches
    "stores": ["stores", "runtime.exit", "runtime.ending", "errors", "options"],
    "sources.formats": ["sources.formats", "stores", "rows", "errors", "options"],
    "sources": ["sources", "stores", "rows", "order", "native", "runtime.ending",
                "placement.plan", "errors", "options"],
    "loader": ["loader", "sources.arrays", "sources.mixture", "rows", "order", "runtime.jax_settings",
               "runtime.annotations", "placement.plan", "observe.times", "errors", "options"],
    "streams": ["streams", "loader", "sources.lanes", "sources.lane_errors", "rows", "order.schedule",
                "observe.times", "runtime.jax_settings", "runtime.annotations", "errors"],
    # what processes tell each other, and how they come together
    "agreement": ["agreement", "order.schedule", "placement.plan", "errors"],
    "cluster": ["cluster", "agreement", "errors", "options"],
    # the compositions
    # cluster: the default number of threads, and the memory of the control group
    "pipeline": ["pipeline", "sources", "rows", "loader", "streams", "placement", "prefetch", "observe", "tuning",
                 "order.mixture", "order.schedule", "agreement", "cluster.cores", "cluster.cgroups",
                 "runtime.annotations", "stores.fetcher", "notebook", "state", "statistics", "version", "errors",
                 "options"],
    "feed": ["pipeline", "loader.form", "placement.plan", "prefetch.handover", "order.schedule",
             "agreement.monitor", "agreement.in_step", "observe", "runtime", "state", "statistics", "errors",
             "options"],
    "drop_in": [
        "agreement.monitor", "cluster.cores", "rows.spec", "rows.values", "loader.staging", "placement",
        "prefetch", "observe", "runtime", "statistics", "options",
    ],
    "images": ["native.jpeg", "sources.decoded", "sources.open_source", "sources.encoded",
               "sources.formats.extras", "rows.row_source", "options"],
    # beside them
    "conversion": ["conversion", "sources.open_source", "sources.decoded", "sources.encoded",
                   "sources.formats.extras", "sources.lanes", "sources.mixture", "stores.urls", "rows", "errors",
                   "options"],
    "data": ["data", "sources.arrays", "sources.open_source", "rows.row_source", "options"],
    "trainer": ["trainer", "agreement.step_places", "errors", "options"],  # no stage: it is given an iterator
    "trainer.live": ["trainer.loop", "observe.metrics", "observe.recent_report"],  # of any feed
    "trainer.tensorboard": ["trainer.logs", "observe.metrics", "statistics"],
    # what is measured and what is audited: feeds as a user has them, and some stages alone
    "bench": ["bench", "feed", "order.epoch", "options", "native.library", "native.gather",
              "loader.staging", "placement.place", "cluster.cores",
              # of one process out of thousands: the stages without devices, and what processes tell each other
              "agreement", "order.schedule", "pipeline", "sources.arrays", "sources.lanes", "streams.ends",
              "cluster.join", "errors",
              "trainer.fitting", "trainer.loop", "trainer.modes", "trainer.practices", "trainer.task"],
    "audit": ["audit", "feed", "streams.lane_files", "sources.open_source", "sources.mixture",
              "rows.row_source", "order.epoch", "order.schedule", "cluster", "errors"],
    # described without building a feed; audit: how to call the user's function, and which feed it makes
    "inspection": ["inspection", "pipeline.request", "sources.open_source", "sources.lanes", "sources.mixture",
                   "rows", "loader.form", "placement", "order.schedule", "audit.feeds", "audit.target", "errors",
                   "options"],
    "doctor.inside.diagnose": ["doctor.inside.start", "feed"],
    "doctor": ["doctor", "audit", "bench.overlap", "cluster.cores", "cluster.cgroups", "cluster.topology",
               "trainer.memory"],
    "cli": ["cli", "audit", "bench", "conversion", "doctor", "inspection", "cluster", "agreement.monitor",
            "agreement.stop", "data", "trainer", "feed", "native.library", "version", "errors", "options"],
    "__main__": ["cli"],
}  # fmt: skip
FROM_OUTSIDE = {
    "native": ["numpy"],
    "runtime": ["jax"],
    "order": ["numpy"],
    "placement": ["numpy", "jax"],
    "observe": ["jax"],
    "observe.picture": ["matplotlib"],
    "observe.prometheus": ["jax", "prometheus_client"],
    "rows": ["numpy", "jax"],
    "stores": ["numpy"],  # obstore by its name, since it is optional
    "sources.formats": ["numpy", "jax"],
    "sources": ["numpy", "jax", "grain", "absl"],  # absl: Grain hands its flags to worker processes
    "loader": ["numpy", "jax", "grain", "absl"],
    "streams": ["numpy", "jax"],
    "agreement": ["numpy", "jax"],
    "cluster": ["jax"],
    "pipeline": ["numpy", "jax", "grain"],  # grain: to tell datasets and streams from other sources
    "feed": ["numpy"],
    "drop_in": ["numpy", "jax"],
    "images": ["numpy", "jax"],  # simplejpeg and cv2 by `require`
    "data": ["numpy"],
    "trainer": ["jax", "flax", "optax", "rich"],
    "trainer.checkpoints": ["jax", "orbax"],
    "trainer.tensorboard": ["tensorboardX"],
    "bench": ["numpy", "jax", "matplotlib", "optax", "grain"],
    "audit": ["numpy", "jax", "rich"],
    "conversion": ["numpy", "jax", "grain"],  # grain: to tell streams from other sources
    "inspection": ["numpy", "jax", "grain", "rich"],  # grain: to tell streams from other sources
    "doctor": ["numpy", "jax", "rich"],
    "cli": ["jax", "numpy", "optax", "rich", "tyro"],
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
    """The most special entry of a table for a file; None where there is none."""
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return max((name for name in table if is_within(module, [name])), key=len, default=None)


def imports_of_files():
    """(file, module that it imports, whether that is in feedline), of all files but the map."""
    for path, tree in TREES.items():
        for module in imports(tree) if path != "__init__.py" else ():
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
        allowed = [to for to in table.get(name, []) if is_within(module, [f"feedline.{to}" if inside else to])]
        if not allowed:
            against.append(f"{path} imports {module}")
        unused -= {("feedline" if inside else "outside", name, to) for to in allowed}
    assert against == []
    assert sorted(unused) == []


def test_no_import_leads_back_to_its_module():
    """Wherever the imports stand: inside a function, or for type checkers alone."""
    names = {path: f"feedline.{path.removesuffix('.py').replace('/', '.')}" for path in TREES}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    edges = {names[path]: set(imports(tree)) & set(names.values()) for path, tree in TREES.items()}
    graphlib.TopologicalSorter(edges).prepare()  # a CycleError names the modules


def test_every_part_has_its_directions():
    parts = {path.removesuffix(".py").partition("/")[0] for path in TREES}
    assert parts - {"__init__"} == {name.partition(".")[0] for name in OF_FEEDLINE}


def room_of(path):
    """The folder of a file; a module of the top level is a room by itself."""
    return path.rpartition("/")[0] or path


def test_rooms_form_no_circle():
    names = {path: f"feedline.{path.removesuffix('.py').replace('/', '.')}" for path in TREES}
    rooms = {name.removesuffix(".__init__"): room_of(path) for path, name in names.items()}
    edges = {room: set() for room in rooms.values()}
    for path, tree in TREES.items():
        if path != "__init__.py":  # the map names modules for type checkers
            edges[room_of(path)] |= {rooms[name] for name in imports(tree) if name in rooms} - {room_of(path)}
    graphlib.TopologicalSorter(edges).prepare()  # a CycleError names the rooms


@pytest.mark.parametrize("folder", sorted({path.rpartition("/")[0] for path in TREES}))
def test_each_folder_is_small_and_named_in_the_map(folder):
    assert sum(path.rpartition("/")[0] == folder for path in TREES) <= 18
    assert ast.get_docstring(TREES[f"{folder}/__init__.py".lstrip("/")])
    assert not folder or f" {folder.split('/')[-1]}/ " in feedline.__doc__


def test_the_map_imports_only_for_type_checkers():
    at_run_time = [node for node in TREES["__init__.py"].body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in at_run_time] == [
        "from __future__ import annotations",
        "import importlib",
        "from typing import TYPE_CHECKING, Any",
        "from feedline.version import __version__ as __version__",
    ]


def files_with(matches):
    """The files in which `matches` says yes to a node."""
    return {path for path, tree in TREES.items() if any(matches(node) for node in ast.walk(tree))}


def reads_process(node):
    """Whether this is os.environ, os.getenv or sys.argv, by whatever way."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "argv", "orig_argv"}
    if isinstance(node, ast.ImportFrom) and node.module in ("os", "sys"):
        return any(name.name in names for name in node.names)
    return isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) in ("os", "sys")


def test_the_environment_and_the_arguments_are_read_by_cli_and_cluster_only():
    found = files_with(reads_process)
    by_hand = {"data/make_digits.py"}  # a script that made the packaged data; nothing imports it
    by_hand |= {"bench/scale/job.py"}  # a program that `feedline bench scale --real` launches
    by_hand |= {
        "native/library.py",
        "native/jpeg.py",
    }  # FEEDLINE_PURE_PYTHON: whether there is a library, not what it does
    by_hand |= {
        "stores/options.py",
        "sources/encoded/shard_index.py",
    }  # FEEDLINE_CACHE: where an index lies, not what it holds
    assert found
    assert {path for path in found - by_hand if path.partition("/")[0] not in ("cli", "cluster")} == set()
    assert not any("make_digits" in module for tree in TREES.values() for module in imports(tree))


def test_private_modules_of_jax_and_of_grain_stand_in_one_file_each():
    private = files_with(
        lambda node: (
            (isinstance(node, ast.Attribute) and node.attr == "_src")
            or (isinstance(node, ast.ImportFrom) and "_src" in f"{node.module}.{node.names[0].name}".split("."))
            or (isinstance(node, ast.Import) and any("_src" in name.name.split(".") for name in node.names))
        )
    )
    grain = {"loader/grain_workers.py"}
    assert len(private - grain) <= 1
    assert all(path.startswith("agreement/") for path in private - grain)


def test_threads_start_in_prefetch_and_cluster_only():  # and where they are what is measured
    starters = {"Thread", "Timer", "ThreadPoolExecutor", "start_new_thread"}
    found = files_with(
        lambda node: isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in starters
    )
    assert "prefetch/prefetcher.py" in found
    found -= {"loader/workers.py"}  # in a worker process
    allowed = {"prefetch", "stores", "observe", "agreement", "cluster", "bench", "doctor"}
    assert {path.partition("/")[0] for path in found} <= allowed


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
        "errors",
        "options",
        "statistics",
        "state",
        "order",
        "placement.plan",
        "prefetch",
        "runtime.exit",
        "cluster",
        "agreement.agree",
        "agreement.coordination",
        "agreement.differences",
        "agreement.all_gather",
        "agreement.monitor",
        "agreement.stop",
    ]
    modules = [module for module in MODULES if is_within(module, [f"feedline.{name}" for name in pure])]
    assert {f"feedline.{name}" for name in pure} <= set(modules)
    told = programs.run(
        [sys.executable, "-c", LOADED, json.dumps(modules)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    first, options, rest = (set(names) for names in json.loads(told.stdout))
    heavy = {"jax", "jaxlib", "grain", "flax", "optax", "absl", "tyro", "rich"}
    assert "feedline" in first
    assert not first & {*heavy, "numpy"}
    assert not options & {*heavy, "numpy"}
    assert not rest & heavy
    assert "numpy" in rest


# --- examples ---

WITHOUT_EXAMPLES = ("feedline.cli", "feedline.data", "feedline.__main__")
WITH_EXAMPLES = {
    "feedline.drop_in", "feedline.feed", "feedline.options", "feedline.order.blocks", "feedline.order.epoch",
    "feedline.order.permutation", "feedline.order.schedule", "feedline.placement.plan", "feedline.sources.lanes",
    "feedline.sources.open_source", "feedline.state", "feedline.streams.lane_files",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if is_within(name, ("feedline.trainer",)) else name
        for name in MODULES
        if not is_within(name, WITHOUT_EXAMPLES)
    ],
)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert failed == 0
    assert attempted or name not in WITH_EXAMPLES
