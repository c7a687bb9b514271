"""Independent judge of compiled training.

:func:`judge` trains a user's unedited module by plain torch autograd, then runs the training graph of
``edgefl.compile`` in the device's engine on the same batches, and compares every parameter and moving buffer. It uses
nothing of edgefl's own comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

import edgefl
from edgefl.errors import EdgeflError
from tests.support.case import Batch, Case, Outcome, batches
from tests.support.device import Device
from tests.support.draws import Draws, Undecided

OF_UPDATE = 2e-3
OF_MODEL = 1e-6
# Of the largest update of all tensors: a bias before a batch norm moves by rounding alone.
OF_UPDATES = 1e-5
# The same, where float64 says that the gradient is zero.
OF_ZERO = 1e-4
# Above this relative error torch's own rounding is too large for a verdict.
ILL_CONDITIONED = 0.02
# Names by which wrappers, which may be nested, hold the module inside.
WRAPPERS = ("_orig_mod.", "module.")
Feeds = list[tuple[Batch, Tensor]]


@dataclass(frozen=True)
class Trained:
    """Tensors of a module before and after its training, by name. ``draws``: torch's generator was used."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    draws: bool = False


def train_torch(
    case: Case, feeds: Feeds, lr: float, draws: Draws | None = None, dtype: torch.dtype = torch.float32
) -> Trained:
    """Train the unedited module by hand-written SGD."""
    module = case.make()
    if dtype != torch.float32:
        widen(module, dtype)
    if not module.training:
        module.train()
    before = named_tensors(module)
    generator = torch.get_rng_state()
    for step, (inputs, y) in enumerate(feeds):
        for each in module.parameters():
            each.grad = None
        rows = {
            name: each.to(dtype) if each.is_floating_point() else each.clone()
            for name, each in inputs.items()
        }
        with draws.step(module, step) if draws else Draws.none():
            out = module(rows["x"]) if not isinstance(case.sample, Mapping) else module(**rows)
            out = case.output(out) if case.output else out
            loss = case.loss_fn(out, y.to(dtype) if y.is_floating_point() else y)
            loss.backward()
        with torch.no_grad():
            for each in module.parameters():
                if each.grad is not None and each.requires_grad:
                    each.sub_(lr * each.grad)
    return Trained(before, named_tensors(module), not torch.equal(generator, torch.get_rng_state()))


def widen(module: nn.Module, dtype: torch.dtype) -> None:
    """Hold float32 parameters and buffers in ``dtype``. Tensors in one memory stay in one."""
    tensors = [*module.parameters(), *module.buffers()]
    narrow = [(each, each.untyped_storage()) for each in tensors if each.dtype == torch.float32]
    wide: dict[int, Tensor] = {}
    for each, storage in narrow:
        if storage.data_ptr() not in wide:
            wide[storage.data_ptr()] = torch.empty(0).set_(storage).to(dtype)
        each.data = wide[storage.data_ptr()].as_strided(each.shape, each.stride(), each.storage_offset())


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters and persistent buffers by name, once for each name."""
    return {
        name: each.detach().clone()
        for name, each in module.state_dict(keep_vars=True).items()
        if isinstance(each, Tensor)
    }


def judge(case: Case, target: str = "onnx", steps: int = 3, batch: int = 6, lr: float = 0.1) -> Outcome:
    """Train ``case`` in torch and in the engine of ``target``, and compare."""
    feeds = batches(case, steps, batch)
    device = _compiled(case, feeds, target, batch, lr)
    if isinstance(device, Outcome):
        return device
    draws = Draws(device.noise) if device.noise else None
    try:
        torch_side = train_torch(case, feeds, lr, draws)
    except Undecided as error:
        return Outcome("undecided", str(error))
    if not all(torch.isfinite(each).all() for each in torch_side.after.values() if each.is_floating_point()):
        return Outcome("undecided", "torch itself is not finite on these inputs")
    outcome = _compared(case, feeds, lr, torch_side, device, draws)
    if outcome.word == "wrong" and draws is None and torch_side.draws:
        return replace(outcome, message=f"{outcome.message} (torch draws, the device does not)".strip())
    return outcome


def _compiled(case: Case, feeds: Feeds, target: str, batch: int, lr: float) -> Device | Outcome:
    """Return the device after its training, or the verdict where there is none."""
    user = case.make()
    modes = {name: each.training for name, each in user.named_modules()}
    before = _all_tensors(user)
    try:
        bundle = edgefl.compile(
            edgefl.Model(user, sample=case.sample, classes=case.classes),
            training=edgefl.Training(
                loss=case.loss,
                algorithm=edgefl.algorithms.SGD(
                    batch=batch, steps=len(feeds), lr=lr, momentum=0.0, weight_decay=0.0
                ),
            ),
            options=edgefl.CompileOptions(target=target),
        )
        device = Device(bundle, target)
        device.train(feeds, lr)
    except EdgeflError as error:
        return Outcome("refused", error.message)
    except Exception as error:
        return Outcome("raised", f"{type(error).__name__}: {error}")
    touched = _touched(user, modes, before)
    if touched:
        return Outcome("wrong", "compile changed the user's module", touched, float("inf"))
    return device


def _all_tensors(module: nn.Module) -> dict[str, Tensor]:
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {name: each.detach().clone() for name, each in (*module.named_parameters(), *buffers.items())}


def _touched(user: nn.Module, modes: Mapping[str, bool], before: Mapping[str, Tensor]) -> str:
    """Return the name of a tensor or mode of the user's module that compile has changed."""
    after = _all_tensors(user)
    for name, each in before.items():
        if name not in after or not torch.equal(each.nan_to_num(), after[name].nan_to_num()):
            return name
    for name, part in user.named_modules():
        if name in modes and modes[name] != part.training:
            return f"{name or 'module'}.training"
    return ""


