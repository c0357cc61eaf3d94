"""Write the tables of docs/metrics.md from `inchworm.tracking.metrics`, where every metric is documented.

python docs/make_metrics_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from inchworm.tracking.metrics import METRICS, grouped_name

PAGE = Path(__file__).with_name("metrics.md")
HEAD = "| name | in trackers | meaning | unit | good values |\n|---|---|---|---|---|\n"


def table(group: str) -> str:
    """Return the table of one group."""
    rows = [metric for metric in METRICS if metric.group == group]
    lines = [[f"`{one.name}`", f"`{grouped_name(one.name)}`", one.meaning, one.unit, one.good] for one in rows]
    return HEAD + "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def page(text: str) -> str:
    """Return the page with new tables: each follows a comment with the name of its group."""
    return re.sub(r"(<!-- table: (\w+) -->\n)(?:\|.*\n)*", lambda match: match[1] + table(match[2]), text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
