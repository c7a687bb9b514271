"""A recorded list of operations on another device than the one it was recorded on."""

from __future__ import annotations

import torch
from torch import Tensor, fx


def move(module: fx.GraphModule, device: torch.device) -> None:
    """What the list makes and keeps of itself lies on ``device`` then. Inputs have to lie there too."""
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target))
            if isinstance(value, Tensor):
                setattr(module, str(node.target), value.detach().to(device))
        elif isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", device)
