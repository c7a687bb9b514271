"""``python -m tests.support.run``: judge the corpus and print a table.

python -m tests.support.run --target onnx --kind a-mode
python -m tests.support.run --target executorch --only frozen_encoder_eval --jobs 2
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from tests.support.case import Case, Outcome
from tests.support.corpus import CASES
from tests.support.isolated import LIMIT_S, isolated
from tests.support.oracle import judge


def verdict(case: Case, outcome: Outcome) -> str:
    """Return the outcome's word as the table has it: faults are in capitals."""
    if outcome.word in ("wrong", "raised"):
        return outcome.word.upper()
    if outcome.word == "refused" and case.expected == "trains":
        return "UNEXPECTED REFUSAL"
    if outcome.word == "agrees" and case.expected == "refused":
        return "agrees (refusal expected)"
    return outcome.word


def warm_up(target: str) -> Outcome:
    """Compile one module, so that every forked process finds the libraries loaded."""
    torch.set_num_threads(1)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    return judge(Case("warm_up", "plain", "trains", make), target)


def selected(kinds: Sequence[str], names: Sequence[str]) -> list[Case]:
    """Return the cases of ``kinds`` (or their first letters) and ``names``; all without either."""
    return [
        case
        for case in CASES
        if (not kinds or any(case.kind.startswith(kind) for kind in kinds))
        and (not names or any(name in case.name for name in names))
    ]


def row(case: Case, outcome: Outcome) -> str:
    """Return one line of the table."""
    detail = f"{outcome.tensor} off by {outcome.error:.3g}; " if outcome.tensor else ""
    message = " ".join((detail + outcome.message).split())
    return f"{case.kind:12} {case.name:36} {case.expected:8} {verdict(case, outcome):26} {message}"


def main() -> int:
    """Judge the selected cases; exit code 1 where one is wrong or raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=["onnx", "executorch"], default="onnx")
    parser.add_argument("--kind", action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one case")
    options = parser.parse_args()
    cases = {case.name: case for case in selected(options.kind, options.only)}
    begun = time.monotonic()
    ready = warm_up(options.target)
    assert ready.word == "agrees", ready
    counts: Counter[str] = Counter()
    tasks = [(name, partial(judge, case, options.target)) for name, case in cases.items()]
    for name, outcome in isolated(tasks, options.jobs, options.limit):
        print(row(cases[name], outcome), flush=True)
        counts[verdict(cases[name], outcome)] += 1
    print(f"\n{len(cases)} cases on {options.target}, {time.monotonic() - begun:.0f} s")
    for word, count in sorted(counts.items()):
        print(f"{count:5} {word}")
    return 1 if counts["WRONG"] or counts["RAISED"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
