"""Compare the planned with the measured memory of rounds of real agents.

::

    python -m edgefl_conformance.memory --model mobilenet --tier cut
    python -m edgefl_conformance.memory --engine onnx --agent build/agents/cpp/edgefl-agent
    python -m edgefl_conformance.memory --trial           # with RLIMIT_DATA at the plan and 10 % above the idle agent
"""

from __future__ import annotations

import argparse
import runpy
import sys
import tempfile
from pathlib import Path

import msgspec

from edgefl.algorithms.choices import SGD, TCBGD
from edgefl.api.compile import compile
from edgefl.api.model import model_spec
from edgefl.api.training import CompileOptions, Target, Training
from edgefl.contract.choice import AlgorithmChoice, SubmodelChoice
from edgefl.contract.tensors import TensorSpec
from edgefl.models.exits import with_exits
from edgefl.submodels.choices import EarlyExit, Importance, OutputSide, Width
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.errors import EdgeflError
from edgefl_conformance.memory.measure import RoundMemory, measured
from edgefl_conformance.memory.models import SUBJECTS, MeasuredModel
from edgefl_conformance.play.broker import Broker, running_broker

MIB = 1 << 20
TIERS = ("full", "half", "importance", "cut")
MORE_TIERS = ("exit",)
"""Not in the table: the model gets exits for them."""
_PYTHON = f"{sys.executable} -m edgefl device"


class Row(msgspec.Struct, frozen=True, kw_only=True):
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
        figures = [
            f"{value / MIB:.1f}" for value in (self.planned, found.anonymous, found.mapped, found.writable)
        ]
        ended = "yes" if found.finished else f"no: {found.words}"
        cells = (
            self.model,
            self.tier,
            self.engine,
            self.agent,
            *figures[:2],
            f"{error:+.0%}",
            *figures[2:],
            ended,
        )
        return "| " + " | ".join(cells) + " |"


def bundle_of(subject: MeasuredModel, tier: str, engine: Target) -> Bundle:
    """Compile the training of a tier.

    Args:
        subject: the model.
        tier: ``full``, ``half`` of the parameters by width, ``importance`` of a quarter of the entries, ``cut`` behind half
            of the units, or ``exit``, which holds at most half of the parameters.
        engine: format of the graphs.
    """
    module = subject.made()
    sample, classes = TensorSpec(subject.shape, subject.dtype), subject.classes(module)
    algorithm: AlgorithmChoice = SGD(batch=subject.batch, steps=4)
    chosen: SubmodelChoice = OutputSide()
    if tier == "half":
        chosen = Width(gamma=0.5)
    elif tier == "importance":
        chosen, algorithm = Importance(gamma=0.25), TCBGD(batch=subject.batch, steps=4)
    spec = model_spec(module, sample=sample, classes=classes)
    if tier == "cut":
        chosen = OutputSide(cut=len(spec.units) // 2)
    elif tier == "exit":
        spec, chosen = with_exits(spec), EarlyExit(gamma=0.5)
    return compile(
        spec,
        submodel=chosen,
        tier=tier,
        training=Training(algorithm=algorithm),
        options=CompileOptions(target=engine),
    ).contents


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


def row_of(what: tuple[str, str, Target], agent: str, broker: Broker, folder: Path, *, trial: bool) -> Row:
    """Measure one round of a model's tier by the agent that ``agent`` starts."""
    model, tier, engine = what
    bundle = bundle_of(subject_of(model), tier, engine)
    planned = bundle.manifest.planned_bytes
    found = measured(
        agent.split(),
        bundle,
        broker,
        folder,
        memory_bytes=planned,
        limit_bytes=planned + planned // 10 if trial else 0,
    )
    name = "Python" if agent == _PYTHON else Path(agent.split(maxsplit=1)[0]).name
    return Row(model=model, tier=tier, engine=engine, agent=name, planned=planned, measured=found)


def main() -> None:
    """Print a table of the rounds that the command line chooses."""
    parser = argparse.ArgumentParser(prog="python -m edgefl_conformance.memory", description=__doc__)
    parser.add_argument("--model", action="append", help=f"{', '.join(SUBJECTS)}, or file.py:NAME")
    parser.add_argument("--tier", action="append", choices=TIERS + MORE_TIERS)
    parser.add_argument("--engine", action="append", choices=("onnx", "executorch"))
    parser.add_argument(
        "--agent", action="append", help="a command that takes the options of `edgefl device`"
    )
    parser.add_argument("--trial", action="store_true", help="limit each agent to its plan and 10 %%")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        print(
            "| model | tier | engine | agent | planned MiB | anonymous | error | mapped | writable | finished |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="edgefl-memory-") as place, running_broker(Path(place)) as broker:
        for model in args.model or SUBJECTS:
            for tier in args.tier or TIERS:
                for engine in args.engine or ("onnx", "executorch"):
                    for agent in args.agent or (_PYTHON,):
                        try:
                            row = row_of((model, tier, engine), agent, broker, Path(place), trial=args.trial)
                        except EdgeflError as error:  # a model that has no such tier
                            print(f"{model}, {tier}, {engine}: {error.message}", file=sys.stderr)
                            continue
                        print(msgspec.json.encode(row).decode() if args.json else row, flush=True)


if __name__ == "__main__":
    main()
