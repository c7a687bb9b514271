"""From a federation file to what is simulated: the run spec that a server has, and the functions in place of bundles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgefl.config import Federation
from edgefl.data.dataset import Dataset
from edgefl.setup.bundles import outline_of
from edgefl.simulator.functions import Functions
from edgefl.wire.bundle.archive import Bundle
from edgefl_export.front.tier import Exchange, Tier
from edgefl_server.compose import composed
from edgefl_server.coordinator.roster import share
from edgefl_server.events import Event
from edgefl_server.run_spec import RunSpec


@dataclass(frozen=True)
class Plan:
    """``functions`` by tier and number of the exchange (:meth:`~edgefl_server.run_spec.RunSpec.index`)."""

    spec: RunSpec
    functions: dict[tuple[str, int], Functions]

    @classmethod
    def of(
        cls,
        federation: Federation,
        dataset: Dataset,
        *,
        emit: Callable[[Event], None] = lambda _: None,
        progress: Callable[[str], None] = lambda _: None,
        device: str = "auto",
    ) -> Plan:
        """Of ``federation``, evaluated on ``dataset``. Raises what :func:`edgefl_server.compose.compose` does."""
        made: dict[str, dict[str, Functions]] = {}

        def outline(tier: Tier, exchange: Exchange, _format: str) -> Bundle:
            own = made.setdefault(exchange.name, {})
            if tier.name not in own:  # the same functions in every format
                bundle = outline_of(federation, dataset, tier, exchange, progress=progress)
                own[tier.name] = Functions.of(
                    tier, exchange, bundle, _wanted(federation, tier.name), federation.simulation
                )
            return own[tier.name].bundle

        spec = composed(federation, dataset, outline, emit=emit, device=device)
        functions = {
            (tier, index): each for index, own in enumerate(made.values()) for tier, each in own.items()
        }
        return cls(spec, functions)


def _wanted(federation: Federation, tier: str) -> int:
    """Clients of the tier that a round aims for, where all tiers are chosen from alike."""
    return share(federation.round.fraction, federation.tiers[tier].count)
