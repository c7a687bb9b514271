"""Table of a federation file that only `edgefl simulate` reads."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_serializer, field_validator, model_validator

from edgefl.config.tables import ConfigTable


class ClientsTable(ConfigTable):
    """Speed of simulated clients and their links, their spending, and the share that is lost."""

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
    watts: float = Field(
        0, ge=0, description="power that a client draws while it makes local steps, beyond what it draws idle"
    )
    down_joules_per_mb: float = Field(
        0, ge=0, description="energy that its radio spends on a million bytes it receives"
    )
    up_joules_per_mb: float = Field(0, ge=0, description="the same for what it sends")


class SimulationTable(ClientsTable):
    """Settings of `edgefl simulate`; no other command reads them."""

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
    absent: tuple[str, ...] = Field(
        (), description="patterns of clients, like weak-*, that hold their samples and never take part"
    )
    hostile: tuple[str, ...] = Field(
        (), description="patterns of clients, like strong-1*, that send something else than what they trained"
    )
    attack: Literal["flip", "statistics"] = Field(
        "flip",
        description="what these send: flip: their change, turned round; statistics: batch norm's, as bad as they can be",
    )
    strength: float = Field(10, gt=0, description="of attack flip: how many times as long the change is")
    workers: int = Field(
        1,
        ge=1,
        description="processes that clients train in, one core each; 1: none beside the simulation's own",
    )
    ray: str = Field(
        "",
        description='address of a Ray cluster, on which workers are actors; "local": started for the simulation; "": none',
    )
    keep_every: int = Field(
        0, ge=0, description="rounds between models that stay in the folder `models`; 0: the last model alone"
    )
    tensorboard: bool = Field(
        False, description="write TensorBoard's event files too; needs the extra `tracking`"
    )
    mlflow: str = Field(
        "",
        description="URL of an MLflow that is told the rounds too, like http://127.0.0.1:5000; needs the extra `tracking`",
    )
    tiers: dict[str, ClientsTable] = Field(
        default_factory=dict,
        description="[simulation.tiers.NAME]: what is different for the clients of a tier, such as its step_ms",
    )

    @field_validator("mlflow")
    @classmethod
    def _a_url(cls, uri: str) -> str:
        if uri and uri != "databricks" and not urlsplit(uri).scheme:
            raise ValueError("expected a URL such as http://127.0.0.1:5000 or sqlite:///mlflow.db")
        return uri

    @field_validator("mlflow")
    @classmethod
    def _no_password(cls, uri: str) -> str:
        if "@" in urlsplit(uri).netloc:
            raise ValueError(
                "an address without user and password: this file is passed on, MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD are not"
            )
        return uri

    @field_serializer("tiers")
    def _what_they_say(self, tiers: dict[str, ClientsTable]) -> dict[str, dict[str, Any]]:
        """Return the keys that a file sets, without defaults, which are the table's own."""
        return {name: table.model_dump(exclude_unset=True) for name, table in tiers.items()}

    @model_validator(mode="after")
    def _power_for_a_time(self) -> SimulationTable:
        for name in ("", *self.tiers):
            table = self.of_tier(name)
            if table.watts and not table.step_ms:
                where = f"simulation.tiers.{name}" if name else "simulation"
                raise ValueError(
                    f"{where}: watts is the power during local steps, which take no time: set step_ms"
                )
        return self

    def of_tier(self, tier: str) -> ClientsTable:
        """Return the settings of the clients of ``tier``."""
        common = {name: getattr(self, name) for name in ClientsTable.model_fields}
        own = self.tiers.get(tier)
        return ClientsTable(**common | (own.model_dump(exclude_unset=True) if own else {}))
