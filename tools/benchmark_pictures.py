"""The pictures of docs/benchmarks.md, drawn from its first table: python -m tools.benchmark_pictures"""

from __future__ import annotations

import re
from pathlib import Path

from edgefl.analysis.charts import bar_chart

DOCS = Path(__file__).resolve().parents[1] / "docs"


def pictures(page: str) -> dict[str, str]:
    """Return the SVG texts by file name: ratios of the step table on an Intel processor to torch eager."""
    tables = page.partition("<!-- bench step -->")[2].partition("<!-- end -->")[0].split("\n`python ")
    (table,) = (each for each in tables if "Intel" in each.split("\n", 1)[0])
    rows = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines() if line.startswith("| `")]
    time = {row[0].strip("`"): float(row[4]) for row in rows}
    memory = {row[0].strip("`"): int(row[6]) / int(row[7]) for row in rows}
    return {
        "step-time.svg": bar_chart(time, title="Time of a training step", y="edgefl / torch eager"),
        "step-memory.svg": bar_chart(memory, title="Memory of a training step", y="edgefl / torch eager"),
    }


if __name__ == "__main__":
    for name, picture in pictures((DOCS / "benchmarks.md").read_text()).items():
        (DOCS / "pictures" / name).write_text(picture)
