"""Tables of a federation file about rounds: end of a round, selection, aggregation, downlink, server, simulated clients."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_serializer, field_validator, model_validator

from edgefl.config.tables import ConfigTable
from edgefl.errors import ConfigError
from edgefl.wire.mirrors import MOST_MIRRORS, Mirror

_OF_BUFFERED = ("concurrency", "buffer", "max_staleness", "staleness")


class RoundTable(ConfigTable):
    """Start and end of a round, the number of its devices, and the weights of their updates."""

    mode: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description=(
            "synchronous: a round waits for its devices; buffered: devices go on while versions of the model come and go, "
            "one for each `buffer` updates (docs/fleets/asynchronous.md)"
        ),
    )
    concurrency: int = Field(
        0,
        ge=0,
        description="mode buffered: devices at work at a time, whatever `buffer` is; 0: all that are there",
    )
    buffer: int = Field(10, ge=1, description="mode buffered: updates between two versions of the model")
    max_staleness: int = Field(
        20,
        ge=0,
        description="mode buffered: versions that may have come since a device began; a later update is refused",
    )
    staleness: Literal["sqrt", "inverse", "constant", "hinge"] = Field(
        "sqrt",
        description=(
            "mode buffered: what counts of a change s versions late: 1/sqrt(1+s), 1/(1+s), all of it, or all of it up to 4 "
            "versions and 1/(s-3) after that"
        ),
    )
    keep_updates: bool = Field(
        False,
        description="keep the bytes of all updates in the run's folder: `edgefl replay` repeats the run from them",
    )
    min_devices: int = Field(1, ge=1, description="devices that must be known before a round opens")
    min_reports: int = Field(
        1, ge=1, description="accepted updates a round needs; with fewer it changes nothing"
    )
    fraction: float = Field(1.0, gt=0, le=1, description="share of the eligible devices a round aims for")
    over_selection: float = Field(1.0, ge=1, description="factor on that share, against devices that vanish")
    weighting: Literal["uniform", "samples"] = Field(
        "uniform", description="weight of an update in the average"
    )
    count: Literal["holders", "nonzero"] = Field(
        "holders",
        description="whom an entry is averaged over: all updates that hold it, or only those that changed it",
    )
    samples: int = Field(0, ge=0, description="local samples a device may use per round; 0 means all")
    most_samples: int = Field(
        1 << 20,
        ge=1,
        le=1 << 24,
        description="most that an update weighs, with weighting samples: devices' own claims, so keep it close to the truth",
    )
    weight_cap: float = Field(
        4,
        ge=0,
        description=(
            "most that an update weighs, with weighting samples, in multiples of the median of the round's devices, "
            "whatever they claim. 0: no such bound"
        ),
    )
    evaluate_every: int = Field(
        1, ge=0, description="rounds between evaluations of the global model; 0: never"
    )
    rollback_accuracy: float = Field(
        0,
        ge=0,
        lt=1,
        description=(
            "undo a round after which accuracy is more than this below the best round so far, such as 0.2; each round then "
            "waits for its evaluation. 0: never"
        ),
    )
    rollback_loss: float = Field(
        0,
        ge=0,
        description=(
            "the same where the loss is more than so many times the lowest so far, such as 3; with either, a loss that is "
            "not finite undoes a round, too. 0: never"
        ),
    )
    absent: Literal["wait", "refuse", "partial"] = Field(
        "wait",
        description=(
            "where an algorithm needs every device and one is missing: wait tries again, as the next round, when "
            "it is back; "
            "refuse ends the run; partial goes on with the others"
        ),
    )
    lr_decay_at: tuple[float, ...] = Field(
        (), description="fractions of training after which lr is divided by 10"
    )

    @model_validator(mode="after")
    def _each_round_is_judged(self) -> RoundTable:
        if (self.rollback_accuracy or self.rollback_loss) and self.evaluate_every != 1:
            raise ValueError(
                f"a round is undone for its evaluation, and evaluate_every is {self.evaluate_every}: set it to 1, or leave "
                "rollback_accuracy and rollback_loss out"
            )
        if 0 < self.rollback_loss <= 1:
            raise ValueError(
                f"rollback_loss is {self.rollback_loss:g}, a multiple of the lowest loss: choose one above 1, such as 3"
            )
        return self

    @model_validator(mode="after")
    def _of_its_mode(self) -> RoundTable:
        waits, goes_on = ("min_reports", "fraction", "over_selection", "absent"), _OF_BUFFERED
        useless = goes_on if self.mode == "synchronous" else waits
        fields = type(self).model_fields
        named = [name for name in useless if getattr(self, name) != fields[name].default]
        if named:
            other = "buffered" if self.mode == "synchronous" else "synchronous"
            raise ValueError(
                f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} of mode {other}, and mode is {self.mode}: leave "
                f"{'it' if len(named) == 1 else 'them'} out, or choose the other mode"
            )
        return self


class EvaluateTable(ConfigTable):
    """Evaluation of the model on rows that the devices hold out and never train on."""

    split: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of each device's rows that is held out, such as 0.2, by a hash of the row; 0: none",
    )
    every: int = Field(
        0,
        ge=0,
        description=(
            "training rounds between two evaluation rounds, such as 5; one follows the last training round, too. 0: none "
            "but those of `edgefl evaluate`"
        ),
    )
    devices: int = Field(
        0, ge=0, description="devices of an evaluation round, drawn anew for each; 0: all that are there"
    )
    least_group: int = Field(
        1,
        ge=1,
        description=(
            "results of fewer devices than this are not shown, by tier and over all. It limits what is reported, not what "
            "the server receives"
        ),
    )

    @model_validator(mode="after")
    def _something_to_evaluate_on(self) -> EvaluateTable:
        if not self.split and (self.every or self.devices):
            raise ValueError("devices evaluate on rows that they hold out, and split is 0: set split = 0.2")
        return self


class AggregateTable(ConfigTable):
    """Rule by which the server combines the updates of a round into one change of the model."""

    rule: Literal["mean", "median", "trimmed_mean", "multi_krum"] = Field(
        "mean",
        description=(
            "of each entry, over the devices that hold it; multi_krum leaves out whole updates, and all but mean keep every "
            "update in memory, and count each once, whatever round.weighting is"
        ),
    )
    trim: float = Field(
        0.1,
        ge=0,
        lt=0.5,
        description=(
            "share of the values that trimmed_mean leaves out at either end, or of a tier's updates that multi_krum takes "
            "to be bad, rounded down: 0.1 is none, and protects from none, where fewer than 10 devices hold an entry; 0.34 "
            "is one from 3 devices on (multi_krum: from 5 on)"
        ),
    )
    clip_norm: float = Field(
        0,
        ge=0,
        description=(
            "largest L2 norm of an update's change; a longer one is scaled down, and what is not trained becomes the median "
            "of the updates. 0: none, as no number fits all models (docs/security/poisoning.md)"
        ),
    )
    clip_statistics: float = Field(
        3,
        ge=0,
        description=(
            "how far an update may move what is not trained, such as the statistics of batch norm, in multiples of what it "
            "is; what goes further counts as far as that. 0: anywhere, but no variance below 0"
        ),
    )
    threads: int = Field(0, ge=0, description="threads that add updates up; 0: one per core")

    @model_validator(mode="after")
    def _trims_something(self) -> AggregateTable:
        if self.rule in ("trimmed_mean", "multi_krum") and not self.trim:
            raise ValueError(f'{self.rule} with trim 0 leaves out nothing; set trim = 0.34, or rule = "mean"')
        return self


class DownlinkTable(ConfigTable):
    """Transport of weights from the server to the devices."""

    encoding: Literal["float32", "float16", "int8"] = Field(
        "float32", description="float16: half the bytes; int8: changes since the last round, a quarter"
    )
    keyframe_every: int = Field(
        10, ge=1, description="rounds from one whole model in float32 to the next, for encoding int8"
    )
    compression: Literal["zstd", "none"] = Field("zstd", description="of blobs that it makes 3 % smaller")
    mirrors: tuple[str, ...] = Field(
        (),
        max_length=MOST_MIRRORS,
        description="URLs where devices find what the server publishes, before they ask the broker (docs/fleets/mirrors.md)",
    )
    mirrors_only: bool = Field(
        False, description="nothing but messages goes through the broker: it cannot carry the model"
    )
    mirror_folder: str = Field(
        "",
        description="folder that the server writes it to, for `edgefl mirror`; default: mirror, in the server's own, where "
        "there are mirrors",
    )

    @field_validator("mirrors")
    @classmethod
    def _urls(cls, mirrors: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(str(Mirror.parse(text)) for text in mirrors)
        except ConfigError as error:
            raise ValueError(error.message) from error

    @model_validator(mode="after")
    def _there_is_a_way(self) -> DownlinkTable:
        if self.mirrors_only and not self.mirrors:
            raise ValueError("mirrors_only needs mirrors: name one, or leave it out")
        return self


Weight = Annotated[float, Field(ge=0, le=1e6)]


class SelectionTable(ConfigTable):
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


class ServerTable(ConfigTable):
    """Processes of the server that receive updates: itself, or workers, which do not change the trained weights."""

    workers: int = Field(
        0,
        ge=0,
        le=64,
        description=(
            "processes that take the updates of a part of the devices each; 0 or 1: the server does. The model has the same "
            "bits with any number"
        ),
    )
    ray: str = Field(
        "",
        description='address of a Ray cluster, on which workers are actors; "local": started for the server; "": processes',
    )
    updates: str = Field(
        "",
        description=(
            "where the bytes of the open round's updates go, below the federation's name: a folder, or an fsspec URL such "
            "as s3://bucket/run; default: a folder of the run. Workers on several machines need one that all of them reach"
        ),
    )

    @field_validator("updates")
    @classmethod
    def _no_password(cls, place: str) -> str:
        if "@" in urlsplit(place).netloc:
            raise ValueError(
                "a place without user and password: this file is passed on; give these by the environment of fsspec's "
                "file system, such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return place


class ClientsTable(ConfigTable):
    """Speed and energy of simulated clients and of their network links, and the share of clients that fail."""

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
    tiers: dict[str, ClientsTable] = Field(
        default_factory=dict,
        description="[simulation.tiers.NAME]: what is different for the clients of a tier, such as its step_ms",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_trackers(cls, table: Any) -> Any:
        """Drop the keys of the table ``tracking`` where they are off. Folders of earlier versions have them here."""
        if not isinstance(table, dict):
            return table
        return {key: value for key, value in table.items() if value or key not in ("tensorboard", "mlflow")}

    @field_serializer("tiers")
    def _keep_set_keys(self, tiers: dict[str, ClientsTable]) -> dict[str, dict[str, Any]]:
        """Return the keys that a file sets for each tier; omitted keys have the values of the table itself."""
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
        """Return the settings of the clients of ``tier``: those of ``[simulation]``, replaced by the tier's own where
        these are set.
        """
        common = {name: getattr(self, name) for name in ClientsTable.model_fields}
        own = self.tiers.get(tier)
        return ClientsTable(**common | (own.model_dump(exclude_unset=True) if own else {}))
