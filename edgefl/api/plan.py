"""Which submodels of a model fit a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from edgefl.api.choices import SGD, TCBGD, Dense, LossLike, codec_choice, loss_of
from edgefl.api.model import DataSource, Model, Sample, dataset, model_spec
from edgefl.codecs import catalog as codecs
from edgefl.contract.choice import CodecChoice, OptimizerChoice, ProgramChoice
from edgefl.contract.program import Program
from edgefl.objective.carrier import Thresholded
from edgefl.optimizers.catalog import NONE
from edgefl.submodels.submodel import Submodel
from exporters.bundle.build import Prefix
from exporters.device import Device
from exporters.fit import plan as fitting
from exporters.front.program import coded_program
from exporters.front.tier import Tier
from exporters.offers import Fit


def plan(
    model: Model,
    device: Device = Device(),
    *,
    loss: LossLike | None = None,
    program: ProgramChoice | Callable[[Submodel], ProgramChoice] | None = None,
    codec: CodecChoice | ProgramChoice | str = Dense(),
    optimizer: OptimizerChoice | None = None,
    kinds: Iterable[str] = (),
    gammas: Sequence[float] = (),
    data: DataSource | None = None,
    sample: Sample | None = None,
    classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    output: str | int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    processes: int = 1,
) -> Fit:
    """Every submodel of a model beside a device: memory, bytes and time of a round with it, and which one to take.

    Args:
        model: as in :func:`edgefl.compile`, with ``data``, ``sample``, ``classes``, ``options`` and ``output``.
        device: what it offers; 0 is unknown.
        loss: what training minimises, as in :func:`edgefl.compile`.
        program: the local training, of all submodels or of each; by default SGD, and TCBGD for submodels of single entries.
        codec: how the update becomes bytes.
        optimizer: the server's.
        kinds: of submodels; by default all.
        gammas: shares of the parameters; by default the paper's.
        progress: is told of each size before it is looked at; a size takes some seconds.
        processes: how many sizes are looked at side by side, forked from this process. Where torch cannot compute there any
            more, which depends on what this process has done before, they are looked at here.

    Raises:
        ModelError: if the model has no submodel at all. That none fits is told by ``recommended()`` of the result.

    >>> fit = edgefl.plan("mlp", edgefl.Device(memory="64MiB"), kinds=["width"], gammas=[0.25, 1.0])
    >>> fit.recommended().kind
    'width'
    """
    spec = model_spec(
        model,
        data=dataset(data),
        sample=sample,
        classes=classes,
        options=options,
        loss=loss_of(loss),
        output=output,
    )
    coding = codec_choice(codec)
    coder = codecs.build(coding.name, **coding.options)
    choice = (lambda _: program) if isinstance(program, ProgramChoice) else program or suited

    def functions(submodel: Submodel, own: ProgramChoice) -> tuple[Program, Sequence[Prefix]]:
        tier = Tier(
            "",
            submodel,
            coded_program(
                submodel,
                own.name,
                own.options,
                coder,
                optimizer=optimizer.name if optimizer else NONE,
                optimizer_options=optimizer.options if optimizer else None,
            ),
        )
        return tier.program, tier.prefix

    return fitting(
        spec,
        device,
        choice,
        functions,
        kinds=kinds,
        gammas=gammas,
        say=progress,
        processes=processes,
    )


def suited(submodel: Submodel) -> ProgramChoice:
    """SGD, or the program that makes use of a submodel's thresholds."""
    return TCBGD() if isinstance(submodel.carrier, Thresholded) else SGD()
