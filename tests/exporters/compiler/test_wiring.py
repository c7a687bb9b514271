"""What a graph reads where no device feeds it, and what else a bundle may say that its algorithm does not."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from edgefl.contract.algorithm import Algorithm, CarryRule, Phase
from edgefl.errors import ExportError
from edgefl.submodels.cost import TRAINING, RoundCost
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import Graph, Manifest, PhaseSpec, Port
from edgefl_export.compiler.manifest import check_wiring
from edgefl_export.compiler.request import CompileRequest
from edgefl_export.compiler.verify import verify_bundle
from edgefl_export.fit import round_work
from tests.device_runtime import tiny
from tests.exporters.compiler.test_exchanges import ADAPT, ALGORITHM, SWEEP, SWEEPING, build
from tests.support.bundles import request_of


@pytest.fixture(scope="module")
def listed() -> Manifest:
    return build(replace(SWEEPING, personalize=ADAPT)).manifest


def also_reading(manifest: Manifest, function: str, port: str) -> Manifest:
    def more(graph: Graph) -> Graph:
        new = Port(name=port, role=port.partition(".")[0], dtype="float32", shape=(4,))  # type: ignore[arg-type]
        return (
            msgspec.structs.replace(graph, inputs=(*graph.inputs, new)) if graph.name == function else graph
        )

    return msgspec.structs.replace(manifest, graphs=tuple(map(more, manifest.graphs)))


@pytest.mark.parametrize(
    ("function", "port", "told"),
    [
        (
            "start",
            "state.w",
            r"to start: it may read weights\.\*, carry\.\*, .* and noise\.\*; read it in a step",
        ),
        ("start", "batch.0.x", "to start"),
        (
            "train",
            "weights.w",
            r"to a step: .* batch\.<k>\.x and batch\.<k>\.y; return it from start as state",
        ),
        ("train", "carry.w", "to a step"),
        ("train", "batch.0.mask", "to a step: "),
        ("sweep", "weights.w", "to a step over the data"),
        ("finish", "batch.0.x", r"to finish: .*; return what it needs from a step as state\.\*"),
        (
            "evaluate",
            "hyper.lr",
            r"to evaluate: it may read weights\.\*, batch\.0\.x, .*batch\.0\.mask; evaluate by",
        ),
        ("evaluate", "state.w", "to evaluate"),
        ("evaluate", "carry.w", "to evaluate"),
        ("evaluate", "noise.drop", "to evaluate"),
        ("evaluate", "batch.1.x", "to evaluate"),
        ("adapt", "carry.w", r"to personalize: .*; make the step from weights and batch\.0 alone"),
        ("adapt", "batch.1.x", "to personalize"),
        ("adapt", "batch.0.mask", "to personalize"),
    ],
)
def test_a_port_that_nobody_feeds_is_refused(listed: Manifest, function: str, port: str, told: str) -> None:
    check_wiring(listed)

    with pytest.raises(
        ExportError, match=f"function '{function}' reads '{port}', which no device feeds {told}"
    ) as e:
        check_wiring(also_reading(listed, function, port))
    assert (e.value.details["function"], e.value.details["port"]) == (function, port)


@pytest.mark.parametrize(
    ("function", "port"),
    [
        ("start", "noise.dither"),
        ("finish", "carry.w"),
        ("train", "batch.7.x"),
        ("train", "data.class_counts"),
        ("adapt", "noise.drop"),
        ("adapt", "data.class_counts"),
        ("evaluate", "batch.0.mask"),
    ],
)
def test_what_a_device_does_feed_may_be_read(listed: Manifest, function: str, port: str) -> None:
    check_wiring(also_reading(listed, function, port))


# -- the bundle beside its algorithm ------------------------------------------------------------------------------


def problems(manifest: Manifest, request: CompileRequest) -> list[str]:
    bare = msgspec.structs.replace(manifest, graphs=())
    told = verify_bundle(Bundle(bare, {}), request).problems
    return [each for each in told if not each.startswith("graphs:")]


@pytest.fixture(scope="module")
def whole() -> tuple[Manifest, CompileRequest]:
    algorithm = replace(
        SWEEPING, personalize=ADAPT, draws="draw", carry_rule=CarryRule(exchanges=2, needed=True)
    )
    return build(algorithm).manifest, request_of(algorithm, ("head", "m/head"), data=tiny.DATA)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exchange": "opening"}, "exchange: opening in the bundle,  expected"),
        ({"personalize": ""}, "personalize:  in the bundle, adapt expected"),
        ({"draws": "walk"}, "draws: walk in the bundle, draw expected"),
        ({"carry_exchanges": 0}, "carry is good for exchanges (0: all): 0 in the bundle, 2 expected"),
        ({"carry_needed": False}, "carry is needed: False in the bundle, True expected"),
    ],
)
def test_what_a_device_would_do_otherwise_than_the_algorithm_says_is_told(
    whole: tuple[Manifest, CompileRequest], changes: dict[str, object], problem: str
) -> None:
    manifest, request = whole

    assert problems(manifest, request) == []
    assert problems(msgspec.structs.replace(manifest, **changes), request) == [problem]


def test_a_phase_that_no_longer_passes_over_the_data_is_told(whole: tuple[Manifest, CompileRequest]) -> None:
    manifest, request = whole
    first, *others = manifest.phases
    stepped = PhaseSpec(name=first.name, graph=first.graph, steps=first.steps)

    (told,) = problems(msgspec.structs.replace(manifest, phases=(stepped, *others)), request)

    assert (
        told.startswith("phases: [('all', 'sweep', 1)") and "('all', 'sweep', 'once over the data')" in told
    )


# -- what a round of it is worth --------------------------------------------------------------------------------

COST = RoundCost(parameters=1, macs=100, kept_macs=100, prefix_macs=7, download_bytes=1, upload_bytes=1)


def passing(steps: int) -> Algorithm:
    """5 steps of 4 rows, and a pass in batches of 3 that is declared to have ``steps``."""
    return replace(ALGORITHM, phases=(Phase("all", SWEEP, steps, over_data=True), *ALGORITHM.phases))


def test_steps_count_by_their_batch() -> None:
    assert round_work(ALGORITHM, COST, 50) == TRAINING * 100 * 5 * 4 + 7 * 50
    assert round_work(ALGORITHM, COST) == TRAINING * 100 * 20 + 7 * 20


@pytest.mark.parametrize("steps", [0, 1, 9])
def test_a_pass_counts_every_row_once_in_whole_batches(steps: int) -> None:
    assert round_work(passing(steps), COST, 50) == TRAINING * 100 * (20 + 51) + 7 * 50
    assert round_work(passing(steps), COST) == TRAINING * 100 * (20 + 21) + 7 * 20


def test_a_pass_without_known_rows_is_one_batch() -> None:
    alone = replace(ALGORITHM, phases=passing(1).phases[:1])
    assert round_work(alone, COST) == TRAINING * 100 * 3
    assert round_work(alone, COST, 7) == TRAINING * 100 * 9 + 7 * 7
