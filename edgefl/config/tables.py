"""Tables of a federation file, each key with its default and meaning."""

from __future__ import annotations

from dataclasses import fields
from importlib.util import find_spec
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

import msgspec
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from edgefl.errors import ConfigError
from edgefl.system.distribution import install
from edgefl.system.sizes import parse_budget
from edgefl.wire.bundle.formats import FormatName, Outputs
from edgefl.wire.bundle.readers import Reader, find_problem
from edgefl.wire.limits import check_seed
from edgefl.wire.mqtt.address import Address, ClientIds, Version, read_secret
from edgefl.wire.mqtt.topics import checked_name

DatasetName = Literal[
    "auto",
    "fashion_mnist",
    "mnist",
    "cifar10",
    "cifar10_jpeg",
    "digits",
    "random",
    "imdb",
    "ag_news",
    "wikitext2",
    "shakespeare",
    "file",
]
PartitionName = Literal[
    "auto",
    "dirichlet",
    "iid",
    "labels",
    "owners",
    "groups",
    "shards",
    "similarity",
    "dirichlet_equal",
    "dirichlet_clients",
    "paired",
]
Activations = Literal["float32", "float16"]
"""How what a forward pass makes waits for the backward pass."""


BATCH, STEPS = 32, 10
"""Of the algorithms that edgefl brings, in a federation that says nothing else."""


class ConfigTable(BaseModel):
    """Base class of the tables of a federation file: unknown keys are refused, values cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class FederationTable(ConfigTable):
    """Name, length and seed of the training."""

    name: str = Field("demo", description="name of the federation; part of every MQTT topic")
    rounds: int = Field(10, ge=1, description="rounds to train")
    seed: int = Field(0, ge=0, description="decides initial weights, partition, batches and noise")

    @field_validator("name")
    @classmethod
    def _usable_in_topics(cls, name: str) -> str:
        try:
            return checked_name("federation", name)
        except ConfigError as error:
            raise ValueError(error.message) from error

    @field_validator("seed")
    @classmethod
    def _in_range(cls, seed: int) -> int:
        try:
            return check_seed(seed)
        except ConfigError as error:
            raise ValueError(error.message) from error


class ModelTable(ConfigTable):
    """The model that is trained, with the options of its factory."""

    name: str = Field("resnet8", description="a model of `edgefl ls models`, or file.py:factory")
    bn: Literal["global", "static"] = Field("global", description="batch norm mode, for models that have it")
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the model's factory"
    )
    output: str | int | None = Field(
        None,
        description="which of the things that a model of your own returns is its output: a key, an attribute or a "
        "position; default: `logits`, or else the first tensor of floats",
    )


class LossTable(ConfigTable):
    """The loss that training minimises."""

    name: str = Field(
        "",
        description=(
            "a loss of `edgefl ls losses`, or file.py:function of your own, (out, y) -> one loss per sample; default: the "
            "model's own, or the one that fits its output and the labels"
        ),
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the loss")

    @model_validator(mode="after")
    def _options_of_something(self) -> LossTable:
        if self.options and not self.name:
            raise ValueError("options belong to a loss: set name, or leave them out")
        return self


class AlgorithmTable(ConfigTable):
    """The algorithm of the devices and its options by name (`edgefl ls algorithms NAME` lists them)."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        "sgd",
        description="an algorithm of `edgefl ls algorithms`, package.module:factory, or path/to/file.py:factory",
    )
    batch: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="samples per local step; default: 32, and what an algorithm of yours says",
    )
    steps: int | None = Field(
        None, ge=1, description="local steps per round; default: 10, and what an algorithm of yours says"
    )
    lr: float | None = Field(None, gt=0, description="learning rate; default: the algorithm's own")
    momentum: float | None = Field(
        None, ge=0, lt=1, description="momentum of the local optimizer; default: the algorithm's own"
    )
    weight_decay: float | None = Field(
        None, ge=0, description="L2 coefficient on conv and dense kernels; default: the algorithm's own"
    )
    personal: float | None = Field(
        None,
        ge=0,
        description="step size of a graph that adapts the model to one user; default: no such graph",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, table: Any) -> Any:
        """Return the table with the options batch and steps, if they are missing, set to the defaults of all shipped
        algorithms.

        The table of a user's own algorithm (``place:factory``) is returned unchanged, because it has its own defaults.
        """
        if not isinstance(table, dict) or ":" in str(table.get("name", "")):
            return table
        given = {key: value for key, value in table.items() if value is not None}
        return {"batch": BATCH, "steps": STEPS} | given

    @property
    def arguments(self) -> dict[str, Any]:
        """The options that are set, as keyword arguments of the algorithm's factory; ``name`` is left out."""
        return self.model_dump(exclude={"name"}, exclude_none=True)


