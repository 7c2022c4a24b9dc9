"""The site of feedline: `sphinx-build -W -b html docs site`. The notebooks run while it is built."""

import inspect
import os
import pkgutil
import re
from importlib import metadata
from pathlib import Path
from types import FunctionType

from sphinx import addnodes
from sphinx.util import logging
from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import get_type_hints, stringify_annotation

import feedline
from feedline._src.order.schedule import Schedule
from feedline._src.plan.asked import CheckedOptions
from feedline._src.rows.source import Indexed, RowSource, Source

ROOT = Path(__file__).parent.parent
os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}  # of the notebooks

project = "feedline"
author = "the feedline maintainers"
release = metadata.version("feedline")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
highlight_language = "none"  # of blocks that name no language
smartquotes_action = "D"  # dashes; quotes stay as they are

html_theme = "sphinx_book_theme"
html_title = "feedline"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"show_toc_level": 2, "use_fullscreen_button": False, "navbar_persistent": []}

linkcheck_retries = 3
linkcheck_timeout = 20  # seconds for a link

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds for a cell, on a busy machine
nb_execution_in_temp = True
nb_merge_streams = True

autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "inherited-members": "object, tuple, BaseException, FeedError, AbstractContextManager, CheckpointArgs",
    "special-members": "__len__, __iter__, __next__, __getitem__",
}
python_maximum_signature_line_length = 110
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {  # imported only for type checkers
    "Report": "feedline._src.listen.report.Report",
    "Diagnosis": "feedline._src.listen.diagnosis.Diagnosis",
}
napoleon_numpy_docstring = False
napoleon_use_ivar = False
napoleon_attr_annotations = False  # attributes_with_types adds them
napoleon_custom_sections = [("Example", "Examples")]
toc_object_entries_show_parents = "hide"

