"""Images, as people write models for them."""
# A call of a module is Any, and people return it as it is.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm


class LeNet(nn.Module):
    """LeNet of torch's own tutorial, with a size of -1 in front."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        x = F.dropout(F.relu(self.fc1(x)), training=self.training)
        x = F.relu(self.fc2(x))
        return F.log_softmax(self.fc3(x), dim=1)


class SEBlock(nn.Module):
    """Squeeze and excite, as it is copied around."""

    def __init__(self, channels: int, reduction: int = 4) -> None:
        super().__init__()
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(channels // reduction, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.avg_pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class CBAM(nn.Module):
    """Attention over channels, then over places."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Conv2d(channels, channels // 4, 1), nn.ReLU(), nn.Conv2d(channels // 4, channels, 1)
        )
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.mlp(F.adaptive_avg_pool2d(x, 1)) + self.mlp(F.adaptive_max_pool2d(x, 1)))
        x = x * scale
        maps = torch.cat((torch.max(x, 1)[0].unsqueeze(1), torch.mean(x, 1).unsqueeze(1)), dim=1)
        return x * torch.sigmoid(self.conv(maps))


class AttentionNet(nn.Module):
    """A residual network with both of these, and a layer left out now and then."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.se, self.cbam = SEBlock(width), CBAM(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.act = nn.SiLU(inplace=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.bn1(self.conv1(x)))
        identity = out
        out = self.cbam(self.act(self.bn2(self.conv2(self.se(out)))))
        out += identity
        return self.head(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))


class StochasticDepth(nn.Module):
    """Residual blocks that Python's own chance leaves out in training."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(2)
        )
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if self.training and random.random() < 0.2:
                continue
            x = x + block(x)
        return self.fc(x.mean(dim=[2, 3]))


class FiLM(nn.Module):
    """A picture, seen as a vector of conditions says."""

    def __init__(self, conditions: int, classes: int, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, width, 3, stride=2), nn.Conv2d(width, width, 3, stride=2)
        self.film = nn.Linear(conditions, 2 * width)
        self.fc = nn.Linear(width, classes)

    def forward(self, image: Tensor, condition: Tensor) -> Tensor:
        gamma, beta = self.film(condition).chunk(2, dim=-1)
        x = F.relu(self.conv1(image))
        x = gamma[:, :, None, None] * self.conv2(x) + beta[:, :, None, None]
        return self.fc(F.relu(x).amax(dim=(-2, -1)))