class OptimizerTable(ConfigTable):
    """Step of the server on the mean of the updates, for an algorithm without a server step of its own."""

    name: str = Field(
        "none", description="an optimizer of `edgefl ls optimizers`; none: the mean is the new model"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="options of the optimizer")


class DataTable(ConfigTable):
    """Data of the simulated devices and of the server's evaluation."""

    name: DatasetName = Field(
        "auto",
        description="auto: Fashion-MNIST where its files are found, else scikit-learn's digits; cifar10_jpeg: CIFAR-10 in "
        "JPEG of quality 75; file: your own, see `file`",
    )
    task: Literal["auto", "class", "next"] = Field(
        "auto", description="of texts: their class, or the next token; auto: the class where they have one"
    )
    tokens: Literal["auto", "words", "bytes"] = Field(
        "auto", description="of texts: words need the extra `text`; auto: bytes of plays, words of all others"
    )
    length: int = Field(64, ge=1, description="of texts: tokens of a sample; what is shorter is padded")
    lengths: tuple[int, ...] = Field(
        (),
        description="of texts: shorter lengths that there are graphs for too, so that short samples cost less",
    )
    vocabulary: int = Field(8192, ge=3, description="of texts in words: so many, the most frequent ones")
    mask: bool = Field(
        False, description="of texts: samples have an attention_mask too, 1 where a token is no padding"
    )
    file: str = Field(
        "",
        description="for name file: .npz with train_x, train_y, test_x, test_y, as edgefl.data.Dataset takes them; a server "
        "whose devices have their own samples (see `devices_dir` too) needs the last two alone; .csv or .jsonl, a record "
        "in each line, a fifth of them for tests; or a folder of photos with one sub-folder for each class",
    )
    size: int = Field(
        64, ge=1, le=4096, description="of photos in a folder: pixels of a side, to which they are stretched"
    )
    label: str = Field(
        "", description="of a .csv or .jsonl without a reader: the column of the class; default: label"
    )
    reader: dict[str, Any] = Field(
        default_factory=dict,
        description="how a device's own files become samples: kind (image, table, series, sound, text) and its keys",
    )
    devices_dir: str = Field(
        "",
        description="folder of what the devices of `edgefl run` hold, each under its name: strong-0, a folder, or "
        "strong-0.csv; default: the dataset's training samples are spread",
    )
    dir: str = Field("", description="folder with the dataset's standard files; default: EDGEFL_DATA")
    download: bool = Field(False, description="fetch the dataset when no folder has it")
    scale: Literal["standard", "unit"] = Field(
        "standard",
        description="of pixels: mean 0 and deviation 1 over the dataset, or as they are, in [0, 1]",
    )
    partition: PartitionName = Field(
        "auto",
        description=(
            "how samples are spread over devices; auto: dirichlet where samples have a class, else owners, else iid; "
            "labels: a few labels to each; shards: pieces of the rows sorted by label; owners: whole authors, "
            "speakers or documents; groups: Per-FedAvg's ten groups; "
            "similarity, dirichlet_equal, paired: FAFED's low, medium and high, in equal sizes; dirichlet_clients: a mix of "
            "classes for each device, in equal sizes"
        ),
    )
    alpha: float = Field(
        1.0, gt=0, description="concentration of the dirichlet partitions; smaller is more skewed"
    )
    labels_per_device: int = Field(3, ge=1, description="labels that a device holds, for partition labels")
    shards_per_device: int = Field(2, ge=1, description="pieces of sorted rows, for partition shards")
    similarity: float = Field(
        95.0, ge=0, le=100, description="percent of the samples dealt alike, for partition similarity"
    )
    group_samples: int = Field(
        0,
        ge=0,
        multiple_of=2,
        description="a of partition groups: samples of each class that a device of five holds; 0: the most there can be",
    )
    group_test_samples: int = Field(
        0, ge=0, multiple_of=2, description="the same for test samples, where each device has its own"
    )
    single_class: bool = Field(
        False, description="partition groups: the other half of the devices has one class instead of two"
    )
    train_samples: int = Field(0, ge=0, description="training samples to use over all devices; 0 means all")
    test_samples: int = Field(2000, ge=0, description="test samples the server evaluates on; 0 means all")
    validation: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the training samples, such as 0.1, that no device gets and that takes the place of the test "
        "samples, to choose settings with; the same samples for every seed; 0: none",
    )

    @field_validator("reader", mode="before")
    @classmethod
    def _a_reader(cls, given: Any) -> Any:
        try:
            table = msgspec.to_builtins(given)
            problem = find_problem(msgspec.convert(table, Reader)) if table else ""
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"no such reader: {error}") from error
        if problem:
            raise ValueError(problem)
        return table

    @property
    def way_to_read(self) -> Reader | None:
        """The key ``reader`` as settings that turn a device's files into samples; None if the key is not set.

        Reading this property raises no error, because the table was validated when it was loaded.
        """
        return msgspec.convert(self.reader, Reader) if self.reader else None

    @model_validator(mode="after")
    def _file_and_name(self) -> DataTable:
        if (self.name == "file") != bool(self.file):
            raise ValueError(
                'name "file" and the key file go together: set both, or leave file out'
                if self.file
                else 'name is "file": set the key file to the .npz or .csv with your data'
            )
        if self.validation and self.devices_dir:
            raise ValueError(
                "validation takes samples from those that are spread over the devices, but devices_dir has their own: "
                "leave one of them out"
            )
        if self.label and (self.reader or not self.file.lower().endswith((".csv", ".jsonl"))):
            raise ValueError(
                "label names a column of a .csv or .jsonl without a reader: "
                + ("set it in the reader" if self.reader else "leave it out, or set file to such a file")
            )
        return self


