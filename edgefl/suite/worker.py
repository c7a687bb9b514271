"""The process that tries one architecture: ``python -m edgefl.suite.worker LIBRARY/NAME BATCH FILE ENGINE...``.

It writes lines of JSON to FILE: ``{"stage": ...}`` before each part, and ``{"verdict": ...}`` after each engine. What a
process that crashed or took too long had found is there.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from edgefl.api.check import Verdict, check
from edgefl.api.compile import Target
from edgefl.contract.choice import LossChoice
from edgefl.setup.one_line import parse_loss
from edgefl.suite.architecture import Architecture
from edgefl.suite.catalog import named

SEED = 0


def tried(architecture: Architecture, batch: int, engines: list[Target], file: Path) -> None:
    """Build it and check it; what is found goes to ``file``."""

    def write(**values: object) -> None:
        with file.open("ab") as stream:
            stream.write(msgspec.json.encode(values) + b"\n")

    def write_verdict(verdict: Verdict) -> None:
        write(verdict=asdict(verdict))

    write(stage="building the model")
    torch.manual_seed(SEED)
    model = architecture.make()
    verdict = check(
        model,
        sample=architecture.sample,
        classes=architecture.classes,
        loss=LossChoice(**parse_loss(architecture.loss)) if architecture.loss else None,
        batch=batch,
        seed=SEED,
        engines=engines,
        progress=lambda text: write(stage=text),
        so_far=write_verdict,
    )
    write_verdict(verdict)  # also one that no engine tried


if __name__ == "__main__":
    path, rows, out, *asked = sys.argv[1:]
    formats: tuple[Target, ...] = ("onnx", "executorch")
    tried(named(path), int(rows), [each for each in formats if each in asked], Path(out))
