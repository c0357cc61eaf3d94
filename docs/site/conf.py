"""Sphinx's configuration for the site that docs/make_site.py builds: pages in Markdown, the API from docstrings, source files as pages."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx

import inchworm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))

from make_site import CODE, api_names, definitions, files_of, linked_files  # noqa: E402

project = "inchworm"
author = "the inchworm developers"
release = version = inchworm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
nitpicky = False
suppress_warnings = ["ref.python"]  # the same name in two places, such as a field of two configs

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 90
autodoc_default_options = {"members": True}
default_role = "code"  # docstrings write code in single backticks

html_theme = "furo"
html_title = f"inchworm {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_search_summary = False  # would be fetched, which a browser refuses for files
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Return the address of an object's definition, relative to a page of the API."""
    if domain != "py":
        return None
    name, *rest = info["fullname"].split(".")
    home = importlib.import_module(getattr(inchworm, name).__module__).__file__
    assert home is not None
    path = Path(home).relative_to(ROOT).as_posix()
    anchor = ".".join([name, *rest])
    return f"../{CODE}/{path}.html" + (f"#{anchor}" if anchor in definitions(path) else f"#{name}")


def code_page(path: str) -> tuple[str, dict[str, Any], str]:
    """Return a page with a source file, in which every definition is an anchor, or with the files of a folder."""
    if (ROOT / path).is_dir():
        items = "".join(f'<li><a href="{Path(path).name}/{file[len(path) + 1 :]}.html">{file}</a></li>' for file in files_of(path))
        body = f"<ul>{items}</ul>"
    else:
        body = highlighted(path)
    return f"{CODE}/{path}", {"title": path, "body": f"<h1>{path}</h1>{body}"}, "page.html"


def highlighted(path: str) -> str:
    """Return a source file as HTML."""
    text = (ROOT / path).read_text(encoding="utf-8")
    try:
        lexer = get_lexer_for_filename(path)
    except ClassNotFound:
        lexer = TextLexer()
    lines = highlight(text, lexer, HtmlFormatter(linenos="inline", cssclass="highlight")).split("\n")
    if path.endswith(".py"):
        for name, line in definitions(path).items():
            head, mark, rest = lines[line - 1].rpartition("<pre>") if line == 1 else ("", "", lines[line - 1])
            lines[line - 1] = f'{head}{mark}<span id="{name}">{rest}</span>'
    return "\n".join(lines)


def code_pages(_: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Make a page of every source file that a page or the API refers to."""
    api = {Path(str(inspect.getsourcefile(importlib.import_module(home)))).relative_to(ROOT).as_posix() for _, home in api_names()}
    for path in sorted(api | linked_files()):
        yield code_page(path)


def as_text(*event: Any) -> None:
    """Turn a docstring's Markdown into reStructuredText: escape characters that only have a meaning there."""
    lines: list[str] = event[-1]
    for number, line in enumerate(lines):
        parts = re.split(r"(`[^`]*`)", line)
        lines[number] = "".join(part if part.startswith("`") else re.sub(r"[*|]|_(?=\W|$)", r"\\\g<0>", part) for part in parts)


def readable(*event: Any) -> tuple[str | None, str | None]:
    """Write defaults that are made by a function so that the signature can be parsed, and shown with one line per parameter."""
    signature, returned = event[-2:]
    return (signature and re.sub(r"=\s?<[^>]*>", "=...", signature).replace("~typing.", "")), returned


def setup(app: Sphinx) -> None:
    """Register what this file adds to Sphinx."""
    app.connect("autodoc-process-docstring", as_text)
    app.connect("autodoc-process-signature", readable)
    app.connect("html-collect-pages", code_pages)
