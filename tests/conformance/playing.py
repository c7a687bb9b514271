"""Agents for the kit: our own, and those with a planted fault."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from edgefl_conformance.campaign import Campaign
from edgefl_conformance.results import CaseResult
from tests.conformance.faults import FAULTS

OURS = (sys.executable, "-m", "edgefl", "device", "--no-tune")
ONLY_EXECUTORCH = ("trust.loads_unsigned_bundles",)


def wrong(fault: str) -> tuple[str, ...]:
    """The command of the agent with this fault."""
    return (sys.executable, "-m", "tests.conformance.wrong", fault, "device", "--no-tune")


def engine_of(fault: str) -> str:
    """What it is tried with."""
    return "executorch" if fault in ONLY_EXECUTORCH else "onnx"


def verdicts(
    command: Sequence[str], only: Sequence[str], engine: str = "onnx", jobs: int = 3, patience: float = 1.0
) -> dict[str, CaseResult]:
    """What the kit says of an agent, by case. A busy machine asks for patience where what should not come has to come."""
    campaign = Campaign(command=command, engine=engine, only=tuple(only), jobs=jobs, patience=patience)
    return {verdict.name: verdict for verdict in campaign.run()}


def of_faults(faults: Sequence[str], jobs: int = 3) -> Mapping[str, CaseResult]:
    """For each fault, what the case that is to name it says."""
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(
            lambda fault: verdicts(wrong(fault), [FAULTS[fault]], engine_of(fault), 1, 2.0), faults
        )
        return {fault: each[FAULTS[fault]] for fault, each in zip(faults, found, strict=True)}