class TierTable(ConfigTable):
    """A class of devices of equal capacity, and the submodel that they train."""

    kind: str = Field("output_side", description="a kind of `edgefl ls kinds`; how the model is cut")
    gamma: float | None = Field(
        None, gt=0, le=1, description="share of the parameters, for all kinds but output_side; default 1"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="other options of the kind")
    cut: int = Field(0, ge=0, description="units frozen at the input side; 0 trains the whole model")
    chunks: int | tuple[tuple[str, ...], ...] = Field(
        1, description="downloads in which the frozen prefix arrives, or their unit names as lists"
    )
    devices: tuple[str, ...] = Field((), description="patterns of device names that belong here, like weak-*")
    memory_bytes: int = Field(0, ge=0, description="memory a device must report to be given this tier")
    memory_budget: str = Field(
        "",
        description="peak of a device in training over its idle process, like 64MiB or 60%: trades time for it",
    )
    activations: Activations = Field(
        "float32", description="how values wait for the backward pass: float16 rounds them, to half the bytes"
    )
    count: int = Field(0, ge=0, description="device processes that `edgefl run` starts in this tier")
    engine: FormatName = Field(
        "onnx",
        description="onnx or executorch: what these processes run graphs with, in whose format the tier is exported",
    )

    @property
    def submodel(self) -> dict[str, Any]:
        """Options of the tier's kind, as keyword arguments of ``edgefl.submodels.catalog.build``.

        They are ``cut`` and ``chunks`` (only of kind ``output_side``), ``gamma`` if it is set, and ``options``.
        """
        cut_options: dict[str, Any] = (
            {"cut": self.cut, "chunks": self.chunks} if self.kind == "output_side" else {}
        )
        return cut_options | ({} if self.gamma is None else {"gamma": self.gamma}) | self.options

    @model_validator(mode="after")
    def _no_cut_of_another_kind(self) -> TierTable:
        if self.kind != "output_side" and (self.cut or self.chunks != 1):
            raise ValueError(f"cut and chunks belong to kind output_side, not to {self.kind}; remove them")
        return self

    @field_validator("devices", mode="before")
    @classmethod
    def _names_and_not_how_many(cls, given: object) -> object:
        if isinstance(given, int | str):
            raise ValueError(
                'a list of names or patterns, like ["weak-*"]; how many devices there are is `count`'
            )
        return given

    @field_validator("memory_budget")
    @classmethod
    def _a_size_or_a_share(cls, text: str) -> str:
        if text:
            parse_budget(text)
        return text


