"""A temporal convolutional network (Bai et al., "An Empirical Evaluation of Generic Convolutional and Recurrent Networks for
Sequence Modeling", 2018) over windows of a sensor series, (columns, window)."""

from torch import Tensor, nn
from torch.nn import functional as F


class Causal(nn.Module):
    """A residual block of two dilated convolutions that see the past only."""

    def __init__(self, inputs: int, channels: int, dilation: int, size: int = 3) -> None:
        super().__init__()
        self.past = (size - 1) * dilation
        self.first = nn.Conv1d(inputs, channels, size, dilation=dilation)
        self.second = nn.Conv1d(channels, channels, size, dilation=dilation)
        self.shortcut = nn.Conv1d(inputs, channels, 1) if inputs != channels else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(F.pad(x, (self.past, 0))))
        y = F.relu(self.second(F.pad(y, (self.past, 0))))
        return F.relu(y + self.shortcut(x))


class TCN(nn.Module):
    def __init__(self, classes: int, columns: int, channels: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Causal(columns if dilation == 1 else channels, channels, dilation) for dilation in (1, 2, 4, 8)
        )
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(2))


def make(classes: int = 6, columns: int = 6, channels: int = 32) -> nn.Module:
    return TCN(classes, columns, channels)  # five units: blocks_0, ..., blocks_3, head
