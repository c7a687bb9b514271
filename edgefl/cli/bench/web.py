"""``edgefl bench web``: a step in a browser beside Python's agent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.bench.report import measured, mebibytes, report
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.bench.web.rows import WebRow


def web(
    model: Annotated[
        list[str] | None,
        typer.Option(help="a model with preset tiers, may be repeated; default: resnet20, cnn"),
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="a tier, may be repeated; default: all")] = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    threads: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="threads of WebAssembly, may be repeated; default: 1, and 2, which an isolated page may have; "
            "the native side has one",
        ),
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="blocks of steps for each side")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")] = False,
) -> None:
    """A training step in headless Chromium (WebAssembly with SIMD) beside Python's agent, which runs the same graph
    natively on one thread: time and memory, for each tier of ResNet-20 and the CNN, weak to strong.

    Both sides take turns in blocks of equally many steps. It needs Chromium, and the page that `make agents-web` builds.

    Examples:

      edgefl bench web --json

      edgefl bench web --threads 2 --json

      edgefl bench web --model cnn --tier weak --repeat 3
    """

    from edgefl.bench.web.rows import MODELS, cases, measure

    chosen = cases(tuple(model or MODELS), tuple(tier or ()))
    rows, failed = measured(
        [(*case, count) for count in threads or _usual() for case in chosen],
        lambda case, tell: measure(*case[:2], batch=batch, threads=case[2], repeat=repeat, say=tell),
        _line,
    )
    report("web", f"a step in Chromium, batch {batch}", rows, _columns, as_json, failed)


def _usual() -> list[int]:
    return [1, 2] if (os.cpu_count() or 1) > 1 else [1]


def _line(row: WebRow) -> str:
    return (
        f"{row.model}, {row.tier}, {row.threads} threads: {row.ms_min:g} ms, native {row.native_ms_min:g} ms, "
        f"ratio {row.ratio:g}, memory {size(row.peak_over_idle_bytes)}, native {size(row.native_peak_over_idle_bytes)}"
    )


def _columns(row: WebRow) -> dict[str, Any]:
    return {
        "model": row.model,
        "tier": row.tier,
        "threads": row.threads,
        "ms": row.ms,
        "native ms": row.native_ms,
        "ratio": f"{row.ratio:.2f}",
        "memory MiB": mebibytes(row.peak_over_idle_bytes),
        "native MiB": mebibytes(row.native_peak_over_idle_bytes),
        "wasm MiB": mebibytes(row.wasm_bytes),
    }