class ExportTable(ConfigTable):
    """Formats of the bundles that devices download, and the memory of their graphs' outputs."""

    formats: tuple[FormatName, ...] = Field(
        (),
        description=(
            "of every tier's bundles, onnx and executorch: a device takes the one that its engine runs; default: that of "
            "the tier's engine"
        ),
    )
    outputs: Outputs = Field(
        "caller",
        description=(
            "of ExecuTorch programs: caller, whoever runs them gives the memory of their outputs; planned, they have it "
            "themselves, for apps that can only load and execute (Android's Module)"
        ),
    )


class CodecTable(ConfigTable):
    """Encoding of an update as bytes."""

    name: str = Field("dense", description="a codec of `edgefl ls codecs`")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the codec")


class TrackingTable(ConfigTable):
    """Trackers that get the rounds and files of a run or simulation; they do not change the trained weights."""

    tensorboard: bool = Field(
        False, description="write TensorBoard's event files into the folder; needs the extra `tracking`"
    )
    mlflow: str = Field(
        "",
        description="URL of an MLflow server that gets the rounds, like http://127.0.0.1:5000; needs the extra `tracking`",
    )

    @field_validator("mlflow")
    @classmethod
    def _check_url(cls, uri: str) -> str:
        if uri and uri != "databricks" and not ("://" in uri and urlsplit(uri).scheme):
            raise ValueError("expected a URL such as http://127.0.0.1:5000 or sqlite:///mlflow.db")
        keys = {key.lower() for key in parse_qs(urlsplit(uri).query, keep_blank_values=True)}
        if "@" in urlsplit(uri).netloc or keys & {"user", "username", "password", "token"}:
            raise ValueError(
                "an address without user and password: this file is passed on, MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD are not"
            )
        return uri

    def check_packages(self) -> None:
        """Raise ConfigError if a package that the table requires is not installed."""
        for is_asked, key, package in (
            (self.tensorboard, "tracking.tensorboard", "tensorboardX"),
            (bool(self.mlflow), "tracking.mlflow", "mlflow"),
        ):
            if is_asked and find_spec(package) is None:
                raise ConfigError(
                    f"{key} needs {package}, which is not installed: {install('tracking')}", key=key
                )


BrokerProfileName = Literal["none", "aws"]


class BrokerTable(ConfigTable):
    """The MQTT broker and its address."""

    kind: Literal["amqtt", "mosquitto", "external"] = Field("amqtt", description="what `edgefl run` starts")
    host: str = Field("127.0.0.1", description="address of the broker")
    port: int = Field(0, ge=0, le=65535, description="port; 0 lets `edgefl run` pick a free one")
    username: str = Field("", description="user name, if the broker asks for one")
    password: str = Field("", description="password; better in password_file, or in EDGEFL_BROKER_PASSWORD")
    password_file: str = Field("", description="file whose first line is the password")
    insecure_password: bool = Field(False, description="the password may travel without TLS")
    tls: bool = Field(
        False, description="TLS, with a broker whose certificate the system's authorities signed"
    )
    ca_file: str = Field("", description="certificate of the broker's authority (PEM); switches TLS on")
    cert_file: str = Field("", description="client certificate (PEM), for mutual TLS")
    key_file: str = Field("", description="its key (PEM, without a password)")
    alpn: str = Field("", description="name of the protocol in TLS, for a port 443 that serves several")
    path: str = Field("", description="path of MQTT over WebSocket, like /mqtt")
    mqtt: Version = Field("auto", description="version; auto: 5 where the broker has it, else 3.1.1")
    client_ids: ClientIds = Field(
        "short",
        description="short: 23 letters that nobody can guess; full: readable, for a broker that binds them to users",
    )
    profile: BrokerProfileName = Field(
        "none", description="limits to keep to: those of a hosted broker (aws), or none"
    )

    def address(self, port: int = 0) -> Address:
        """Return the broker's address with its login and TLS settings.

        Reads the password from ``password_file`` if that is set.

        Args:
            port: port to use if the table has none (0); 1883 if this is 0, too.

        Raises:
            BrokerError: the password file cannot be read.
        """
        return Address(
            self.host.removeprefix("[").removesuffix("]"),
            self.port or port or 1883,
            self.username,
            read_secret(self.password_file) if self.password_file else self.password,
            **{name: getattr(self, name) for name in REACHED_BY},
        )


_OWNED = ("host", "port", "username", "password")
REACHED_BY = tuple(
    each.name for each in fields(Address) if each.name in BrokerTable.model_fields.keys() - set(_OWNED)
)
"""Keys of ``[broker]`` that are fields of an address under the same name."""
