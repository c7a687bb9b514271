"""``python -m tests.support.fuzz``: the campaign of ``make fuzz-modules``.

Compares generated modules by edgefl's own comparison, and judges some of them on both engines. Results go to a file,
one line each; a second call continues where the first one stopped. The last step writes the summary page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from edgefl.api.model import model_spec
from edgefl.api.training import loss_of
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import EdgeflError
from tests.support.case import Outcome
from tests.support.isolated import LIMIT_S, isolated
from tests.support.modules import generated
from tests.support.oracle import judge
from tests.support.run import warm_up
from tests.support.states import stateful

COMPARISON = "edgefl.comparison"
RESULTS = Path("build/module-fuzzing.jsonl")
PAGE = Path("docs/contributing/module_fuzzing.md")
EVERY = 20


class Stage(NamedTuple):
    """One kind of check, and how many seeds from 0 on it covers."""

    name: str
    seeds: int
    check: Callable[[int], Outcome]


def compared(seed: int) -> Outcome:
    """Compare one module by edgefl's own comparison, which every use of a module begins with."""
    case = generated(seed)
    try:
        model_spec(case.make(), sample=case.sample, classes=case.classes, loss=loss_of(case.loss))
    except EdgeflError as error:
        return Outcome("refused", error.message)
    except Exception as error:
        return Outcome("raised", f"{type(error).__name__}: {error}")
    return Outcome("agrees")


def with_state(seed: int) -> Outcome:
    """Compare one module that keeps Python state: it has to be refused if the state decides, and accepted if not."""
    form, module, decides = stateful(seed)
    try:
        model_spec(module, sample=TensorSpec((4,)), classes=3)
    except EdgeflError as error:
        return Outcome("refused" if decides else "wrong", f"{form}: {error.message}")
    except Exception as error:
        return Outcome("raised", f"{form}: {type(error).__name__}: {error}")
    return Outcome("wrong" if decides else "agrees", form)


def judged(target: str, seed: int) -> Outcome:
    """Judge one module in an engine."""
    return judge(generated(seed), target)


def stages(options: argparse.Namespace) -> Iterator[Stage]:
    """Return the stages that can run: edgefl's own comparison only where this version has one."""
    if find_spec(COMPARISON) is not None:
        yield Stage("compared", options.compared, compared)
        yield Stage("state", options.state, with_state)
    else:
        print(f"skipped: there is no {COMPARISON} in this version", file=sys.stderr)
    yield Stage("onnx", options.onnx, partial(judged, "onnx"))
    yield Stage("executorch", options.executorch, partial(judged, "executorch"))


def read(results: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the lines of earlier calls by stage and seed; a line that was cut off is left out."""
    lines: dict[tuple[str, int], dict[str, Any]] = {}
    if results.exists():
        for text in results.read_text().splitlines():
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            lines[line["stage"], line["seed"]] = line
    return lines


def run(stage: Stage, results: Path, jobs: int, limit_s: float) -> None:
    """Run the seeds of a stage that have no line yet, and append their lines."""
    done = read(results)
    left = [seed for seed in range(stage.seeds) if (stage.name, seed) not in done]
    if not left:
        return
    # The processes are forked from this one: whatever it has imported, none of them imports again.
    ready = warm_up("executorch" if stage.name == "executorch" else "onnx")
    assert ready.word == "agrees", ready
    begun, counts = time.monotonic(), Counter[str]()
    tasks = ((str(seed), partial(stage.check, seed)) for seed in left)
    with results.open("a") as file:
        for number, (seed, outcome) in enumerate(isolated(tasks, jobs, limit_s), 1):
            line = {"stage": stage.name, "seed": int(seed), **outcome.__dict__}
            file.write(json.dumps(line) + "\n")
            file.flush()
            counts[outcome.word] += 1
            if outcome.word in ("wrong", "raised"):
                print(f"{stage.name} seed {seed}: {outcome}", flush=True)
            if number % EVERY == 0 or number == len(left):
                rate = (time.monotonic() - begun) / number
                words = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
                print(f"{stage.name}: {number} of {len(left)}, {rate:.1f} s each; {words}", flush=True)


WORDS = ("agrees", "refused", "wrong", "raised", "undecided")


def page(lines: dict[tuple[str, int], dict[str, Any]]) -> str:
    """Return the summary page."""
    rows, faults = [], []
    for stage in ("compared", "state", "onnx", "executorch"):
        own = {seed: line for (name, seed), line in sorted(lines.items()) if name == stage}
        if own:
            counts = Counter(line["word"] for line in own.values())
            cells = " | ".join(str(counts[word]) for word in WORDS)
            rows.append(f"| {stage} | {min(own)} to {max(own)} | {len(own)} | {cells} |")
        faults += [
            f"* {stage}, seed {seed}: {line['word']} {line['tensor']} {_short(line['message'])}".rstrip()
            for seed, line in own.items()
            if line["word"] in ("wrong", "raised")
        ]
    return "\n".join((*_HEAD, *rows, "", *(faults or ["No module was wrong, none raised."]), *_FOOT))


def _short(message: str) -> str:
    """Return the beginning of a message in one line, with no path of this machine."""
    return " ".join(message.replace(f"{Path.cwd()}/", "").split())[:160]


_HEAD = (
    "# Fuzzing with generated modules",
    "",
    "For people who change how edgefl reads a model. After reading, you can repeat the campaign and look at one module.",
    "",
    "```sh",
    "make fuzz-modules                                        # continues where it stopped",
    "python -m tests.support.fuzz --show 17                   # the module of one seed",
    "python -m tests.support.run --target onnx --kind a-mode  # the corpus of named traps",
    "```",
    "",
    "A seed decides a module: layers, shapes, modes, frozen parts, hooks, parametrizations, buffers and a loss "
    "(`tests/support/modules.py`). `compared` trains the module and its exported form in torch by edgefl's own comparison. "
    "`state` compares modules whose Python state decides late, or is only logged: its type, place, direction and period are "
    "drawn (`tests/support/states.py`). "
    "`onnx` and `executorch` compile it, run three training steps in the engine, and compare every parameter and moving "
    "buffer with plain torch on the unedited module (`tests/support/oracle.py`, independent of edgefl's comparison).",
    "",
    "| stage | seeds | modules | agree | refused | wrong | raised | undecided |",
    "|---|---|---|---|---|---|---|---|",
)
_FOOT = (
    "",
    "*Refused* is an error of edgefl with advice. *Raised* is any other exception, a crash, or no end within the limit. "
    "*Undecided*: torch draws numbers in a way that the judge cannot repeat, or is not finite.",
    "",
)


def main() -> int:
    """Run all stages; exit code 1 where a module was wrong or raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compared", type=int, default=2000)
    parser.add_argument("--state", type=int, default=400)
    parser.add_argument("--onnx", type=int, default=200)
    parser.add_argument("--executorch", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for one module")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--show", type=int, help="print the module of this seed and end")
    options = parser.parse_args()
    if options.show is not None:
        case = generated(options.show)
        print(case.sample, case.classes, case.loss, case.make(), sep="\n")
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for stage in stages(options):
        run(stage, options.results, options.jobs, options.limit)
    lines = read(options.results)
    options.page.write_text(page(lines))
    print(f"wrote {options.page}")
    return int(any(line["word"] in ("wrong", "raised") for line in lines.values()))


if __name__ == "__main__":
    raise SystemExit(main())
