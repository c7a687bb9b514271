"""All tables of ``docs/benchmarks.md`` from one run: ``python -m benchmarks.page``, or ``make bench``.

Each table has the results of one command with ``--json``, which ``build/bench`` keeps. ``--only NAME`` measures some again;
``--kept`` writes the kept results and runs nothing. In the page, a table lies between ``<!-- bench NAME -->`` and
``<!-- end -->``. There is one table for each maker of processors, under its command, its day and its machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
KEPT = ROOT / "build" / "bench"

Row = Mapping[str, Any]
"""One of a command's results, as ``python -m benchmarks`` documents it."""
Cell = Callable[[Row], str]


@dataclass(frozen=True)
class PageTable:
    """A table of the page: the rows of ``python -m benchmarks ARGUMENTS``, a cell for each of ``columns``.

    ``peers`` are environments of others (``python -m benchmarks peer NAME``), by the option that takes their Python.
    """

    name: str
    arguments: tuple[str, ...]
    columns: tuple[tuple[str, Cell], ...]
    peers: tuple[tuple[str, str], ...] = ()

    @property
    def command(self) -> str:
        """Command as a person types it."""
        options = [f'{option} "$(python -m benchmarks peer {peer})"' for option, peer in self.peers]
        return " ".join(["python -m benchmarks", *self.arguments, *options])


def number(key: str, digits: int = 0, unit: float = 1.0) -> Cell:
    """Return a cell of ``row[key] / unit``; a dash for null."""
    return lambda row: "-" if row[key] is None else f"{row[key] / unit:,.{digits}f}"


def text(key: str) -> Cell:
    """Return a cell of ``row[key]`` as code."""
    return lambda row: f"`{row[key]}`"


def percent(key: str) -> Cell:
    """Return a cell of ``row[key]`` in percent; a dash for null."""
    return lambda row: "-" if row[key] is None else f"{100 * row[key]:.1f} %"


def beside(key: str, least: str) -> Cell:
    """Return a cell of milliseconds, with the minimum in brackets."""
    return lambda row: "-" if row[key] is None else f"{row[key]:,.0f} ({row[least]:,.0f})"


def ratio_of_least(row: Row) -> str:
    """Return the ratio of the minima."""
    return f"{row['ms_min'] / row['eager_ms_min']:.2f}"


_MIB, _MB = float(1 << 20), 1e6
_STEP: tuple[tuple[str, Cell], ...] = (
    ("model", text("model")),
    ("form", text("variant")),
    ("exported, ms", beside("ms", "ms_min")),
    ("torch eager, ms", beside("eager_ms", "eager_ms_min")),
    ("ratio", number("ratio", 2)),
    ("of minima", ratio_of_least),
    ("peak, MiB", number("peak_over_idle_bytes", 0, _MIB)),
    ("torch's peak, MiB", number("eager_peak_over_idle_bytes", 0, _MIB)),
    ("largest relative error", lambda row: f"{row['max_rel_error']:.0e}"),
)
_CONVOLUTIONS = tuple(f"--model={name}" for name in ("resnet20", "resnet18", "cnn", "mobilenet"))
_ROUND: tuple[tuple[str, Cell], ...] = (
    ("broker", text("broker")),
    ("devices", number("devices")),
    ("a round, s", number("round_s", 2)),
    ("the fastest, s", number("round_min_s", 2)),
    ("server's processor time, s", number("server_cpu_s", 2)),
    ("down, MB", number("down_bytes", 1, _MB)),
    ("up, MB", number("up_bytes", 1, _MB)),
)

