"""The table of a federation file that puts other bundles on trial with a share of the devices."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from edgefl.config.choices import Activations
from edgefl.config.tables import Table


class CandidateTierTable(Table):
    """What is different for the devices of a tier that try the candidate; what is left out stays as it is."""

    memory_budget: str | None = Field(None, description="another budget of the tier's graphs")
    activations: Activations | None = Field(None, description="another way to keep what waits")

    @model_validator(mode="after")
    def _something(self) -> CandidateTierTable:
        if self.memory_budget is None and self.activations is None:
            raise ValueError("a candidate for a tier differs in something: set memory_budget or activations")
        return self


class RolloutTable(Table):
    """A candidate (`program`, `tiers`) that a share of each tier's devices tries; then all do, or none."""

    share: float = Field(
        0.1, gt=0, lt=1, description="of a tier's devices, rounded up; one at least does not try it"
    )
    rounds: int = Field(5, ge=1, description="rounds of the trial")
    most_loss_increase: float = Field(
        0.05,
        ge=0,
        description="how much higher than that of the others of its tier the candidate's training loss may be, as a share",
    )
    most_failures: float = Field(
        0.1,
        ge=0,
        le=1,
        description="how much larger than that of the others the share of its tasks may be that give no update",
    )
    most_slowdown: float = Field(
        1.5,
        gt=0,
        description="how many times as long as those of the others its local steps may take in a round",
    )
    program: dict[str, Any] = Field(
        default_factory=dict,
        description="keys of the table `program` that the candidate has other values for",
    )
    tiers: dict[str, CandidateTierTable] = Field(
        default_factory=dict,
        description="[rollout.tiers.NAME]: the same for a tier's memory_budget and activations",
    )

    @property
    def on(self) -> bool:
        """Whether there is a candidate."""
        return bool(self.program or self.tiers)
