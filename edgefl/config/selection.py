"""Table of a federation file for the devices that rounds may select."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from edgefl.config.tables import Table

Weight = Annotated[float, Field(ge=0, le=1e6)]


class SelectionTable(Table):
    """Selection of devices for a round: which ones, in what conditions, and how many."""

    policy: Literal["uniform", "tiers", "longest-idle"] = Field(
        "uniform",
        description=(
            "whom a round takes of those that it may: uniform draws, tiers draws from each tier by `quotas`, longest-idle "
            "takes those whose last task is the longest ago, and draws among equals"
        ),
    )
    quotas: dict[str, Weight] = Field(
        default_factory=dict,
        description="policy tiers: shares of the tiers, such as strong = 1 and weak = 3; default: equal ones",
    )
    power: Literal["any", "charging"] = Field(
        "any", description="charging: only devices with power that does not run out"
    )
    link: Literal["any", "unmetered"] = Field(
        "any", description="unmetered: only devices whose link costs nothing by the byte"
    )
    thermal: Literal["any", "cool", "warm"] = Field(
        "any",
        description="how hot a device may be: warm leaves out those that are hot, cool those that are warm too",
    )
    unknown: Literal["out", "in"] = Field(
        "out", description="what becomes of a device that does not know what is asked of it"
    )
    measured: bool = Field(
        False,
        description=(
            "in place of round.over_selection: as many more devices as gave no update in the last 8 rounds, by tier; the "
            "first round has round.over_selection"
        ),
    )
    most_over_selection: float = Field(
        3.0, ge=1, le=100, description="most times as many devices as are wanted, however many were lost"
    )
    quorum: float = Field(
        0,
        ge=0,
        lt=1,
        description=(
            "a round opens once there are enough devices to have round.min_reports with this probability, by the share of "
            "tasks that were answered in the last 8 rounds, and takes as many; 0: once there are round.min_reports"
        ),
    )
    patience_s: float = Field(
        120, ge=0, le=1e8, description="seconds that a round waits for that at the longest"
    )

    @model_validator(mode="after")
    def _quotas_of_the_policy(self) -> SelectionTable:
        if self.quotas and self.policy != "tiers":
            raise ValueError(
                f'quotas are for policy "tiers", and policy is "{self.policy}": set it, or leave quotas out'
            )
        if self.quotas and not any(self.quotas.values()):
            raise ValueError("every quota is 0: no device would be selected; give a tier more")
        return self
