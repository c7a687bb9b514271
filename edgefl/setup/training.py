"""Training of a federation's tiers: algorithm, codec, optimizer, allowed modes of rounds, sizes of updates, candidates."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from edgefl.algorithms.activations import store_activations
from edgefl.codecs import catalog as codecs
from edgefl.comparison.compare import compare
from edgefl.config import Federation, TierTable, parse
from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.server import MEAN
from edgefl.contract.tensors import role_of, select
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, ModelError
from edgefl.facts.combinations import combination_error
from edgefl.models.spec import ModelSpec
from edgefl.setup.model import federation_model, naming_tier, submodel_of
from edgefl.submodels.submodel import Submodel
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import Offer, Round, encode
from edgefl.wire.regions import local_shape, pieces
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import UpdateSize, update_size
from edgefl_export.compiler.algorithm import coded_algorithm, resolve_training, with_shorter
from edgefl_export.compiler.request import TierTraining


def algorithm_of(federation: Federation, submodel: Submodel) -> Algorithm:
    """Return the local training of a submodel with the federation's algorithm and codec, including the encoding of its
    update.

    Raises:
        ConfigError: if algorithm, codec and kind of submodel cannot be combined.
    """
    table, optimizer = federation.algorithm, federation.optimizer
    return coded_algorithm(
        submodel,
        table.name,
        table.arguments,
        codecs.build(federation.codec.name, **federation.codec.options),
        optimizer=optimizer.name,
        optimizer_options=optimizer.options,
    )


def replaced_algorithm(federation: Federation) -> str:
    """Return a warning if the codec replaces the federation's algorithm by a training of its own; "" if not."""
    codec, name = codecs.build(federation.codec.name, **federation.codec.options), federation.algorithm.name
    trained_with, _ = resolve_training(codec, name, {})
    if trained_with == name:
        return ""
    return (
        f"codec {codec.name!r} belongs to a local training of its own: devices train with algorithm "
        f"{trained_with!r} in place "
        f"of {name!r}"
    )


def tier_tables(federation: Federation) -> Mapping[str, TierTable]:
    """Return the tables of the tiers by name. A file without tiers has one, ``strong``, with the whole model."""
    return federation.tiers or {"strong": TierTable()}


def tier_of(federation: Federation, spec: ModelSpec, name: str) -> TierTraining:
    """Return the training of the tier ``name``: its submodel and the algorithm that trains it.

    Raises:
        ConfigError: if model, kind, algorithm and codec cannot be combined.
        ModelError: if the model has no such submodel.
    """
    table = tier_tables(federation)[name]
    submodel = submodel_of(spec, name, table)
    shorter = {
        length: algorithm_of(federation, submodel_of(compare(spec.shortened(length)), name, table))
        for length in federation.data.lengths
    }
    algorithm = with_shorter(algorithm_of(federation, submodel), shorter)
    return TierTraining(name, submodel, store_activations(algorithm, table.activations))


def tiers_of(federation: Federation, spec: ModelSpec, names: Collection[str] = ()) -> dict[str, TierTraining]:
    """Return the training of the tiers ``names`` by name, in the order of the file; of all tiers if ``names`` is empty.

    Raises:
        ConfigError: if model, kind, algorithm and codec cannot be combined.
        ModelError: if the model has no such submodel.
    """
    tables = tier_tables(federation)
    return {name: tier_of(federation, spec, name) for name in tables if not names or name in names}


def why_not(method: Algorithm) -> str:
    """Return the reason why an algorithm cannot run in asynchronous rounds (mode ``buffered``), or "" if it can.

    In these rounds, devices begin from different versions of the model. So an update must be a change of the weights
    that can be added to any version. A device may read nothing of the server but the weights.
    """
    if method.whole:
        return "it needs every device in every round, and no round waits for any"
    if len(method.exchanges) > 1:
        return f"it has {len(method.exchanges)} exchanges in turn, and devices would be in several of them at a time"
    if method.server.unfold is not MEAN.unfold:
        return "the server averages something else than what devices send, which holds for one version of it"
    if (shared := _shared_states(method)) != ():
        return f"devices read the server's {', '.join(shared)} beside the weights, which belongs to one version of them"
    if method.carry_rule.needed or method.carry_rule.exchanges:
        return "what a device keeps is good for the next round only, and versions come and go meanwhile"
    return ""


def check_versions(method: Algorithm) -> None:
    """Check that an algorithm can run in asynchronous rounds.

    Raises:
        ConfigError: it cannot; the message has the reason of :func:`why_not`.
    """
    if why := why_not(method):
        raise combination_error(
            f"algorithm {method.name!r} does not go with round.mode buffered: {why}; choose round.mode synchronous, or "
            "another algorithm",
            algorithm=method.name,
            mode="buffered",
        )


