"""Export of all bundles of a federation to a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, product
from pathlib import Path

from edgefl.api.bundle import Bundle
from edgefl.api.federation import load_federation
from edgefl.api.progress import reporting
from edgefl.config import Federation, without_devices
from edgefl.config.tables import Activations
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.setup.bundles import bundle_of
from edgefl.setup.model import federation_model, process_bytes, samples_like
from edgefl.setup.tiers import completed
from edgefl.setup.training import tiers_of
from edgefl.system.forks import side_by_side
from edgefl.wire.bundle.formats import Outputs, check_outputs
from edgefl.wire.text import suggest
from edgefl_export.capture.graph import start_forked
from edgefl_export.compiler.cache import CompiledBundle, bundle_name
from edgefl_export.compiler.compiler import check_installed
from edgefl_export.compiler.request import Exchange, TierTraining


@dataclass(frozen=True)
class ExportedBundle:
    """One bundle of a federation. ``path`` is its file, or None if it was not written."""

    bundle: Bundle
    path: Path | None = None


@dataclass(frozen=True)
class ExportPlan:
    """Bundles of a federation that will be compiled.

    Attributes:
        federation: The federation, with all defaults filled in.
        dataset: Samples of the shape for which the graphs are made.
        spec: The model, cut into units (stages of the model).
        parts: (tier's training, exchange, format) of each bundle, in order. An exchange is one round trip of an
            algorithm.
    """

    federation: Federation
    dataset: Dataset
    spec: ModelSpec
    parts: tuple[tuple[TierTraining, Exchange, str], ...]

    @property
    def graphs(self) -> int:
        """Number of graphs of all bundles together."""
        return sum(len(tier.prefix) + len(exchange.algorithm.functions) for tier, exchange, _ in self.parts)

    @property
    def process_bytes(self) -> int:
        """Estimated memory in bytes of a process that compiles one of the bundles."""
        return process_bytes(self.spec)

    def bundles(self, report: Callable[[str], None], processes: int) -> Iterator[Bundle]:
        """Compile the bundles in parallel forks of this process, and yield them in the order of ``parts``.

        Args:
            report: Called with a text before each graph.
            processes: Number of bundles that are compiled at the same time.

        Raises:
            ExportError: A graph cannot be made, or disagrees with torch.
        """
        tasks, number = [partial(self._compile, *part) for part in self.parts], count(1)
        results = side_by_side(
            tasks,
            lambda text: report(f"exporting graph {next(number)} of {self.graphs}: {text}"),
            processes=processes,
            begin=start_forked,
        )
        for (tier, exchange, _), found in zip(self.parts, results, strict=True):
            yield Bundle(found.bundle, (tier, exchange), compiled=not found.from_cache)

    def _compile(
        self, tier: TierTraining, exchange: Exchange, form: str, report: Callable[[str], None]
    ) -> CompiledBundle:
        return bundle_of(self.federation, self.dataset, tier, exchange, format=form, progress=report)


def export(
    federation: Federation | str | Path,
    out: str | Path,
    *,
    tiers: Sequence[str] = (),
    formats: Sequence[str] = (),
    outputs: Outputs | None = None,
    memory_budget: str = "",
    activations: Activations | None = None,
    progress: Callable[[str], None] | None = None,
    processes: int = 1,
) -> tuple[ExportedBundle, ...]:
    """Compile the tiers of a federation and write their bundles into the folder ``out``.

    Args:
        federation: objects, or their file. If it does not describe data, the bundles are for samples of the shape
            that the model has by itself.
        out: folder for the bundles, one file for each tier, exchange (round trip between server and device) and
            format.
        tiers: only these; by default all.
        formats: ``onnx``, ``executorch``; by default as the federation says.
        outputs: of ExecuTorch programs, ``caller`` or ``planned``, as :func:`edgefl.compile` takes it; by default
            as the federation says.
        memory_budget: peak of training above the idle process, like ``64MiB`` or ``60%``; by default each tier's
            own.
        activations: type in which values for the backward pass are stored, ``float32`` or ``float16``; by default
            as each tier says.
        progress: called with a text before each graph is made; by default a line in a terminal or a notebook
            shows it.
        processes: number of bundles that are compiled at the same time in forks of this process. If torch cannot
            compute in a fork, which depends on what this process has done before, they are compiled here.

    Returns:
        Each bundle with its file: for each tier, its exchanges in all formats.

    Raises:
        ConfigError: there is no such tier, or the federation cannot be used.
        ExportError: a graph cannot be made, or disagrees with torch.
    """
    what = plan_export(
        federation,
        tiers=tiers,
        formats=formats,
        outputs=outputs,
        memory_budget=memory_budget,
        activations=activations,
    )
    with reporting(progress=progress) as report:
        return tuple(written(bundle, Path(out)) for bundle in what.bundles(report, processes))


def plan_export(
    federation: Federation | str | Path,
    *,
    tiers: Sequence[str] = (),
    formats: Sequence[str] = (),
    outputs: Outputs | None = None,
    memory_budget: str = "",
    activations: Activations | None = None,
    main_only: bool = False,
) -> ExportPlan:
    """Return the bundles of a federation that :meth:`ExportPlan.bundles` will compile. Nothing is compiled yet.

    Args:
        federation: objects, or their file.
        tiers: only these; by default all.
        formats: ``onnx``, ``executorch``; by default as the federation says.
        outputs: owner of the output memory of ExecuTorch programs, ``caller`` or ``planned``.
        memory_budget: peak of training above the idle process, like ``64MiB`` or ``60%``; by default each tier's
            own.
        activations: type in which values for the backward pass are stored, ``float32`` or ``float16``.
        main_only: True: prepare only the main exchange (round trip between server and device) of an algorithm with
            several exchanges in a round.

    Raises:
        ConfigError: there is no such tier, a format is not installed, or the federation cannot be used.
        ModelError: the model cannot be built or cut.
    """
    settings = federation if isinstance(federation, Federation) else load_federation(federation)
    whole = completed(without_devices(settings))
    if unknown := sorted(set(tiers) - set(whole.tiers)):
        close = suggest(unknown[0], whole.tiers)
        raise ConfigError(f"no tier {unknown[0]!r}; there are: {', '.join(whole.tiers)}{close}")
    names = [name for name in whole.tiers if not tiers or name in tiers]
    wanted = {name: tuple(dict.fromkeys(formats)) or settings.formats_of(name) for name in names}
    all_wanted = sorted({each for some in wanted.values() for each in some})
    if outputs:
        check_outputs(outputs, all_wanted)
        whole = whole.model_copy(update={"export": whole.export.model_copy(update={"outputs": outputs})})
    check_installed(all_wanted)
    given = {"memory_budget": memory_budget, "activations": activations}
    if changes := {key: value for key, value in given.items() if value}:
        tables = {name: table.model_copy(update=changes) for name, table in whole.tiers.items()}
        whole = whole.model_copy(update={"tiers": tables})
    dataset = samples_like(settings)
    spec = federation_model(whole, dataset)
    parts = tuple(
        (tier, exchange, form)
        for tier in tiers_of(whole, spec, names).values()
        for exchange, form in product((tier.main,) if main_only else tier.exchanges, wanted[tier.name])
    )
    return ExportPlan(whole, dataset, spec, parts)


def written(bundle: Bundle, folder: Path) -> ExportedBundle:
    """Write a bundle into ``folder``, and return it with its path.

    The file is named after tier, exchange (round trip between server and device) and format.
    """
    manifest = bundle.manifest
    return ExportedBundle(
        bundle, bundle.save(folder / bundle_name(manifest.tier, manifest.exchange, bundle.format))
    )
