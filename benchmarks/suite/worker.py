"""The process that tries one architecture.

It writes lines of JSON to a file: ``{"stage": ...}`` before each part, and ``{"verdict": ...}`` after each engine. What a
process that crashed or took too long had found is there.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from benchmarks.suite.architecture import Architecture
from benchmarks.suite.catalog import named
from edgefl.api.check import Verdict, check
from edgefl.api.model import Model
from edgefl.api.training import Target
from edgefl.contract.choice import LossChoice
from edgefl.setup.federation_options import parse_loss
from edgefl_export.front.cache import FOLDER

SEED = 0
FOUND, LOG, CACHE = "found.jsonl", "log", "cache"
"""What the process leaves in its folder: what it found, what it printed, and bundles of which nobody needs a second."""


def work(path: str, batch: int, engines: Sequence[Target], folder: Path) -> None:
    """The architecture ``path`` on ``batch`` rows of a step: what is found goes to ``folder``."""
    os.environ[FOLDER] = str(folder / CACHE)
    with (folder / LOG).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        torch.set_num_threads(1)
        try:
            _try(named(path), batch, engines, folder / FOUND)
        except Exception as error:
            traceback.print_exc()
            raise SystemExit(1) from error


def _try(architecture: Architecture, batch: int, engines: Sequence[Target], file: Path) -> None:
    def write(**values: object) -> None:
        with file.open("ab") as stream:
            stream.write(msgspec.json.encode(values) + b"\n")

    def write_verdict(verdict: Verdict) -> None:
        write(verdict=asdict(verdict))

    write(stage="building the model")
    torch.manual_seed(SEED)
    verdict = check(
        Model(architecture.make(), sample=architecture.sample, classes=architecture.classes),
        loss=LossChoice(**parse_loss(architecture.loss)) if architecture.loss else None,
        batch=batch,
        seed=SEED,
        engines=engines,
        progress=lambda text: write(stage=text),
        so_far=write_verdict,
    )
    write_verdict(verdict)  # also one that no engine tried