def _shared_states(method: Algorithm) -> tuple[str, ...]:
    """Return the names of the server's states, other than the weights, that the devices' functions read."""
    names = [name for function in method.functions for name in function.inputs if name.startswith("weights.")]
    read = server_state.states_of([name.removeprefix("weights.") for name in names], method.server_state)
    return tuple(name for name in read if name != server_state.WEIGHTS)


def tier_sizes(
    federation: Federation, spec: ModelSpec, submodels: Mapping[str, Submodel]
) -> dict[str, UpdateSize]:
    """Return the size of an update by tier.

    Args:
        federation: the federation.
        spec: its model.
        submodels: submodel by tier.

    Raises:
        ConfigError: if codec, algorithm and kind cannot be combined; the message begins with the tier's name.
    """
    weights = {name: tensor.numpy() for name, tensor in spec.weights.items()}
    shapes = {name: array.shape for name, array in weights.items()}
    trained = {name for name, _ in spec.module.named_parameters(remove_duplicate=False)}
    by_tier = {}
    for tier, submodel in submodels.items():
        with naming_tier(tier):
            algorithm = algorithm_of(federation, submodel)
        placed = submodel.place(weights, 1)
        regions = server_state.regions_of(placed, (server_state.WEIGHTS,), trained, algorithm.private)
        statistics = {
            name
            for name, region in regions.items()
            if not any(part in trained for part, _ in pieces(name, region, shapes))
        }
        local = _sent_shapes(algorithm)
        if local is None:
            local = {name: local_shape(name, region, shapes) for name, region in regions.items()}
        by_tier[tier] = update_size(algorithm.form, local, statistics)
    return by_tier


def _sent_shapes(algorithm: Algorithm) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of an update's tensors by name if they are not exactly the weights, else None."""
    ports = (*algorithm.start.inputs, *algorithm.finish.inputs)
    if algorithm.form.sections or not (
        algorithm.server_state or any(role_of(name) == "carry" for name in ports)
    ):
        return None
    update = select(algorithm.finish(algorithm.finish.example(0)), "update")
    return {name: tuple(tensor.shape) for name, tensor in update.items()}


def update_sizes(federation: Federation, dataset: Dataset) -> dict[str, UpdateSize]:
    """Return the size of an update by tier, for the federation's model fitted to ``dataset``.

    Raises:
        ConfigError: if codec, algorithm and kind cannot be combined.
        ModelError: if the model cannot be built or cut.
    """
    spec = federation_model(federation, dataset)
    return tier_sizes(
        federation, spec, {tier: submodel_of(spec, tier, table) for tier, table in federation.tiers.items()}
    )


_MANIFEST_BYTES = 20_000
_SIGNATURE = bytes(64)
_HEADER_BYTES = 100  # of safetensors, for each tensor


def announcement(federation: Federation, spec: ModelSpec, tiers: Mapping[str, object]) -> tuple[int, int]:
    """Estimate the size of one round's announcement and the number of its messages.

    All weights are counted whole. Algorithm states that tiers get besides the units (stages of the model) are not
    counted.

    Args:
        federation: the federation.
        spec: its model.
        tiers: mapping with the names of the tiers as keys.

    Returns:
        (bytes of the announcement, number of messages that the round publishes at once).
    """
    chunk = federation.wire_limits.chunk_bytes
    halves = federation.downlink.encoding == "float16"
    sizes: dict[str, int] = {}
    for name, tensor in spec.weights.items():
        unit = name.partition(".")[0]
        nbytes = tensor.numel() * tensor.element_size() // (2 if halves else 1)
        sizes[unit] = sizes.get(unit, 0) + nbytes + _HEADER_BYTES
    blobs = {unit: _ref(size, chunk) for unit, size in sizes.items()}
    formats = {name for tier in tiers for name in federation.formats_of(tier)}
    offer = Offer(
        bundles=dict.fromkeys(tiers, _ref(_MANIFEST_BYTES, chunk)),
        signatures=dict.fromkeys(tiers, _SIGNATURE),
    )
    message = Round(
        run="0" * 16,
        round=federation.federation.rounds,
        state="open",
        model_version="0" * 64,
        offers=dict.fromkeys(formats, offer),
        units={unit: (ref,) for unit, ref in blobs.items()},
        hyper={},
        base=0,
        deadline=1e9,
    )
    return len(encode(message)), 1 + sum(ref.count for ref in blobs.values())


