"""``edgefl conformance vectors``: bytes to test a reader in another language with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli.options import Engine
from edgefl.cli.output import console, print_json, progress


def register(group: typer.Typer) -> None:
    group.command("vectors")(vectors)


def vectors(
    out: Annotated[Path, typer.Option(help="folder to write into")] = Path("conformance"),
    engine: Annotated[
        list[Engine] | None, typer.Option(help="engine to run the rounds by; may be repeated; default: both")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the rows of the index")] = False,
) -> None:
    """Write the test vectors of the protocol into a folder, in files that any language reads: an index in JSON, cases in
    JSON, and binary files.

    They hold messages, topics, envelopes and signatures, blobs, chunks and frames, patches, tensors and masks, manifests,
    coded updates, what a seed draws, and whole rounds: a bundle, weights, data and a seed, and the update that they give.
    Rounds are run here, by both engines, or by the one that --engine names.

    Examples:

      edgefl conformance vectors

      edgefl conformance vectors --out vectors --engine onnx --json
    """

    from edgefl.conformance.vectors.write import write_vectors

    with progress("running the rounds"):
        rows = write_vectors(out, tuple(each.value for each in engine or Engine))
    if as_json:
        print_json(rows)
        return
    files = sum(path.is_file() for path in out.rglob("*"))
    rounds = sum(row["kind"] == "round" for row in rows)
    console.print(f"{out}: {files} files, {rounds} rounds among them; begin with index.json")