def _compared(
    case: Case, feeds: Feeds, lr: float, left: Trained, right: Device, draws: Draws | None
) -> Outcome:
    largest = max((float(each.abs().max()) for each in left.before.values() if _counts(each)), default=1.0)
    updates = {
        name: _largest(_real(each).double() - _real(left.before[name]).double())
        for name, each in left.after.items()
    }
    floor = OF_MODEL * largest + OF_UPDATES * max(updates.values(), default=0.0)
    worst, where = 0.0, ""
    exact: Trained | None = None
    for name, after in left.after.items():
        before = left.before[name]
        update = updates[name]
        known = partner(name, before, right)
        if known is None:
            # Integer buffers nobody reads may stay outside; those that forward reads show in the weights.
            if update > OF_MODEL * largest and (after.is_floating_point() or after.is_complex()):
                return Outcome("wrong", "moves in torch, missing on the device", name, float("inf"))
            continue
        found = torch.from_numpy(np.asarray(right.after[known]))
        if not _same(before, torch.from_numpy(np.asarray(right.before[known]))):
            return Outcome("wrong", "starts with another value on the device", name, float("inf"))
        distance = _largest(_real(found).double() - _real(after).double().reshape(_real(found).shape))
        if distance <= OF_UPDATE * update + floor:
            continue
        exact = exact or _in_float64(case, feeds, lr, draws)
        error = distance / max(update, largest * 1e-3)
        rounding = _rounding(name, after, exact)
        if rounding > 0.0 and _largest(exact.after[name] - before) <= 1e-3 * rounding:
            rounding = max(rounding, OF_ZERO * max(updates.values()))
        if distance <= 2 * rounding:
            if error > ILL_CONDITIONED:
                return Outcome("undecided", f"float32 and float64 disagree in torch itself: {name}")
        elif not error <= worst:
            worst, where = error, name
    return Outcome("wrong", "", where, worst) if where else Outcome("agrees")


def _in_float64(case: Case, feeds: Feeds, lr: float, draws: Draws | None) -> Trained:
    """Train in double precision; empty where the module cannot: its code names float32."""
    try:
        return train_torch(case, feeds, lr, copy.copy(draws), torch.float64)
    except Exception:
        return Trained({}, {})


def _rounding(name: str, after: Tensor, exact: Trained) -> float:
    """Return how far torch's float32 is from its float64; 0 where that is not known."""
    other = exact.after.get(name)
    return 0.0 if other is None or other.shape != after.shape else _largest(other.double() - after.double())


def _real(each: Tensor) -> Tensor:
    return torch.view_as_real(each) if each.is_complex() else each


def _counts(each: Tensor) -> bool:
    return each.numel() > 0 and each.is_floating_point()


def _largest(each: Tensor) -> float:
    """Return the largest magnitude; infinity where there is a NaN."""
    if each.numel() == 0:
        return 0.0
    found = float(each.abs().max())
    return found if found == found else float("inf")  # noqa: PLR0124


def _same(left: Tensor, right: Tensor) -> bool:
    left = _real(left)
    if left.numel() != right.numel():
        return False
    return torch.allclose(
        left.reshape(right.shape).double(), right.double(), rtol=1e-5, atol=1e-7, equal_nan=True
    )


def partner(name: str, value: Tensor, right: Device) -> str | None:
    """Return the device's name of the tensor ``name`` of the user's module, or None if it has none.

    Asks the table of names first, then takes a tensor of the same shape and initial values whose name ends alike: wrappers
    such as DataParallel and pruning have names of their own. An integer counter needs the same ending. A tensor that the
    table gives to another name is none of these: the model may not use ``name`` at all.
    """
    taken = set(right.names.values())
    bare = name
    while True:
        found = right.names.get(bare, bare)
        if found in right.before and right.before[found].size == _real(value).numel():
            return found
        if not bare.startswith(WRAPPERS):
            break
        bare = bare.partition(".")[2]
    alike = [
        other
        for other, array in right.before.items()
        if other not in taken
        and array.size == _real(value).numel()
        and _same(value, torch.from_numpy(np.asarray(array)))
    ]
    last = name.rpartition(".")[2]
    exact = [other for other in alike if other.rpartition(".")[2] == last]
    return next(iter(exact or (alike if value.is_floating_point() or value.is_complex() else [])), None)
