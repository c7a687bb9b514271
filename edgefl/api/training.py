"""Objects that hold the arguments of a training, and of a bundle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from edgefl.algorithms.catalog import SGD
from edgefl.api.training import codec_choice, loss_choice
from edgefl.codecs.catalog import Dense
from edgefl.config import Federation
from edgefl.config.tables import Activations
from edgefl.contract.choice import AlgorithmChoice, Choice, CodecChoice, OptimizerChoice, chosen
from edgefl.losses import LossLike
from edgefl.models.user_factory import absolute
from edgefl.optimizers.catalog import NONE
from edgefl.wire.bundle.formats import FormatName, Outputs, check_outputs
from edgefl_export.compiler.algorithm import TrainingChoices
from edgefl_export.compiler.compiler import check_installed

Target = FormatName


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training of a model; None selects the default.

    Choices are objects such as ``edgefl.algorithms.FedProx(mu=0.1)``, or their names where the defaults will do.

    Attributes:
        algorithm: The local training; by default SGD.
        codec: How the update becomes bytes; by default float32 weights. FedBAT, which is a training too, takes the place of
            SGD.
        optimizer: The server's; by default what the algorithm says.
        loss: What training minimises: a choice such as ``edgefl.losses.Huber(delta=2.0)``, its name, or a function of your
            own, ``(out, y)`` -> one loss per sample; by default the model's own, or the one that fits its output and the
            labels.

    Raises:
        ConfigError: A choice is none of its catalog.
    """

    algorithm: AlgorithmChoice | str | None = None
    codec: CodecChoice | AlgorithmChoice | str | None = None
    optimizer: OptimizerChoice | str | None = None
    loss: LossLike | None = None

    def __post_init__(self) -> None:
        given: dict[str, Callable[[object], Choice]] = {
            "algorithm": partial(chosen, "algorithm", AlgorithmChoice),
            "codec": codec_choice,
            "optimizer": partial(chosen, "optimizer", OptimizerChoice),
        }
        for name, read in given.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, read(value))

    @property
    def choices(self) -> TrainingChoices:
        """Algorithm, codec and optimizer, with the defaults in place."""
        algorithm = SGD() if self.algorithm is None else self.algorithm
        codec, optimizer = Dense() if self.codec is None else self.codec, self.optimizer
        assert isinstance(algorithm, AlgorithmChoice) and isinstance(codec, CodecChoice)
        assert optimizer is None or isinstance(optimizer, OptimizerChoice)
        return TrainingChoices(algorithm, codec, optimizer)

    @property
    def tables(self) -> dict[str, dict[str, object]]:
        """Tables of a federation file with the given choices.

        Raises:
            ConfigError: another process could not load the loss.
        """
        tables: dict[str, dict[str, object]] = {}
        if self.loss is not None:
            loss = loss_choice(self.loss)
            tables["loss"] = {"name": absolute(loss.name), "options": dict(loss.options)}
        if isinstance(self.algorithm, AlgorithmChoice):
            tables["algorithm"] = {"name": absolute(self.algorithm.name), **self.algorithm.options}
        for name, choice in (("codec", self.codec), ("optimizer", self.optimizer)):
            if isinstance(choice, Choice):
                tables[name] = {"name": choice.name, "options": dict(choice.options)}
        return tables

    @classmethod
    def of(cls, federation: Federation) -> Training:
        """Return what the tables of ``federation`` say. The loss is the model's by then."""
        table, codec, optimizer = federation.algorithm, federation.codec, federation.optimizer
        return cls(
            algorithm=AlgorithmChoice(table.name, table.arguments),
            codec=CodecChoice(codec.name, codec.options),
            optimizer=None if optimizer.name == NONE else OptimizerChoice(optimizer.name, optimizer.options),
        )


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Format, memory budget and forms of a bundle's graphs.

    Attributes:
        target: ``onnx`` for ONNX Runtime, ``executorch`` for ExecuTorch (extra ``executorch``).
        outputs: Of ExecuTorch programs: ``caller``, whoever runs them gives the memory of their outputs; ``planned``, they
            have it themselves, for apps that can only load and execute, as with ExecuTorch's ``Module`` for Android.
        memory_budget: Peak of the training over the idle process, like ``"64MiB"``, ``"60%"`` or bytes: what does not fit
            is recomputed in the backward pass.
        activations: How what a step's forward pass makes waits for its backward pass: ``float16`` takes half the memory,
            and gradients read what rounding has left.
        lengths: Of sequences: shorter ones that there are steps for too, so that a batch of short samples costs less.

    Raises:
        ConfigError: They do not go together, or the extra is not installed.
    """

    target: Target = "onnx"
    outputs: Outputs = "caller"
    memory_budget: str | int = ""
    activations: Activations = "float32"
    lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_outputs(self.outputs, [self.target])
        check_installed([self.target])
