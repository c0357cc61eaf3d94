"""Build the documentation as a site in build/site/html: the pages of docs/, the API from docstrings, and the source files they link to.

python docs/make_site.py
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SITE = ROOT / "build" / "site"
CODE = "code"
"""The part of the site with source files."""

NOT_ON_THE_SITE = {"README.md"}  # the first page is docs/index.md
GROUPS = {
    "train": "Training",
    "config": "Config",
    "collect": "Collecting",
    "rollout": "Rollouts",
    "backends": "Learning",
    "policy": "Policies",
    "env": "Environments",
    "evaluate": "Evaluation",
    "selfplay": "Self-play",
    "run": "Runs and files",
    "tracking": "Tracking",
    "analysis": "Analysis",
    "policy_check": "Checking policies",
    "worlds": "Worlds",
    "core": "Types, protocols and errors",
}
"""Title of each package in the API, in order; packages that are not listed follow under their own names."""


def api_names() -> list[tuple[str, str]]:
    """Return every public name and the module it lives in."""
    stub = (ROOT / "src" / "inchworm" / "__init__.pyi").read_text(encoding="utf-8")
    return [(name, home) for home, name in re.findall(r"^from (\S+) import (\S+) as \2$", stub, re.MULTILINE)]


def api_pages() -> dict[str, str]:
    """Return the pages of the API by file name: one for each package with public names, and a list of them."""
    packages: dict[str, list[tuple[str, str]]] = {name: [] for name in GROUPS}
    for name, home in api_names():
        packages.setdefault(home.split(".")[1], []).append((name, home))
    pages, overview = {}, "# API\n\nEvery public name of inchworm, from the docstrings.\n\n"
    for package, names in packages.items():
        if names:
            title = GROUPS.get(package, package)
            pages[f"api/{package}.md"] = f"# {title}\n\n" + "".join(entry(name, home) for name, home in names)
            overview += f"- [{title}]({package}.md): {', '.join(f'[`{name}`]({package}.md#{name.lower()})' for name, _ in names)}\n"
    return pages | {"api/index.md": overview}


def entry(name: str, home: str) -> str:
    """Return the part of a page about one public name; the fields of configs are on the page of settings."""
    directive = "autoclass" if name[0].isupper() else "autofunction"
    fields = home == "inchworm.config.sections"
    text = f"## {name}\n\n```{{eval-rst}}\n.. {directive}:: inchworm.{name}\n" + ("   :no-members:\n" if fields else "") + "```\n\n"
    return text + ("The fields are on the page [Config](../config.md).\n\n" if fields else "")


def sources() -> dict[str, Path]:
    """Return the Markdown files of the site by their place on it."""
    top = {page.name: page for page in sorted(ROOT.glob("*.md")) if page.name not in NOT_ON_THE_SITE}
    return top | {page.relative_to(DOCS).as_posix(): page for page in sorted(DOCS.rglob("*.md"))}


def files_of(folder: str) -> list[str]:
    """Return the source files of a folder of the repository."""
    return [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / folder).rglob("*")) if path.suffix in {".py", ".pyi", ".c"}]


@cache
def definitions(path: str) -> dict[str, int]:
    """Return the line of every class, function and method of a Python file, by its qualified name."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(prefix + child.name, child.lineno)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse((ROOT / path).read_text(encoding="utf-8")), "")
    return found


@cache
def linked_files() -> frozenset[str]:
    """Return the source files and folders that the pages link to, with the files of those folders."""
    found: set[str] = set()
    for page in sources().values():
        rewritten(page, lambda path, _: found.add(path) or "")
    return frozenset(found | {file for path in found if (ROOT / path).is_dir() for file in files_of(path)})


def rewritten(page: Path, link_to_code: Callable[[str, str], str]) -> str:
    """Return the text of a page with the links that leave docs/ changed; `link_to_code(path, anchor)` is where those to source files go."""
    place = page.parent.relative_to(DOCS) if DOCS in page.parents else Path()

    def link(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        file = (page.parent / path).resolve()
        if file.is_dir() and DOCS in file.parents:
            return f"[{text}]({path}/index.md)"
        if file.suffix in {".md", ".png", ".svg", ".ipynb"} and file.name not in NOT_ON_THE_SITE:
            home = file.relative_to(DOCS if DOCS in file.parents else ROOT).as_posix()
            return f"[{text}]({os.path.relpath(home, place)}{'#' + anchor if anchor else ''})"
        if file.name in NOT_ON_THE_SITE:
            return f"[{text}]({os.path.relpath('index.md', place)})"
        address = link_to_code(file.relative_to(ROOT).as_posix(), anchor)
        return f'<a href="{os.path.relpath(address, place) if address else ""}">{text}</a>'

    parts = re.split(r"(^```.*?^```$)", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, part) for part in parts)


def address_of_code(path: str, anchor: str) -> str:
    """Return the address of a source file's page, and of a definition in it."""
    return f"{CODE}/{path}.html" + (f"#{anchor}" if anchor else "")


def navigation(index: str) -> str:
    """Return the site's navigation: the groups of the table of pages on the first page, then the pages that it does not name."""
    groups: dict[str, list[str]] = {}
    for title, cell in re.findall(r"^\| \*\*(.+?)\*\* \| (.*) \|$", index, re.MULTILINE):
        groups[title] = [re.sub(r"\.md$", "", target) for target in re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", cell)]
    named = {page for pages in groups.values() for page in pages}
    rest = [page for page in (place[:-3] for place in sources()) if "/" not in page and page not in named | {"index"}]
    groups.setdefault("Reference", []).append("api/index")
    groups["More"] = rest
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(dict.fromkeys(pages)) + "\n```\n"
        for title, pages in groups.items()
        if pages
    )


def stage(pages: Path) -> None:
    """Write what Sphinx reads."""
    shutil.rmtree(pages, ignore_errors=True)
    for folder in ("images", "curves", "notebooks"):
        shutil.copytree(DOCS / folder, pages / folder)
    texts = {place: rewritten(page, address_of_code) for place, page in sources().items()}
    texts |= api_pages()
    for folder in sorted({Path(place).parent for place in texts} - {Path()}):
        inside = [Path(place).stem for place in sorted(texts) if Path(place).parent == folder and Path(place).stem != "index"]
        head = texts.get(f"{folder}/index.md", f"# {folder.name.capitalize()}\n")
        hidden = ":hidden:\n" if f"{folder}/index.md" in texts else ""
        texts[f"{folder}/index.md"] = head + f"\n```{{toctree}}\n{hidden}:maxdepth: 1\n\n" + "\n".join(inside) + "\n```\n"
    texts["index.md"] = texts["index.md"].replace("· API:", "· [API](api/index.md):") + navigation(texts["index.md"])
    for place, text in texts.items():
        (pages / place).parent.mkdir(parents=True, exist_ok=True)
        (pages / place).write_text(text, encoding="utf-8")


def build(directory: Path, builder: str = "html") -> int:
    """Build the site in `directory`; warnings are errors. `dummy` reads and checks everything and writes no pages."""
    from sphinx.cmd.build import build_main

    pages, built = directory / "pages", directory / builder
    stage(pages)
    shutil.rmtree(built, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-E", "-c", str(DOCS / "site"), "-d", str(directory / "doctrees")]
    return build_main(["-b", builder, *options, str(pages), str(built)])


if __name__ == "__main__":
    if code := build(SITE):
        sys.exit(code)
    print(f"the site is in {(SITE / 'html' / 'index.html').relative_to(ROOT)}")
