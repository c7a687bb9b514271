"""Splitting of a module into units: at the children of an ``nn.Sequential``, at named cuts, or at automatic cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.copies import initialize_lazy, trainable_copy
from edgefl.models.counters import find_moved_buffers, note_counters
from edgefl.models.hooks import (
    drop_backward_hooks,
    has_forward_hooks,
    hooks_by_parameter,
    note_gradient_hooks,
    noting_gradient_hooks,
)
from edgefl.models.inputs import with_one_input
from edgefl.models.losses.catalog import fit_loss
from edgefl.models.losses.lifted import lift_loss
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import ModelLoss
from edgefl.models.modes import has_mode_side_effects, in_mode
from edgefl.models.partition.dataflow import Dataflow, check_not_random, check_same_in_both_modes
from edgefl.models.partition.normalize import path_of, random_nodes, vmap_nodes
from edgefl.models.partition.output import Output, output_only, return_output_only
from edgefl.models.partition.partitioner import Partitioner, is_layer, unit_names
from edgefl.models.partition.tracer import ModuleTracer, TracedGraph
from edgefl.models.source import ModelSource, SplitRequest, unwrap
from edgefl.models.spec import ModelSpec, on_meta, output_spec, run_fake, sequential, without_values
from edgefl.models.tied import share_weights
from edgefl.models.torch_functions.control_flow import disable_expert_dispatch, disable_masking
from edgefl.models.user_code import user_errors

TAIL, WHOLE = "tail", "model"
Cuts = Sequence[str] | Literal["auto"] | None


def split(
    module: nn.Module,
    cuts: Cuts = None,
    *,
    sample: Sequence[int] | TensorSpec | Mapping[str, TensorSpec],
    classes: int,
    units: int | None = None,
    name: str = "custom",
    accounting_batch: int = 32,
    loss: Loss | None = None,
    labels: TensorSpec | None = None,
    output: Output = None,
) -> ModelSpec:
    """Split a module into units that together compute the same.

    Without ``cuts`` the units of an ``nn.Sequential`` are its children. Any other module is cut automatically: where
    one tensor crosses its graph, between the blocks that it repeats, so that each unit has a weight of at least two
    dimensions. Units are named by the submodules that they contain. A module whose own forward draws random numbers,
    except by dropout, stays whole.

    With ``cuts`` the units are named by the cuts, the last one ``tail``. Dots in names become underscores. Inside a
    unit, tensors keep their paths. A unit that is exactly one submodule drops that path, so ``layer2.0.weight`` stays
    ``layer2.0.weight``. Tensors that forward never uses are left out. A weight with several uses is one tensor, of the
    last unit that uses it (:mod:`edgefl.models.tied`).

    Args:
        module: Module. It is copied, not changed.
        cuts: Paths of submodules (``"layer1"``, ``"features.3"``), after each of which exactly one tensor is needed
            later. ``"auto"``: automatic cuts, also for an ``nn.Sequential``.
        sample: Shape of one float32 input without batch dimension, or its shape and dtype, or these of several inputs
            by forward's parameter names.
        classes: Number of classes of a label.
        units: Merge automatic units into at most this many, with balanced weights.
        name: Name of the model.
        accounting_batch: Batch factor of counted activations, see :class:`ModelSpec`.
        loss: One of :mod:`edgefl.losses`. None: cross entropy for an output (classes,), or the only loss that fits the
            output and ``labels``.
        labels: One label of the data.
        output: Key, attribute or position of the output, if forward returns a mapping, a dataclass or a tuple. None:
            ``logits`` if there is one, else the first floating tensor.

    Returns:
        The units, with the information needed to cut and train them.

    Raises:
        ModelError: More than one tensor crosses a cut, or both sides need the same moving statistics (``cut`` and
            ``tensors`` are attributes of the error). Also if the module cannot be traced, or draws random numbers in
            inference (with torch's reason and the line of code).

    Example:
        >>> spec = split(torchvision.models.resnet18(), sample=(3, 224, 224), classes=1000)
        >>> spec.part(0, 2)  # the first two units as a module
    """
    paths = cuts if cuts is None or isinstance(cuts, str) else tuple(cuts)
    spec = sample if isinstance(sample, TensorSpec | Mapping) else TensorSpec(tuple(sample))
    request = SplitRequest(
        paths, spec, classes, units, name, accounting_batch, loss=loss, labels=labels, output=output
    )
    with user_errors(f"torch cannot list the parts of {type(module).__name__}"):
        inner = unwrap(module)
    return _split(inner, request)


def _split(module: nn.Module, request: SplitRequest) -> ModelSpec:
    """Return the units (stages of the model) of a module without wrappers, split as ``request`` says.

    ``module`` is not changed.

    Raises:
        ModelError: The module cannot be copied, traced or cut, or no loss fits.
    """
    # 1. Copy the module. Deep copies lose hooks of parameters, so the copy notes them for the training graphs.
    shaped_module = initialize_lazy(module, request.sample)
    kind = type(module).__name__
    unfit = f"{kind} cannot be copied and set to training; expected a module that deepcopy and train() accept"
    with noting_gradient_hooks(shaped_module), user_errors(unfit):
        copied = trainable_copy(shaped_module)
    hooks = hooks_by_parameter(copied)
    drop_backward_hooks(copied)
    disable_masking(copied)
    disable_expert_dispatch(copied)

    # 2. Reduce it to one input and one output: lift a loss that it computes itself out of its graph, and let other inputs
    # enter by layers. The loss comes first, because it is traced with all inputs and the labels.
    sample, loss, output = request.sample, request.loss, request.output
    if isinstance(loss, ModelLoss):
        loss = lift_loss(copied, sample, output, loss, request.labels)
    if isinstance(sample, Mapping):
        copied, sample = with_one_input(copied, sample), request.first

    # 3. Buffers that a step moves are state, whatever the module registered them as.
    moved = find_moved_buffers(copied, run_fake, sample)
    for name in moved:
        path, _, own = name.rpartition(".")
        copied.get_submodule(path)._non_persistent_buffers_set.discard(own)
    state = copied.state_dict(keep_vars=True)

    # 4. Cut it, and keep each tensor once in the state.
    made = _units(copied, sample, request)
    note_gradient_hooks(made, hooks)
    made = share_weights(made)
    names = {id(tensor): name for name, tensor in made.state_dict(keep_vars=True).items()}
    global_names = {own: names[id(tensor)] for own, tensor in state.items() if id(tensor) in names}
    note_counters(made, [global_names[each] for each in moved if each in global_names])

    # 5. Choose a loss that fits the output, and check that the output has one entry for each class.
    output_sample = output_spec(made, sample)
    loss = fit_loss(loss, output_sample, request.labels, sample)
    spec = ModelSpec(
        request.name,
        made,
        sample,
        request.classes,
        request.accounting_batch,
        loss=loss,
        global_names=global_names,
        source=_SplitSource(shaped_module, request, loss),
    )
    spec._boundaries[len(made)] = output_sample
    check_classes(spec)
    return spec


class _SplitSource(ModelSource):
    """User's module that :func:`split` has cut into units, with the request, so that it can be cut again."""

    def split(self, request: SplitRequest) -> ModelSpec:
        return _split(self.module, request)


def check_classes(spec: ModelSpec) -> None:
    """Check that the model has one output per class.

    Raises:
        ModelError: The loss cannot read the output, or the output has another number of classes than ``spec.classes``.
    """
    label = spec.label
    # Labels that are no numbers of classes choose nothing, whatever their bounds are.
    if not label.dtype.is_floating_point and label.below not in (None, spec.classes):
        out = spec.boundary(len(spec.units)).shape
        raise ModelError(
            f"{spec.name} gives {out} per sample, so {label.below} classes; expected {spec.classes} classes: give it "
            "as many outputs, or the loss that reads them (`edgefl ls losses`)",
            found=out,
            classes=spec.classes,
        )


def _units(module: nn.Module, sample: TensorSpec, request: SplitRequest) -> nn.Sequential:
    """Return the units of ``module``, cut as the request says.

    If automatic cuts fail but the module runs, it is one unit.

    Args:
        module: Copy of the user's module with one input. It may be changed.
        sample: Spec of one sample of the input.
        request: Cuts, largest number of units, and output.

    Raises:
        ModelError: The module cannot be cut.
    """
    cuts, output = request.cuts, request.output
    if request.whole:
        return sequential([(WHOLE, return_output_only(module, output))])
    plain = type(module).forward is nn.Sequential.forward and not has_forward_hooks(module)
    if cuts is None and request.units is None and plain and isinstance(module, nn.Sequential):
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        if children and not _returns_tensor(sequential(children), sample, output):
            name, last = children.pop()
            children.append((name, return_output_only(last, output)))
        return sequential(children)
    if request.units is not None and request.units < 1:
        raise ModelError(f"a model has at least one unit; found units={request.units}", units=request.units)
    if isinstance(cuts, tuple):
        return _split_at(module, sample, cuts, output)
    try:
        with user_errors(f"cannot cut {type(module).__name__}"):
            return _split_automatically(module, sample, request.units, output)
    except ModelError as error:
        if error.details.get("refused") or not _runs_without_values(module, sample, output):
            raise
        return sequential([(WHOLE, return_output_only(module, output))])


def _returns_tensor(module: nn.Sequential, sample: TensorSpec, output: Output) -> bool:
    """Return True if ``module`` returns one tensor for a batch of such samples and ``output`` is None.

    Also return True if the module fails, because a later run reports the error better.
    """
    if output is not None:
        return False
    try:
        bare = on_meta(module).eval()
        with without_values(bare):
            returned = bare(sample.rows(2).zeros().to("meta"))
    except Exception:
        return True
    return isinstance(returned, Tensor)


def _runs_without_values(module: nn.Module, sample: TensorSpec, output: Output) -> bool:
    """Return True if ``module`` runs on tensors without values, in training and in inference mode, and returns the
    output.
    """
    for training in (True, False):
        try:
            with in_mode(module, training=training), output_only(module, output):
                run_fake(module, sample)
        except Exception:
            return False
    return True


def _split_automatically(
    module: nn.Module, sample: TensorSpec, units: int | None, output: Output
) -> nn.Sequential:
    """Return ``module`` as units between automatic cuts, or as one unit if its own forward draws random numbers.

    Args:
        module: Module with one input.
        sample: Spec of one sample of the input.
        units: Largest number of units; None: as many as possible.
        output: Selects the output of the module.

    Raises:
        ModelError: The module cannot be traced or cut.
    """
    # 1. Trace with layers as leaf modules, for a look at all other code.
    sketch = _sketch(module, sample, output)

    # 2. Propose cuts. Code that draws, or calls torch.vmap, may only be in a leaf module of the units.
    random_modules = {path_of(node) for node in random_nodes(sketch.graph)}
    if "" in random_modules:
        return _one_random_unit(module, sample, output)
    vmap_modules = {path_of(node) for node in vmap_nodes(sketch.graph)}
    if "" in vmap_modules:
        raise ModelError("its forward calls torch.vmap")
    partitioner = Partitioner(Dataflow(sketch)).relax(sample)
    opened = partitioner.opened_modules(partitioner.propose()) - random_modules - vmap_modules

    # 3. Trace again with each submodule a leaf that no cut lies in: it remains as its author wrote it.
    try:
        dataflow = _trace_around(module, sample, opened, output)
    except ModelError as error:
        if "operation" not in error.details:
            raise
        # A submodule that draws is no leaf if the code around it changes it or passes more than tensors.
        return _one_random_unit(module, sample, output)
    shared_weights, reread = partitioner.dataflow.shared_weights, partitioner.dataflow.reread_input
    dataflow = replace(dataflow, shared_weights=shared_weights, reread_input=reread)

    # 4. Split there, and name the units by the submodules they hold.
    partitioner = Partitioner(dataflow, partitioner.blocks)
    subgraphs = partitioner.split(partitioner.propose(units))
    names = partitioner.name(subgraphs)
    return sequential((name, each.to_module()) for name, each in zip(names, subgraphs, strict=True))


def _sketch(module: nn.Module, sample: TensorSpec, output: Output) -> TracedGraph:
    """Return a trace of ``module`` in training in which only layers are leaf modules (submodules that a trace does not
    enter), to inspect all other code.

    If possible, its batch size is fixed, which takes half the time.
    """
    layers = {path for path, part in module.named_modules() if is_layer(part)}
    tracer = ModuleTracer(module, sample, layers, output)
    try:
        return tracer.trace(training=True, sketched=True)
    except ModelError as error:
        if error.details.get("refused"):
            raise
        # The error of a trace with a symbolic batch size names the cause better.
        return tracer.trace(training=True)


def _split_at(module: nn.Module, sample: TensorSpec, cuts: tuple[str, ...], output: Output) -> nn.Sequential:
    """Return ``module`` as units (stages of the model) that end after the submodules ``cuts``.

    Raises:
        ModelError: A cut is unknown, named twice or impossible.
    """
    known = {path for path, _ in module.named_modules() if path}
    unknown = [cut for cut in cuts if cut not in known]
    if unknown or len(set(cuts)) != len(cuts):
        problem = f"no submodule {unknown[0]!r}" if unknown else f"a cut is named twice in {cuts}"
        raise ModelError(
            f"cannot cut: {problem}; cuts are paths of submodules", cuts=cuts, known=sorted(known)
        )
    ancestors = {cut[:dot] for cut in cuts for dot, letter in enumerate(cut) if letter == "."}
    dataflow = _trace_around(module, sample, frozenset(ancestors), output)
    partitioner = Partitioner(replace(dataflow, shared_weights=dataflow.shareable_weights), blocks=())
    ordered = partitioner.at(cuts)
    subgraphs = partitioner.split(ordered)
    paths = [cut.path for cut in ordered]
    names = unit_names(paths if len(subgraphs) == len(paths) else [*paths, TAIL])
    return sequential((name, each.to_module()) for name, each in zip(names, subgraphs, strict=True))


def _one_random_unit(module: nn.Module, sample: TensorSpec, output: Output) -> nn.Sequential:
    """Return a module whose own forward draws random numbers in training as one unit.

    Raises:
        ModelError: It also draws in inference.
    """
    leaves = {path for path, _ in module.named_modules()}
    inference = ModuleTracer(module, sample, leaves, output).trace(training=False)
    check_not_random(inference, "in inference; draw in training only, under `if self.training:`")
    return sequential([(WHOLE, return_output_only(module, output))])


def _trace_around(module: nn.Module, sample: TensorSpec, opened: frozenset[str], output: Output) -> Dataflow:
    """Return the dataflow of ``module``, after checking that it is the same in training and inference.

    Args:
        module: Module.
        sample: Spec of one sample of the input.
        opened: Paths of the submodules to trace into. All others become leaf modules, which are called as a whole.
        output: Selects the output of the module.

    Raises:
        ModelError: The module cannot be traced, draws random numbers outside of its leaf modules, or differs between
            the modes.
    """
    remedy = "where a cut opens the code; draw in a submodule, or leave the cuts to edgefl"
    leaves = {path for path, _ in module.named_modules()} - opened
    tracer = ModuleTracer(module, sample, leaves, output)
    training = tracer.trace(training=True)
    check_not_random(training, remedy)
    dataflow = Dataflow(training)
    if dataflow.step_index.get(training.result, -1) < 0:
        raise ModelError(
            f"the output of {type(module).__name__} is not computed from its input", refused=True
        )
    # The second trace is only needed if something can differ.
    if training.reads_mode or has_mode_side_effects(module):
        inference = tracer.trace(training=False)
        check_not_random(inference, remedy)
        check_same_in_both_modes(inference, training)
    return dataflow