MODULES = [
    feedline,
    *(getattr(feedline, name) for name in ("checkpoint", "cluster", "images", "metrics", "trainer")),
]
MADE_BY_FEEDLINE = ("Fitted", "Plan", "Progress", "RowSource", "Statistics")  # and all that `_src` alone exports
FURTHER_TYPES = (  # modules in `_src`
    "drop_in.MeshIterator", "listen.report.Report", "listen.report.Change", "listen.report.Straggler",
    "listen.diagnosis.Diagnosis", "listen.statistics.HasStatistics", "listen.prometheus.MetricsServer",
    "rows.source.EncodedSource", "sources.decoded.Row", "plan.plan.ProcessReads", "plan.shardings.LeafPlan",
    "plan.plan.Epoch", "order.schedule.Schedule", "options.Settings", "plan.plan.Memory",
    "trainer.fitting.Batches", "trainer.task.State", "trainer.loop.Evaluation", "trainer.memory.Growth",
    "tools.train.labelled.Labelled",
)  # fmt: skip
INTERNAL = {  # what only feedline calls
    name
    for base in (CheckedOptions, Indexed, Source, Schedule)
    for name, member in vars(base).items()
    if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
} - {*vars(RowSource), "steps_per_epoch"} | {"of"}
SHORT_TYPES = (
    (r"~?numpy\.ndarray\[tuple\[~?typing\.Any, \.\.\.\], ", "~numpy.typing.NDArray[["),
    (r"NDArray\[\[~?numpy\.dtype\[(~?[\w.]+)\]", r"NDArray[\1"),
    (r"type\[~typing\.Any\] \| ~numpy\.dtype\[.*?_DTypeDict \| str", "~numpy.typing.DTypeLike"),
    (r"<class '(numpy\.\w+)'>", r"\1"),
    (r"~jax\.(?:jaxlib\._jax\.)?Array", "jax.Array"),
    (r"~(grain|optax)\._src\.[\w.]*?(\w+)(?![\w.])", r"\1.\2"),
    (r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1"),
    (r"(?<![~\w.])feedline\._src\.", "~feedline._src."),
    (r"~feedline\._src\.(rows\.source\.|sources\.decoded\.Decoded)Source\b", "~feedline.RowSource"),
    (r"~feedline\._src\.sources\.hugging_face\.HuggingFaceDataset", "datasets.Dataset"),
)
log = logging.getLogger(__name__)


def link_within_the_site(app, docname, source):
    """Point links to what is no page of the site elsewhere: the README is the first page, folders become text."""

    def replaced(match):
        text, target, heading = match.groups()
        path = (ROOT / "docs" / docname).parent / target
        if path.resolve() == ROOT / "README.md":
            return f"[{text}](index.md{heading or ''})"
        of_the_site = path.resolve().is_relative_to(ROOT / "docs")
        return text if not of_the_site and (path.is_dir() or path.suffix == ".md") else match[0]

    source[0] = re.sub(r"\[([^\]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)", replaced, source[0])


def short_types(annotation):
    """Shorten types to the names by which a program imports them."""
    for pattern, short in SHORT_TYPES:
        annotation = re.sub(pattern, short, annotation)
    return annotation


def add_further_types(app, docname, source):
    """Fill the last section of the API page."""
    entries = "".join(f".. autoclass:: feedline._src.{name}\n" for name in FURTHER_TYPES)
    source[0] = source[0].replace(".. further types\n", entries)


def docstring_to_rst(app, what, name, obj, options, lines):
    """Make `code` code, also with a letter after it. The tables of api.md replace the docstrings of modules."""
    if what == "module":
        lines.clear()
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[i] = re.sub(r"(?<!`)`([^`]+)`(?!`)(?=(\w?))", lambda m: f"``{m[1]}``" + "\\ " * bool(m[2]), line)


def attributes_with_types(app, what, name, obj, options, lines):
    """Give each attribute that a docstring describes an entry with its type. `first, last: ...` describes two."""
    types = get_type_hints(obj) if inspect.isclass(obj) else {}
    for i, line in reversed(list(enumerate(lines))):
        if line.startswith(".. attribute:: "):
            first, *more = line.removeprefix(".. attribute:: ").split(", ")
            kind = (
                [f"   :type: {short_types(stringify_annotation(types[first], 'smart'))}"] if first in types else []
            )
            lines[i : i + 1] = [f".. attribute:: {first}", *(f"               {each}" for each in more), *kind]


def whole_sentence(app, what, name, obj, options, lines):
    """Keep napoleon from taking the words before the first colon of a property's docstring for its type."""
    if what == "property":
        lines.insert(0, "\\")


def short_signature(app, what, name, obj, options, signature, annotation):
    """Show short types, default options without fields, and classes that users do not make without arguments."""
    if what == "class" and ("._src." in name or name.rpartition(".")[2] in MADE_BY_FEEDLINE):
        return "", annotation
    if obj is feedline.FeedOptions:  # its fields, and so the names of their types, are another module's
        signature = stringify_signature(
            signature_of(feedline.Feed.__init__, bound_method=True), unqualified_typehints=True
        )
    if inspect.isgeneratorfunction(getattr(obj, "__wrapped__", None)):  # a context manager
        annotation = annotation.replace("collections.abc.Iterator", "contextlib.AbstractContextManager")
    if signature:
        signature = re.sub(r"\b([A-Z]\w+)\((?:[^()]|\([^()]*\))+\)", r"\1()", signature)
    return signature and short_types(signature), annotation and short_types(annotation)


def skip_internal(app, what, name, obj, skip, options):
    """Skip what only feedline calls, modules, and docstrings that Python gives the fields of named tuples."""
    given = (getattr(obj, "__doc__", None) or "").startswith("Alias for field number")
    return True if given or name in INTERNAL or inspect.ismodule(obj) else None


def hide_private_modules(app, doctree):
    """Show objects that no public module exports without the name of their module."""
    for name in list(doctree.findall(addnodes.desc_addname)):
        if "._src." in name.astext():
            name.parent.remove(name)


def warn_of_missing_entries(app, env):
    """Warn of public names and members without an entry, such as those without a docstring, and of such fields."""
    entries = env.domains.python_domain.objects
    public = {f"{module.__name__}.{name}" for module in MODULES for name in module.__all__}
    public -= {module.__name__ for module in MODULES}
    for name in public | {
        name for name, entry in entries.items() if entry.objtype in ("class", "exception") and not entry.aliased
    }:
        kind = pkgutil.resolve_name(name)
        for base in kind.__mro__ if inspect.isclass(kind) else ():
            if base.__module__.startswith("feedline") and (base is kind or base is not feedline.FeedError):
                members = {member: value for member, value in vars(base).items() if not member.startswith("_")}
                public |= {
                    f"{name}.{member}"
                    for member, value in members.items()
                    if isinstance(value, FunctionType | classmethod | property) and member not in INTERNAL
                }
        if kind is not feedline.FeedOptions:  # its fields are the arguments of `Feed`
            fields = getattr(kind, "__dataclass_fields__", getattr(kind, "_fields", ()))
            public |= {f"{name}.{field}" for field in fields if not field.startswith("_")}
    for name in sorted(public - entries.keys()):
        log.warning("%s has no entry in docs/api.md, or no docstring", name)


def warn_of_missing_types(app, env, node, text):
    """Warn of types of feedline that signatures name and no entry describes."""
    if node.get("reftarget", "").startswith("feedline."):
        log.warning("%s has no entry in docs/api.md", node["reftarget"], location=node)


def setup(app):
    app.connect("source-read", link_within_the_site)
    app.connect("source-read", add_further_types)
    app.connect("autodoc-process-docstring", whole_sentence, priority=400)  # before napoleon's 500
    app.connect("autodoc-process-docstring", docstring_to_rst)
    app.connect("autodoc-process-docstring", attributes_with_types)
    app.connect("autodoc-process-signature", short_signature)
    app.connect("autodoc-skip-member", skip_internal)
    app.connect("doctree-read", hide_private_modules)
    app.connect("env-check-consistency", warn_of_missing_entries)
    app.connect("missing-reference", warn_of_missing_types)
