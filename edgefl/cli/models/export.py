"""``edgefl export``: write the bundles that devices download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from edgefl.api.progress import reporting
from edgefl.cli.options import (
    ActivationsOption,
    EngineChoice,
    ModelName,
    ModelOptions,
    OutputsMode,
    parse_memory_budget,
    writable_folder,
)
from edgefl.cli.output import errors, print_json, print_table
from edgefl.errors import ConfigError
from edgefl.system.forks import processes_for
from edgefl.system.memory import uncollected_objects
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.api.export import ExportedBundle
    from edgefl.api.training import Target
    from edgefl.config.tables import Activations as ActivationsName
    from edgefl.wire.bundle.formats import Outputs as OutputsName


def export(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML)")] = None,
    out: Annotated[Path, typer.Option(callback=writable_folder, help="folder for the bundles")] = Path(
        "bundles"
    ),
    model: ModelName = None,
    option: ModelOptions = None,
    tier: Annotated[list[str] | None, typer.Option(help="only this tier; may be repeated")] = None,
    format: Annotated[
        list[EngineChoice] | None,
        typer.Option(help="of the bundles; may be repeated; default: as the file says, or onnx"),
    ] = None,
    outputs: Annotated[
        OutputsMode | None,
        typer.Option(
            help="of ExecuTorch programs: in the caller's memory, or in that which the program planned"
        ),
    ] = None,
    memory_budget: Annotated[
        str, typer.Option(help="peak of a device in training over its idle process, like 64MiB or 60%")
    ] = "",
    activations: Annotated[
        ActivationsOption | None,
        typer.Option(help="how values wait for the backward pass: float16 takes half the memory"),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(help="device file: export only the submodel that `edgefl plan` recommends for it"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON list")] = False,
) -> None:
    """Export each tier's bundle.

    A bundle holds the tier's graphs, compiled with the training algorithm, and their manifest.

    Every graph is run once in the runtime of its format and compared with torch before its bundle is written. Samples have
    the shape of the federation's data; where it has none, that which the model has by itself.

    Examples:

      edgefl export --model resnet20 --out bundles

      edgefl export federation.toml --tier weak --out bundles --json

      edgefl export --model mine.py:make --option classes=5 --option 'sample_shape=[3,20,20]'

    Formats:

      edgefl export --model resnet20 --format onnx --format executorch      (two bundles per tier; extra `executorch`)

      edgefl export --model resnet20 --format executorch --outputs planned      (for Android's Module: load and execute only)

    Less memory:

      edgefl export --model resnet20 --memory-budget 64MiB      (recompute in the backward pass: less memory, more time)

      edgefl export --model resnet20 --activations float16      (half the bytes wait for the backward pass)

    For a device:

      edgefl export --model resnet18 --fit phone.toml      (what `edgefl plan --device-file` recommends, as tier phone)
    """

    from edgefl.cli.models.plan import read_device
    from edgefl.config.reading import check_names, check_tiers
    from edgefl.setup.federation_options import FederationOptions
    from edgefl.setup.torch_start import without_dynamo
    from edgefl.wire.bundle.formats import check_outputs
    from edgefl_device.host import return_memory_late

    named = FederationOptions(model=model, model_options=option or ()).settings
    forms = tuple(dict.fromkeys(each.value for each in format or ()))
    parse_memory_budget(memory_budget)
    federation = check_names(config, named)  # torch, which all that follows loads, takes seconds
    check_tiers(federation, tier or ())
    if outputs:
        wanted = tier or federation.tiers or ("",)
        check_outputs(
            outputs.value, forms or [form for name in wanted for form in federation.formats_of(name)]
        )
    if fit is not None:
        if tier:
            raise ConfigError(
                f"--fit chooses the submodel for a device: leave out --tier {tier[0]}, or --fit"
            )
        read_device(fit)
    return_memory_late()
    with uncollected_objects():
        without_dynamo()
        from edgefl.api.export import plan_export, written
        from edgefl.api.federation import load_federation

        form: OutputsName | None = None if outputs is None else outputs.value
        kept: ActivationsName | None = None if activations is None else activations.value
        if fit is None:
            what = plan_export(
                load_federation(config, named),
                tiers=tier or (),
                formats=forms,
                outputs=form,
                memory_budget=memory_budget,
                activations=kept,
            )
    if fit is not None:
        _export_fitting(config, out, named, forms or ("onnx",), form, memory_budget, kept, fit, as_json)
        return
    with reporting(total=what.graphs) as report:
        bundles = what.bundles(report, processes_for(what.process_bytes))
        rows = [_facts(written(bundle, out)) for bundle in bundles]
    _print_cache_summary(rows)
    rows = [{key: value for key, value in row.items() if key in _columns_to_show(rows)} for row in rows]
    if as_json:
        print_json(rows)
    else:
        print_table(
            f"{what.federation.model.name}, samples like {what.dataset.name}",
            [row | {"bytes": size(row["bytes"])} for row in rows],
        )


def _facts(exported: ExportedBundle) -> dict[str, Any]:
    """Return the table row of a written bundle, by column."""
    path, manifest = exported.path, exported.bundle.manifest
    assert path is not None
    return {
        "tier": manifest.tier,
        "exchange": manifest.exchange or "main",
        "format": exported.bundle.format,
        "file": str(path),
        "bytes": path.stat().st_size,
        "digest": exported.bundle.digest,
        "compiled": exported.bundle.compiled,
    }


def _columns_to_show(rows: list[dict[str, Any]]) -> set[str]:
    """Return the columns to show: those that differ between rows, and those that are always shown."""
    always = {"tier", "file", "bytes", "digest", "compiled"}
    return always | {key for key in ("exchange", "format") if len({row[key] for row in rows}) > 1}


def _print_cache_summary(rows: list[dict[str, Any]]) -> None:
    from edgefl_export.compiler.cache import BundleCache, cache_summary

    compiled, cache = sum(row["compiled"] for row in rows), BundleCache.of_user()
    text = cache_summary(
        compiled=compiled, reused=len(rows) - compiled, folder=cache.folder, nbytes=cache.nbytes
    )
    errors.print(text)


def _export_fitting(
    config: Path | None,
    out: Path,
    named: dict[str, object],
    forms: Sequence[str],
    outputs: OutputsName | None,
    memory_budget: str,
    activations: ActivationsName | None,
    file: Path,
    as_json: bool,
) -> None:
    """Export the submodel that is recommended for the device in ``file``, one bundle for each format in ``forms``.

    The tier has the name of the file without its suffix.
    """
    from edgefl.api.compile import compile
    from edgefl.api.export import written
    from edgefl.api.federation import load_federation
    from edgefl.api.training import CompileOptions, Training
    from edgefl.cli.models.plan import fit_submodels, overrides, read_device, with_fitting_algorithm
    from edgefl.config import without_devices
    from edgefl.contract.choice import SubmodelChoice
    from edgefl.setup.model import model_with_samples
    from edgefl.submodels.catalog import SubmodelSize
    from edgefl.wire.mqtt.topics import checked_name
    from edgefl_export.compiler.compiler import check_installed

    check_installed(forms)
    name, wishes = checked_name("tier", file.stem), read_device(file)
    federation = without_devices(load_federation(config, {**named, **overrides(wishes)}))
    spec, dataset = model_with_samples(federation)
    with reporting() as tell:
        made = fit_submodels(federation, spec, wishes, tell)
        best = made.recommended()
        training = Training.of(
            with_fitting_algorithm(federation, SubmodelSize(best.kind, best.options).of(spec))
        )
        rows = []
        for form in forms:
            bundle = compile(
                spec,
                submodel=SubmodelChoice(best.kind, best.options),
                training=training,
                data=dataset,
                tier=name,
                options=CompileOptions(
                    target=cast("Target", form),
                    outputs=(outputs or federation.export.outputs) if form == "executorch" else "caller",
                    memory_budget=memory_budget,
                    activations=activations or "float32",
                ),
                progress=tell,
            )
            rows.append(_facts(written(bundle, out)))
    _print_cache_summary(rows)
    rows = [{key: value for key, value in row.items() if key in _columns_to_show(rows)} for row in rows]
    errors.print(f"chosen: {made.reason()}")
    facts = {
        "kind": best.kind,
        "options": best.options,
        "algorithm": bundle.manifest.program,
        "memory_bytes": best.memory_bytes,
        "reason": made.reason(),
    }
    if as_json:
        print_json([row | facts for row in rows])
    else:
        shown = {"kind": best.kind, "size": best.size, "memory": size(best.memory_bytes)}
        print_table(
            f"{federation.model.name}, samples like {dataset.name}",
            [{key: value for key, value in row.items() if key != "bytes"} | shown for row in rows],
        )
