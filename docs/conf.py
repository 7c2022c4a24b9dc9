"""The site of feedline: `sphinx-build -W -b html docs site`. The notebooks run while it is built."""

import os
import re
from importlib import metadata
from pathlib import Path

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

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300  # seconds for a cell, on a busy machine
nb_execution_in_temp = True
nb_merge_streams = True

autodoc_default_options = {"members": True, "imported-members": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_custom_sections = [("Example", "Examples")]
toc_object_entries_show_parents = "hide"


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


def docstring_to_rst(app, what, name, obj, options, lines):
    """Make `code` code, also with a letter after it. The tables of api.md replace the docstrings of modules."""
    if what == "module":
        lines.clear()
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[i] = re.sub(r"(?<!`)`([^`]+)`(?!`)(?=(\w?))", lambda m: f"``{m[1]}``" + "\\ " * bool(m[2]), line)


def shorten_defaults(app, what, name, obj, options, signature, annotation):
    """Show options as defaults without their fields, and no arguments of what users do not make themselves."""
    if name.rpartition(".")[2] in ("Fitted", "Plan", "Progress", "RowSource", "Statistics"):
        return "", annotation
    if signature:
        return re.sub(r"\b([A-Z]\w+)\((?:[^()]|\([^()]*\))+\)", r"\1()", signature), annotation
    return None


def setup(app):
    app.connect("source-read", link_within_the_site)
    app.connect("autodoc-process-docstring", docstring_to_rst)
    app.connect("autodoc-process-signature", shorten_defaults)
