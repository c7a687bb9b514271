"""``edgefl-conformance``: any device agent against a scripted server."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.api.progress import reporting
from edgefl.cli import interrupts, reported_errors
from edgefl.cli.options import EngineChoice, help_of, writable_folder
from edgefl.cli.output import console, errors, print_json, print_table

if TYPE_CHECKING:
    from edgefl_conformance.results import CaseResult


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="how the agent is started")],
    engine: Annotated[
        EngineChoice, typer.Option(help="runtime that runs the agent's graphs")
    ] = EngineChoice.onnx,
    only: Annotated[
        list[str] | None, typer.Option(help="cases or groups by name, * allowed; may be repeated")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="agents that run at a time")] = 4,
    patience: Annotated[
        float, typer.Option(min=0.1, help="times that every wait is longer: for slow agents")
    ] = 1.0,
    websocket: Annotated[bool, typer.Option(help="give the agent a ws:// URL as its broker")] = False,
    out: Annotated[
        Path | None, typer.Option(help="keep what agents printed and stored in this folder")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: engine, counts, cases")] = False,
) -> None:
    """Play the server against an agent, over a real broker, and report what the agent gets right.

    The agent's command follows --. Each case starts it with options of `edgefl device`: --id, --broker, --federation,
    --data (an .npz of x and y), --store, --engine, and if the case needs them --server-key, --token @FILE, --memory,
    --tier, --until-done. Cases judge the agent's messages on the wire and its exit codes, and nothing that it prints.

    An optional case covers a part of the protocol that an agent may lack. The exit code is 0 if all others pass, else 1.

    Examples:

      edgefl-conformance run -- edgefl device --no-tune

      edgefl-conformance run --engine executorch --only declines --json -- build/agents/cpp/edgefl-agent
    """

    from edgefl_conformance.campaign import Campaign

    signal.signal(signal.SIGTERM, interrupts.handler)  # agents and broker end with the kit
    campaign = Campaign(
        command=command,
        engine=engine.value,
        only=tuple(only or ()),
        jobs=jobs,
        patience=patience,
        websocket=websocket,
        folder=out,
    )
    verdicts = campaign.run((lambda _: None) if as_json else _print)
    counts = {
        word: sum(each.outcome == word for each in verdicts)
        for word in ("passed", "failed", "missing", "skipped")
    }
    if as_json:
        print_json(
            {"command": command, "engine": engine.value, **counts, "cases": [_row(each) for each in verdicts]}
        )
    else:
        console.print(_summary(counts, engine.value), style="red" if counts["failed"] else "green")
    raise typer.Exit(1 if counts["failed"] else 0)


def cases(as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False) -> None:
    """List the cases that `edgefl-conformance run` plays: names, groups, and what each checks.

    Example:

      edgefl-conformance cases --json
    """

    from edgefl_conformance.catalog import chosen

    rows = [
        {"group": case.group, "case": case.name, "optional": case.optional, "checks": case.says}
        for case in chosen()
    ]
    if as_json:
        print_json(rows)
    else:
        print_table("cases of `edgefl-conformance run`", rows)


def _row(verdict: CaseResult) -> dict[str, Any]:
    difference = {"expected": verdict.expected, "found": verdict.found} if verdict.outcome != "passed" else {}
    return {
        "case": verdict.name,
        "group": verdict.group,
        "outcome": verdict.outcome,
        "optional": verdict.optional,
        "seconds": round(verdict.seconds, 2),
        "checks": verdict.says,
        **difference,
    }


def _print(verdict: CaseResult) -> None:
    style = {"passed": "green", "failed": "red", "missing": "yellow", "skipped": "dim"}[verdict.outcome]
    line = f"{verdict.outcome:<8} {verdict.group}: {verdict.name}  ({verdict.seconds:.1f} s)"
    console.print(line, style=style)
    if verdict.outcome in ("failed", "missing"):
        errors.print(f"         checks:   {verdict.says}")
        errors.print(f"         expected: {verdict.expected}")
        errors.print(f"         found:    {verdict.found}")


def _summary(counts: dict[str, int], engine: str) -> str:
    parts = [f"{counts['passed']} cases passed", f"{counts['failed']} failed"]
    parts += [f"{counts['missing']} optional ones are missing"] * bool(counts["missing"])
    parts += [f"{counts['skipped']} mean nothing for {engine}"] * bool(counts["skipped"])
    return ", ".join(parts)


def vectors(
    out: Annotated[Path, typer.Option(callback=writable_folder, help="folder to write into")] = Path(
        "vectors"
    ),
    engine: Annotated[
        list[EngineChoice] | None,
        typer.Option(help="engine to run the rounds by; may be repeated; default: both"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the rows of the index")] = False,
) -> None:
    """Write the test vectors of the protocol into a folder, in files that any language reads: an index in JSON, cases in
    JSON, and binary files.

    They hold messages, topics, envelopes and signatures, blobs, chunks and frames, patches, tensors and masks, manifests,
    coded updates, what a seed draws, and whole rounds: a bundle, weights, data and a seed, and the update that they give.
    Rounds are run here, by both engines, or by the one that --engine names.

    Examples:

      edgefl-conformance vectors

      edgefl-conformance vectors --out tests/vectors --engine onnx --json
    """

    from edgefl_conformance.vectors.write import write_vectors

    with reporting("running the rounds"):
        rows = write_vectors(out, tuple(each.value for each in engine or EngineChoice))
    if as_json:
        print_json(rows)
        return
    files = sum(path.is_file() for path in out.rglob("*"))
    rounds = sum(row["kind"] == "round" for row in rows)
    console.print(f"{out}: {files} files, {rounds} rounds among them; begin with index.json")


app = typer.Typer(
    help="The conformance kit: prove that a device agent, in whatever language, does what the protocol says.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, help=help_of(run)
)(run)
app.command(help=help_of(cases))(cases)
app.command(help=help_of(vectors))(vectors)


def main() -> None:
    """Run a command; an expected error becomes one clear line and its exit code."""
    with interrupts.exit_on_interrupt(), reported_errors(lambda: app):
        app(prog_name="edgefl-conformance")