def _ref(size: int, chunk: int) -> BlobRef:
    count = max(1, -(-size // chunk))
    return BlobRef(sha256="0" * 64, size=size, chunk=chunk, digests=bytes(32 * count) if count > 1 else b"")


# The weights of a model as a server averages them.


def arrays_of(spec: ModelSpec, *, rounded: bool) -> Arrays:
    """Return the initial weights of the model as arrays by global name.

    Args:
        spec: the model.
        rounded: True if the downlink rounds weights to fewer bits.

    Raises:
        ModelError: if a tensor cannot be averaged or, if ``rounded``, not be rounded; or if its name is not
            allowed.
    """
    for name, tensor in spec.weights.items():
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only floats can be averaged: "
                "register it as a buffer with persistent=False",
                name=name,
                dtype=str(tensor.dtype),
            )
        if rounded and tensor.dtype != torch.float32:
            raise ModelError(
                f"tensor {name} of {spec.name} is {tensor.dtype}, and only float32 can be rounded on its way to devices: "
                "make the model float32, or set downlink.encoding to 'float32'",
                name=name,
                encoding="float32",
            )
        if "~" in name or "/" in name:
            raise ModelError(
                f"tensor {name} of {spec.name} has '~' or '/' in its name, which are reserved in blobs and for the server's "
                "state: rename the module or parameter",
                name=name,
            )
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in spec.weights.items()}


def candidate_of(federation: Federation) -> Federation:
    """Return the federation with the settings of its candidate: those of the table ``rollout``, tried by a part of the
    devices.

    A candidate with another algorithm gets only the options of the rollout table.

    Raises:
        ConfigError: if a key cannot be used; the message names it.
    """
    tables = federation.model_dump(mode="json", exclude_unset=True)
    table = federation.rollout
    tables.pop("rollout", None)
    same = table.algorithm.get("name", federation.algorithm.name) == federation.algorithm.name
    tables["algorithm"] = {**(tables.get("algorithm", {}) if same else {}), **table.algorithm}
    for name, each in table.tiers.items():
        changes = each.model_dump(mode="json", exclude_none=True)
        tables.setdefault("tiers", {})[name] = {**tables.get("tiers", {}).get(name, {}), **changes}
    return parse(tables, source="the candidate of [rollout]")


def candidates_of(
    federation: Federation, spec: ModelSpec, tiers: Mapping[str, TierTraining]
) -> dict[str, TierTraining]:
    """Return the training of the candidate (the settings on trial in the table ``rollout``) by tier; {} without a
    rollout.

    Args:
        federation: the federation.
        spec: its model.
        tiers: training of each tier with the settings in force.

    Raises:
        ConfigError: if the candidate's updates have another form or meaning than those of ``tiers``.
    """
    if not federation.rollout.on:
        return {}
    if not tried_tiers(federation):
        raise ConfigError(
            f"rollout.tiers has {', '.join(federation.rollout.tiers)}, and the only tier is strong: use its name"
        )
    candidates = tiers_of(candidate_of(federation), spec, tried_tiers(federation))
    for name, candidate in candidates.items():
        _check_candidate(name, tiers[name].algorithm, candidate.algorithm)
    return candidates


def tried_tiers(federation: Federation) -> tuple[str, ...]:
    """Return the names of the tiers in which the rollout tries its candidate."""
    table, tiers = federation.rollout, tier_tables(federation)
    return tuple(tiers) if table.algorithm else tuple(name for name in tiers if name in table.tiers)


def _check_candidate(tier: str, algorithm: Algorithm, candidate: Algorithm) -> None:
    """Check that candidate and algorithm need the same computation on the server, which serves both at once.

    Raises:
        ConfigError: if they do not; the text names the tier.
    """
    if algorithm.whole or candidate.whole:
        raise refused(
            tier, "its algorithm needs every device in every round, and a trial compares some with others"
        )
    if len(algorithm.exchanges) != len(candidate.exchanges):
        raise refused(tier, "it has another number of exchanges")
    for ours, theirs in zip(algorithm.exchanges, candidate.exchanges, strict=True):
        if ours.form != theirs.form:
            raise refused(tier, "its updates have another form on the wire, and go into the same sums")
        if ours.server.name != theirs.server.name or dict(ours.server.state) != dict(theirs.server.state):
            raise refused(
                tier,
                f"the server's step is {theirs.server.name} for it, and {ours.server.name} for the others",
            )
        if dict(ours.hyper) != dict(theirs.hyper):
            raise refused(
                tier,
                f"its scalars are {dict(theirs.hyper)}, and a round announces {dict(ours.hyper)} to all: a candidate "
                "differs in what is compiled, such as batch, steps or momentum",
            )


def refused(tier: str, why: str) -> ConfigError:
    """Return the ConfigError for tier ``tier`` in which the candidate cannot be tried. ``why``: the reason."""
    return ConfigError(
        f"the candidate of [rollout] cannot be tried in tier {tier!r}: {why}; change [rollout.algorithm], or begin another "
        "federation with it",
        tier=tier,
    )
