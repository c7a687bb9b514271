"""The candidate of a rollout: from a federation file to bundles whose updates go into the same sums, or why they cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from edgefl.config import Federation, parse
from edgefl.contract.program import Program
from edgefl.models.spec import ModelSpec
from edgefl.setup.training import tier_tables, tiers_of
from edgefl.wire.errors import ConfigError
from exporters.front.tier import Exchange, Tier
from server.coordinator.rollout import Rollout
from server.coordinator.tier_names import CANDIDATE
from server.run_spec import ExchangeSpec, TierSpec

Compile = Callable[[Tier, Exchange], TierSpec]
"""An exchange of the candidate of a tier, compiled."""


def rollout_of(federation: Federation) -> Rollout | None:
    """How the candidate is tried; None where the file has none."""
    table = federation.rollout
    if not table.on:
        return None
    return Rollout(
        seed=federation.federation.seed,
        tiers=_tried(federation),
        share=table.share,
        rounds=table.rounds,
        most_loss_increase=table.most_loss_increase,
        most_failures=table.most_failures,
        most_slowdown=table.most_slowdown,
    )


def candidate_of(federation: Federation) -> Federation:
    """The federation as it would be with the candidate in place; a program of another name has its own options only.

    ConfigError names a key that cannot be used."""
    tables = federation.model_dump(mode="json", exclude_unset=True)
    table = federation.rollout
    tables.pop("rollout", None)
    same = table.program.get("name", federation.program.name) == federation.program.name
    tables["program"] = {**(tables.get("program", {}) if same else {}), **table.program}
    for name, each in table.tiers.items():
        changes = each.model_dump(mode="json", exclude_none=True)
        tables.setdefault("tiers", {})[name] = {**tables.get("tiers", {}).get(name, {}), **changes}
    return parse(tables, source="the candidate of [rollout]")


def candidates_of(federation: Federation, spec: ModelSpec, tiers: Mapping[str, Tier]) -> dict[str, Tier]:
    """The candidate of each tier that has one; none without a rollout. ConfigError if its updates would be others than
    those of ``tiers``, or mean something else."""
    if not federation.rollout.on:
        return {}
    candidates = tiers_of(candidate_of(federation), spec, _tried(federation))
    for name, candidate in candidates.items():
        _check(name, tiers[name].program, candidate.program)
    return candidates


def with_candidates(
    exchanges: Sequence[ExchangeSpec], candidates: Mapping[str, Tier], compile_candidate: Compile
) -> list[ExchangeSpec]:
    """The exchanges, in which tasks may be of a tier's candidate, too."""
    whole = []
    for index, exchange in enumerate(exchanges):
        own = {}
        for name, tier in candidates.items():
            own[name + CANDIDATE] = compile_candidate(tier, tier.exchanges[index])
            _check_alike(name, exchange.tiers[name], own[name + CANDIDATE])
        whole.append(replace(exchange, tiers={**exchange.tiers, **own}))
    return whole


def _tried(federation: Federation) -> tuple[str, ...]:
    """The tiers that have a candidate."""
    table, tiers = federation.rollout, tier_tables(federation)
    return tuple(tiers) if table.program else tuple(name for name in tiers if name in table.tiers)


def _check(tier: str, program: Program, candidate: Program) -> None:
    """What the server makes of the updates is one thing for all of them, and so is what it announces."""
    if program.whole or candidate.whole:
        raise _refused(
            tier, "its program needs every device in every round, and a trial compares some with others"
        )
    if len(program.exchanges) != len(candidate.exchanges):
        raise _refused(tier, "it has another number of exchanges")
    for ours, theirs in zip(program.exchanges, candidate.exchanges, strict=True):
        if ours.form != theirs.form:
            raise _refused(tier, "its updates have another form on the wire, and go into the same sums")
        if ours.server.name != theirs.server.name or dict(ours.server.state) != dict(theirs.server.state):
            raise _refused(
                tier,
                f"the server's step is {theirs.server.name} for it, and {ours.server.name} for the others",
            )
        if dict(ours.hyper) != dict(theirs.hyper):
            raise _refused(
                tier,
                f"its scalars are {dict(theirs.hyper)}, and a round announces {dict(ours.hyper)} to all: a candidate "
                "differs in what is compiled, such as batch, steps or momentum",
            )


def _check_alike(tier: str, ours: TierSpec, theirs: TierSpec) -> None:
    if (ours.sends, ours.reads) != (theirs.sends, theirs.reads):
        raise _refused(tier, "it sends or reads another part of the server's state")
    if ours.bundle.manifest.suffix != theirs.bundle.manifest.suffix:
        raise _refused(tier, "it trains other parts of the model")
    if ours.bundle.manifest.carry_needed or theirs.bundle.manifest.carry_needed:
        raise _refused(
            tier, "devices need what they kept of the round before, and those of a trial have none"
        )


def _refused(tier: str, why: str) -> ConfigError:
    return ConfigError(
        f"the candidate of [rollout] cannot be tried in tier {tier!r}: {why}; change [rollout.program], or begin another "
        "federation with it",
        tier=tier,
    )
