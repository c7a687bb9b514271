"""Compare the planned with the measured memory of rounds of real agents.

::

    python -m edgefl_conformance.memory --model mobilenet --tier cut
    python -m edgefl_conformance.memory --plan 16MiB --agent build/agents/cpp/edgefl-agent
    python -m edgefl_conformance.memory --trial           # with RLIMIT_DATA at the plan and 10 % above the idle agent
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from edgefl.api.compile import compile, plan
from edgefl.api.training import CompileOptions, Target
from edgefl.contract.choice import SubmodelChoice
from edgefl.errors import EdgeflError, ModelError
from edgefl.models.exits import with_exits
from edgefl.models.spec import ModelSpec
from edgefl.submodels.catalog import EarlyExit, Importance, OutputSide, Width, build
from edgefl_conformance.memory.measure import RoundMemory, measured
from edgefl_conformance.memory.models import SUBJECTS, MeasuredModel
from edgefl_conformance.play.broker import Broker, running_broker
from edgefl_export.device import Device

MIB = 1 << 20
TIERS = ("full", "half", "importance", "cut", "exit")
"""The model gets exits for the last one, which is not in the table by default."""
HEADER = "| model | tier | engine | agent | planned MiB | anonymous | error | mapped | writable | finished |"
KINDS, EXITS = ("output_side", "width", "importance", "importance_structured"), ("early_exit",)
_PYTHON = f"{sys.executable} -m edgefl device"


class RoundMemoryRow(msgspec.Struct, frozen=True):
    """Planned and measured memory of one round, in bytes above the idle agent."""

    model: str
    tier: str
    engine: str
    agent: str
    planned: int
    measured: RoundMemory

    def __str__(self) -> str:
        found = self.measured
        error = self.planned / found.anonymous - 1 if found.anonymous else 0.0
        sizes = (self.planned, found.anonymous, found.mapped, found.writable)
        planned, taken, *others = (f"{size / MIB:.1f}" for size in sizes)
        ended = "yes" if found.finished else f"no: {found.words}"
        cells = [self.model, self.tier, self.engine, self.agent, planned, taken, f"{error:+.0%}", *others]
        return f"| {' | '.join([*cells, ended])} |"


class MeasuredTier(NamedTuple):
    """A tier to measure, with its name in the table."""

    name: str
    spec: ModelSpec
    chosen: SubmodelChoice


def tier_of(subject: MeasuredModel, name: str) -> MeasuredTier:
    """Return a tier of the table.

    Args:
        subject: the model.
        name: ``full``, ``half`` of the parameters by width, ``importance`` of a quarter of the entries, ``cut`` behind half
            of the units, or ``exit``, which holds at most half of the parameters.
    """
    spec = subject.spec()
    choices = {
        "full": OutputSide(),
        "half": Width(gamma=0.5),
        "importance": Importance(gamma=0.25),
        "cut": OutputSide(cut=len(spec.units) // 2),
        "exit": EarlyExit(gamma=0.5),
    }
    return MeasuredTier(name, with_exits(spec) if name == "exit" else spec, choices[name])


def proposals(subject: MeasuredModel, memory: str) -> Iterator[MeasuredTier]:
    """Yield what `edgefl plan --memory` proposes: of each kind of tier the submodel that trains most."""
    spec = subject.spec()
    for kinds in (KINDS, EXITS):
        with suppress(ModelError):  # the model has no place for an exit
            each, device = with_exits(spec) if kinds == EXITS else spec, Device(memory)
            made = plan(each, device, training=subject.training, kinds=kinds)
            best = {offer.kind: offer for offer in sorted(made.able, key=lambda offer: offer.trained_share)}
            for kind, offer in best.items():
                yield MeasuredTier(
                    f"{memory}: {kind}, {offer.size}", each, SubmodelChoice(kind, offer.options)
                )


def subject_of(text: str) -> MeasuredModel:
    """Return the model of a name, or of ``file.py:NAME``. ArgumentTypeError if there is none."""
    path, _, name = text.rpartition(":")
    if not path and name in SUBJECTS:
        return SUBJECTS[name]
    found = runpy.run_path(path).get(name) if Path(path).is_file() else None
    if isinstance(found, MeasuredModel):
        return found
    raise argparse.ArgumentTypeError(
        f"expected one of {', '.join(SUBJECTS)}, or file.py:NAME of a MeasuredModel; found {text!r}"
    )


Measuring = tuple[MeasuredModel, MeasuredTier, Target]


def row_of(measuring: Measuring, agent: str, broker: Broker, folder: Path, *, trial: bool) -> RoundMemoryRow:
    """Measure one round of a model's tier by the agent that ``agent`` starts."""
    subject, tier, engine = measuring
    cut = build(tier.spec, tier.chosen.name, **tier.chosen.options)
    options = CompileOptions(target=engine)
    bundle = compile(
        tier.spec, submodel=tier.chosen, training=subject.training(cut), options=options, tier="measured"
    ).contents
    planned, words = bundle.manifest.planned_bytes, agent.split()
    limit = planned + planned // 10 if trial else 0
    found = measured(words, bundle, broker, folder, memory_bytes=planned, limit_bytes=limit)
    names = (
        subject.module.__name__,
        tier.name,
        engine,
        "Python" if agent == _PYTHON else Path(words[0]).name,
    )
    return RoundMemoryRow(*names, planned, found)


def main() -> None:
    """Print a table of the rounds that the command line chooses."""
    parser = argparse.ArgumentParser(prog="python -m edgefl_conformance.memory", description=__doc__)
    parser.add_argument("--model", action="append", help=f"{', '.join(SUBJECTS)}, or file.py:NAME")
    parser.add_argument("--tier", action="append", choices=TIERS)
    parser.add_argument("--plan", action="append", default=[], help="what `edgefl plan` proposes for 16MiB")
    parser.add_argument("--engine", action="append", choices=("onnx", "executorch"))
    parser.add_argument(
        "--agent", action="append", help="a command that takes the options of `edgefl device`"
    )
    parser.add_argument("--trial", action="store_true", help="limit each agent to its plan and 10 %%")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(HEADER, "|---" * 10 + "|", sep="\n")
    with tempfile.TemporaryDirectory(prefix="edgefl-memory-") as place, running_broker(Path(place)) as broker:
        for model in map(subject_of, args.model or SUBJECTS):
            tiers = (tier_of(model, name) for name in args.tier or TIERS[:-1])
            proposed = chain.from_iterable(proposals(model, memory) for memory in args.plan)
            for tier in proposed if args.plan else tiers:
                for engine in args.engine or ("onnx", "executorch"):
                    for agent in args.agent or (_PYTHON,):
                        try:
                            row = row_of((model, tier, engine), agent, broker, Path(place), trial=args.trial)
                        except EdgeflError as error:  # a model that has no such tier
                            print(f"{model}, {tier.name}, {engine}: {error.message}", file=sys.stderr)
                            continue
                        print(msgspec.json.encode(row).decode() if args.json else row, flush=True)


if __name__ == "__main__":
    main()
