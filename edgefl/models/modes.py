"""Training and inference mode of the parts of a module.

A module in training mode may have parts in inference mode: a frozen encoder, a batch norm with fixed statistics.
``module.train()`` would switch them too. So each of these parts is marked by an attribute, which copies inherit::

    mark_inference(module)           # once, before the module is cut
    set_mode(module, training=True)  # marked parts stay in inference mode
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_MARK = "edgefl_inference"


def is_inference(part: nn.Module) -> bool:
    """Return True if ``part`` is marked to stay in inference mode during training."""
    return bool(part.__dict__.get(_MARK, False))


def enter_training(module: nn.Module) -> None:
    """Switch ``module`` in place to the modes in which its user would train it.

    For a module in inference mode this calls ``module.train()``. In a module that is already in training mode, parts
    keep their modes. There, a part with its own ``train`` method may put more parts into inference mode.
    """
    if not module.training:
        module.train()
        return
    for part in list(module.modules()):
        if type(part).train is nn.Module.train or not part.training:
            continue
        before = {inner: inner.training for inner in part.modules()}
        part.train(True)
        for inner, training in before.items():
            inner.training = inner.training and training


def mark_inference(module: nn.Module) -> None:
    """Mark the parts of ``module`` that stay in inference mode when it is trained (:func:`enter_training`).

    The modes themselves do not change.
    """
    with keeping_modes(module):
        enter_training(module)
        for part in module.modules():
            if not part.training:
                part.__dict__[_MARK] = True


def set_mode(module: nn.Module, *, training: bool) -> None:
    """Set the mode of every part in place.

    With ``training``, parts marked by :func:`mark_inference` stay in inference mode.
    """
    module.train(training)
    for part in module.modules():
        part.training = training and not is_inference(part)


@contextmanager
def in_mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the modes of ``module`` for the ``with`` block as :func:`set_mode` does, and restore the modes of all its
    parts afterwards.
    """
    with keeping_modes(module):
        set_mode(module, training=training)
        yield


@contextmanager
def keeping_modes(module: nn.Module) -> Iterator[None]:
    """Restore the modes of all parts of ``module`` after the ``with`` block."""
    before = {part: part.training for part in module.modules()}
    try:
        yield
    finally:
        for part, training in before.items():
            part.training = training


def has_mode_side_effects(module: nn.Module) -> bool:
    """Return True if ``train`` or ``eval`` of a part of ``module`` changes attributes other than the mode."""
    held = []
    for training in (False, True):
        with in_mode(module, training=training):
            held.append([_attributes(part) for part in module.modules()])
    return held[0] != held[1]


def _attributes(part: nn.Module) -> dict[str, int]:
    """Return the ``id`` of each attribute of a module, by name, without its mode ``training``."""
    groups = (part.__dict__, part._modules, part._parameters, part._buffers)
    return {name: id(value) for group in groups for name, value in group.items() if name != "training"}
