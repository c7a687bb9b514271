"""The models of the tasks, in plain torch, with the same weights in every engine."""

from __future__ import annotations

import torch
from torch import nn

_SEED = 0


def pfl_cnn() -> nn.Module:
    """``simple_cnn`` of pfl-research's benchmarks for images (3, 32, 32) of 10 classes: two convolutions of 3 x 3 with 32
    and 64 channels, a pool, a dense layer of 128, dropout of 0.25 and 0.5; 1,626,442 weights."""
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(14 * 14 * 64, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
    return model


def logistic() -> nn.Module:
    """Logistic regression on images (1, 28, 28) of 10 classes; 7,850 weights."""
    return _dense(28 * 28)


def small() -> nn.Module:
    """The same on images (1, 8, 8)."""
    return _dense(8 * 8)


def _dense(inputs: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 10))


MODELS = {"pfl_cnn": pfl_cnn, "logistic": logistic, "small": small}
