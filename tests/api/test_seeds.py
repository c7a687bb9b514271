"""A seed that a generator cannot take is refused where it is given, with the same words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import edgefl
from edgefl.cli.commands import app
from edgefl.wire.limits import SEED_MAX, check_seed
from tests.cli.runner import runner
from tests.support.errors import ConfigError, refuses

WORDS = r"seed: expected a number from 0 to 9223372036854775807 \(2\*\*63 - 1\), found"


@pytest.mark.parametrize("seed", [-1, SEED_MAX + 1, 2**64])
@pytest.mark.parametrize(
    "take",
    [
        check_seed,
        lambda seed: edgefl.compile(edgefl.Model("mlp", seed=seed)),
        lambda seed: edgefl.check("mlp", seed=seed),
        lambda seed: edgefl.spread(seed=seed),
        lambda seed: edgefl.personalize("nowhere", seed=seed),
    ],
    ids=["checked", "compile", "check", "spread", "personalize"],
)
def test_entries_refuse_a_seed_out_of_range(take: Callable[[int], object], seed: int) -> None:
    with refuses(ConfigError, seed=seed):
        take(seed)


@pytest.mark.parametrize("command", ["simulate --rounds 1", "run --rounds 1", "data spread"])
def test_commands_refuse_a_seed_out_of_range(command: str) -> None:
    result = runner().invoke(app, [*command.split(), "--seed", str(2**64)])
    assert isinstance(result.exception, ConfigError)
    assert "expected a number from 0 to 9223372036854775807" in str(result.exception)


def test_the_largest_seed_is_taken() -> None:
    assert edgefl.compile(edgefl.Model("mlp", seed=SEED_MAX)).manifest.program == "sgd"
    assert edgefl.spread(seed=SEED_MAX).seed == SEED_MAX
