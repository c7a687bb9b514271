"""The table of a federation file that `edgefl simulate` reads, and no other command."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgefl.config.tables import Table


class SimulationTable(Table):
    """What `edgefl simulate` adds to a federation; no other command reads it."""

    together: int = Field(
        0,
        ge=0,
        description="clients of a tier that train in one call of each function; 1: one after another; 0: several where "
        "the model is small and has no convolutions",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where clients train; cuda: an NVIDIA GPU")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of products in local steps; weights, losses and sums stay float32"
    )
    step_ms: float = Field(0, ge=0, description="a local step on the median client; 0: no time")
    down_mbit: float = Field(0, ge=0, description="its link to the server, megabits per second; 0: no time")
    up_mbit: float = Field(0, ge=0, description="the same from there")
    spread: float = Field(
        0,
        ge=0,
        description="how unlike in speed clients are: deviation of the logarithm; with 1 one in six is 2.7 times slower",
    )
    dropout: float = Field(
        0,
        ge=0,
        le=1,
        description="share of the selected clients from which no update comes, drawn for each round",
    )
