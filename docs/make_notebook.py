"""Write docs/notebooks/tutorial.ipynb from docs/tutorial.md: a cell for each Python block and for the text between.

python docs/make_notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("tutorial.md")
NOTEBOOK = Path(__file__).parent / "notebooks" / "tutorial.ipynb"


def cells(text: str) -> list[tuple[str, str]]:
    """Return the kind ("markdown" or "code") and the text of each cell of a page."""
    text = re.sub(r"\]\((?!https?://|#)", "](../", text)  # the notebook is one folder deeper
    parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    kinds = ["code" if index % 2 else "markdown" for index in range(len(parts))]
    return [(kind, part.strip()) for kind, part in zip(kinds, parts) if part.strip()]


def notebook(text: str) -> dict[str, Any]:
    """Return the notebook of a page, in format 4.5, without outputs."""

    def cell(number: int, kind: str, source: str) -> dict[str, Any]:
        extra: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
        return {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True), **extra}

    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = [cell(number, *each) for number, each in enumerate(cells(text))]
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def content() -> str:
    """Return what the file should hold."""
    return json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(content(), encoding="utf-8")
