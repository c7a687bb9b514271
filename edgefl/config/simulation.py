"""The table of a federation file that `edgefl simulate` reads, and no other command."""

from __future__ import annotations

from pydantic import Field

from edgefl.config.tables import Table


class SimulationTable(Table):
    """What `edgefl simulate` adds to a federation; no other command reads it."""

    together: int = Field(
        1, ge=1, description="clients of a tier that train in one call of each function; 1: one after another"
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
    absent: tuple[str, ...] = Field(
        (), description="patterns of clients, like weak-*, that hold their samples and never take part"
    )
