"""Measuring process: ``python -m edgefl_device.profile FOLDER PART --engine onnx`` measures one part of a bundle.

PART is ``round``, or ``graph:NAME``. The result is written to ``--out``; an expected error becomes its exit code.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from edgefl_device.sandbox.confine import Confinement, confine

if TYPE_CHECKING:
    from edgefl_device.profile.measure.round import ProcessResult


def main() -> None:
    wanted = _arguments().parse_args()
    if wanted.confinement:  # before numpy, whose threads would not be
        confine(msgspec.json.decode(wanted.confinement, type=Confinement))
    from edgefl.errors import EdgeflError
    from edgefl.system.processes import end_with_input
    from edgefl_device.host import return_memory_early

    if wanted.with_parent:
        end_with_input()
    return_memory_early()
    try:
        part = _measure(wanted)
    except EdgeflError as error:
        sys.stderr.write(error.message + "\n")
        sys.exit(error.exit_code)
    wanted.out.write_bytes(msgspec.msgpack.encode(part))


def _measure(wanted: argparse.Namespace) -> ProcessResult:
    from edgefl_device.engine import open_engine
    from edgefl_device.profile.measure.folder import BundleFolder
    from edgefl_device.profile.measure.graph import profile_graph
    from edgefl_device.profile.measure.round import GRAPH, ROUND, ProcessResult, profile_round

    start = time.perf_counter()
    engine = open_engine(wanted.engine, wanted.threads)
    open_ms = 1e3 * (time.perf_counter() - start)
    folder, part = (
        BundleFolder(wanted.folder),
        ProcessResult(version=engine.version, open_ms=round(open_ms, 3)),
    )
    if wanted.part == ROUND:
        return msgspec.structs.replace(part, round=profile_round(engine, folder, wanted.samples))
    name = wanted.part.removeprefix(GRAPH)
    return msgspec.structs.replace(
        part, graph=profile_graph(engine, wanted.threads, folder, name, wanted.repeat)
    )


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m edgefl_device.profile", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("part")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--confinement", default="", help="what is left to this process, as JSON")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input does")
    return parser


if __name__ == "__main__":
    main()