class Autoencoder(nn.Module):
    """A picture again, through transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 3, 3, stride=2, padding=1, output_padding=1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class ArcHead(nn.Module):
    """Cosines to a vector for each class."""

    def __init__(self, features: int, classes: int, scale: float = 16.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, features))
        nn.init.xavier_uniform_(self.weight)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.linear(F.normalize(x, p=2, dim=1), F.normalize(self.weight))


class FaceNet(nn.Module):
    """An embedding with PReLU and a cosine head."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.PReLU(width),
            nn.Conv2d(width, width, 3, stride=2, padding=1, groups=width, bias=False),
            nn.BatchNorm2d(width),
            nn.PReLU(width),
            nn.Conv2d(width, width, 8, groups=width, bias=False),
            nn.Flatten(),
            nn.BatchNorm1d(width, affine=False),
        )
        self.head = ArcHead(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class EinsumViT(nn.Module):
    """A small vision transformer with einsum, patches by unfold and a class token."""

    def __init__(self, classes: int, width: int = 32, patch: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.patch, self.heads = patch, heads
        self.embed = nn.Linear(3 * patch * patch, width)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.proj, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, img: Tensor) -> Tensor:
        p = self.patch
        patches = img.unfold(2, p, p).unfold(3, p, p)
        b, c, h, w, _, _ = patches.shape
        x = self.embed(patches.permute(0, 2, 3, 1, 4, 5).reshape(b, h * w, c * p * p))
        x = torch.cat((self.cls.repeat(b, 1, 1), x), dim=1) + self.pos
        q, k, v = self.qkv(self.norm(x)).reshape(b, h * w + 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("bhij,bhjd->bhid", dots.softmax(dim=-1), v)
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        return self.head(x[:, 0])


class SpectralBlock(nn.Module):
    """Products in frequency, as in GFNet."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, size, size // 2 + 1, 2) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(spectrum, s=x.shape[-2:], norm="ortho")


class FourierNet(nn.Module):
    """Convolutions and Fourier filters side by side."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.filter, self.point = SpectralBlock(width, 8), nn.Conv2d(width, width, 1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.gelu(self.filter(x) + self.point(x))
        return self.fc(x.mean((2, 3)))


class Binarize(Function):
    """The sign, with the gradient of the identity where it is small: the form that most repositories have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        grad = grads[0].clone()
        grad[x.abs() > 1] = 0
        return grad


class BinaryNet(nn.Module):
    """Binary activations between convolutions."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride=2), nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = Binarize.apply(self.bn1(self.conv1(x)))  # type: ignore[no-untyped-call]
        x = self.bn2(self.conv2(x))
        return self.fc(F.hardtanh(x).mean((2, 3)))


class FoldNet(nn.Module):
    """Patches mixed by a linear layer, and folded back."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.mix = nn.Linear(48, 48)
        self.unfold = nn.Unfold(4, stride=2, padding=1)
        self.fold = nn.Fold((32, 32), 4, stride=2, padding=1)
        self.fc = nn.Conv2d(3, classes, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fold(self.mix(self.unfold(x).transpose(1, 2)).transpose(1, 2))
        return self.fc(x).flatten(2).mean(-1)


class ESPCN(nn.Module):
    """Twice the size, by pixel shuffle."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, width, 5, padding=2), nn.Conv2d(width, 4, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(self.shuffle(self.conv2(torch.tanh(self.conv1(x)))), 0.0, 1.0)


class WSConv2d(nn.Conv2d):
    """Weight standardisation, as in Big Transfer."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        v, m = torch.var_mean(w, dim=[1, 2, 3], keepdim=True, unbiased=False)
        w = (w - m) / torch.sqrt(v + 1e-10)
        return F.conv2d(x, w, self.bias, self.stride, self.padding, self.dilation, self.groups)


class WSNet(nn.Module):
    """Standardised weights with group norm, two with spectral and weight norm."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.gn1 = WSConv2d(3, width, 3, stride=2, padding=1), nn.GroupNorm(4, width)
        self.conv2 = spectral_norm(nn.Conv2d(width, width, 3, stride=2))
        self.fc = weight_norm(nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.gn1(self.conv1(x)))
        return self.fc(F.elu(self.conv2(x)).mean((2, 3)))


class Up(nn.Module):
    """Upscaled, padded to the size of what it is joined with: the U-Net that most people copy."""

    def __init__(self, inside: int, width: int) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv = nn.Sequential(
            nn.Conv2d(inside, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class PixelUNet(nn.Module):
    """Classes of pixels of a picture whose size is odd."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.inc = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.down = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU()
        )
        self.up, self.out = Up(3 * width, width), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        return self.out(self.up(self.down(x1), x1))


class VQVAE(nn.Module):
    """The nearest of a few vectors, with the straight-through estimator."""

    def __init__(self, codes: int = 16, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, width, 4, stride=4)
        self.codebook = nn.Embedding(codes, width)
        self.decoder = nn.ConvTranspose2d(width, 3, 4, stride=4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        flat = z.permute(0, 2, 3, 1).contiguous().view(-1, z.shape[1])
        distances = (
            torch.sum(flat**2, dim=1, keepdim=True)
            + torch.sum(self.codebook.weight**2, dim=1)
            - 2 * torch.matmul(flat, self.codebook.weight.t())
        )
        nearest = torch.argmin(distances, dim=1)
        quantized = self.codebook(nearest).view(z.shape[0], z.shape[2], z.shape[3], -1).permute(0, 3, 1, 2)
        commitment = F.mse_loss(quantized.detach(), z)
        quantized = z + (quantized - z).detach()
        return self.decoder(quantized), commitment


class ConvLSTM(nn.Module):
    """A cell of convolutions over the frames of a film."""

    def __init__(self, classes: int, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.gates = nn.Conv2d(3 + width, 4 * width, 3, padding=1)
        self.fc = nn.Linear(width, classes)

    def forward(self, film: Tensor) -> Tensor:
        b, _, frames, height, width = film.shape
        h = torch.zeros(b, self.width, height, width, device=film.device)
        c = torch.zeros_like(h)
        for t in range(frames):
            i, f, o, g = torch.split(self.gates(torch.cat([film[:, :, t], h], dim=1)), self.width, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.fc(h.mean(dim=(2, 3)))