TABLES = (
    PageTable("step", ("train-step", "--tune", "--repeat", "2"), _STEP),
    PageTable("step-2-threads", ("train-step", "--tune", "--threads", "2", "--repeat", "2"), _STEP),
    PageTable("step-default", ("train-step", *_CONVOLUTIONS, "--own-form", "--repeat", "2"), _STEP),
    PageTable(
        "step-others",
        (
            "train-step",
            "--model=resnet20",
            "--model=cnn",
            "--tune",
            "--compile",
            "--channels-last",
            "--repeat",
            "2",
        ),
        (
            ("model", text("model")),
            ("exported", beside("ms", "ms_min")),
            ("torch eager", beside("eager_ms", "eager_ms_min")),
            ("torch.compile", beside("compile_ms", "compile_ms_min")),
            ("eager, channels last", beside("channels_last_ms", "channels_last_ms_min")),
            ("JAX", beside("jax_ms", "jax_ms_min")),
        ),
        peers=(("--jax", "jax"),),
    ),
    PageTable(
        "step-executorch",
        (
            "train-step",
            "--target=executorch",
            "--model=resnet20",
            "--model=cnn",
            "--model=bert",
            "--tune",
            "--repeat",
            "2",
        ),
        _STEP,
    ),
    PageTable("round-mosquitto", ("round", "--devices", "16", "--broker-kind", "mosquitto"), _ROUND),
    PageTable("round-embedded", ("round", "--devices", "16", "--broker-kind", "amqtt"), _ROUND),
    PageTable(
        "memory",
        ("memory", "--repeat", "1"),
        (
            ("engine", text("engine")),
            ("tier", text("tier")),
            ("peak over idle, MB", number("peak_over_idle_bytes", 1, _MB)),
            ("predicted, off by", percent("predicted_error")),
            ("of strong", number("over_strong", 2)),
            ("down, MB", number("down_bytes", 1, _MB)),
            ("up, MB", number("up_bytes", 1, _MB)),
        ),
    ),
    PageTable(
        "aggregate",
        ("aggregate", "--codec=fedbat", "--codec=topk", "--codec=fedpaq", "--codec=dense"),
        (
            ("codec", text("codec")),
            ("updates a second", number("updates_per_s")),
            ("Flower's average of the same as float32", number("flower_updates_per_s")),
            ("ratio", number("ratio", 1)),
            ("of a memory copy", percent("copy_fraction")),
            ("a whole round of ours, ratio", number("round_ratio", 1)),
        ),
        peers=(("--flower", "flower"),),
    ),
    PageTable(
        "encode",
        ("encode",),
        (
            ("codec", text("codec")),
            ("coding, ms", number("encode_ms", 1)),
            ("a training step, ms", number("step_ms")),
            ("ratio", percent("ratio")),
            ("update, KB", number("update_bytes", 0, 1e3)),
        ),
    ),
    PageTable(
        "simulate",
        ("simulate",),
        (
            ("task", text("task")),
            ("engine", lambda row: f"`{row['engine']}` {row['version']}"),
            ("clients", number("clients")),
            ("a round", number("per_round")),
            ("rounds", number("rounds")),
            ("clients a second", number("clients_per_s", 1)),
            ("the arithmetic's limit", number("limit_clients_per_s", 1)),
            ("peak, MiB", number("peak_rss_bytes", 0, _MIB)),
            ("accuracy", number("final_accuracy", 3)),
        ),
    ),
)


def measure(table: PageTable) -> Mapping[str, Any]:
    """Run the table's command; return its JSON, and keep it. Raises SystemExit with its output if it fails."""
    benchmarks = [sys.executable, "-m", "benchmarks"]
    peers = []
    for option, peer in table.peers:
        path = _run([*benchmarks, "peer", peer]).strip().splitlines()[-1]
        peers += [option, path]
    result: dict[str, Any] = json.loads(_run([*benchmarks, *table.arguments, *peers, "--json"]))
    result["day"] = datetime.date.today().isoformat()
    KEPT.mkdir(parents=True, exist_ok=True)
    (KEPT / f"{table.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _run(command: Sequence[str]) -> str:
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stderr[-2000:]}")
    return ran.stdout


def markdown(table: PageTable, result: Mapping[str, Any]) -> str:
    """Return the table as Markdown, under its command, day and machine."""
    machine = result["machine"]
    packages = ", ".join(
        f"{name} {machine['packages'][name]}" for name in ("onnxruntime", "torch", "executorch")
    )
    titles = [title for title, _ in table.columns]
    lines = [
        f"`{table.command}`, {result['day']}, {machine['processor']} ({machine['cores']} cores), {packages}:",
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(f"| {' | '.join(cell(row) for _, cell in table.columns)} |" for row in result["results"]),
    ]
    return "\n".join(lines)


def place(page: str, table: PageTable, block: str) -> str:
    """Return the page with ``block`` at the table's place, beside those of other makers of processors.

    Raises ValueError if the page has no such place.
    """
    begin, end = f"<!-- bench {table.name} -->", "<!-- end -->"
    hit = re.search(f"{re.escape(begin)}(.*?){re.escape(end)}", page, re.DOTALL)
    if hit is None:
        raise ValueError(f"{PAGE.name} has no place {begin} ... {end}")
    blocks = {_maker(each): each.strip() for each in re.split(r"\n(?=`python )", hit[1]) if each.strip()}
    blocks[_maker(block)] = block
    tables = "\n\n".join(blocks[maker] for maker in sorted(blocks))
    return f"{page[: hit.start()]}{begin}\n{tables}\n{end}{page[hit.end() :]}"


def _maker(block: str) -> str:
    """Return the maker of the processor in a table's first line, such as AMD."""
    return re.split(r"\W", block.split("\n", 1)[0].rsplit("`, ", 1)[-1].split(", ")[1])[0]


def main(names: Iterable[str], *, kept: bool) -> None:
    """Measure tables and write them to the page; ``kept``: write kept results."""
    chosen = set(names)
    if unknown := sorted(chosen - {table.name for table in TABLES}):
        raise SystemExit(
            f"no table {unknown[0]!r}; choose among: {', '.join(table.name for table in TABLES)}"
        )
    for number_, table in enumerate(TABLES, 1):
        if chosen and table.name not in chosen:
            continue
        print(f"{number_} of {len(TABLES)}, {table.name}: {table.command}", flush=True)
        start = time.monotonic()
        result = json.loads((KEPT / f"{table.name}.json").read_text()) if kept else measure(table)
        block = markdown(table, result)
        PAGE.write_text(place(PAGE.read_text(), table, block))
        print(f"   {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="this table; may be repeated"
    )
    parser.add_argument("--kept", action="store_true", help="write what was measured before, run nothing")
    options = parser.parse_args()
    main(options.only, kept=options.kept)
