"""Contrastive losses: two views of one sample should be more similar than views of different samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.losses.loss import Loss, output_error

_MASKED = -1e9
"""Similarity to a masked row, whose probability becomes 0. It is finite, because 0 times infinity is NaN."""


class _Contrastive(ABC):
    """Base of losses that compare the two views of a sample with the views of the other samples in the batch."""

    temperature: float

    def __post_init__(self) -> None:
        if self.temperature <= 0.0:
            raise ModelError(
                f"temperature of a contrastive loss is above 0, found {self.temperature}",
                temperature=self.temperature,
            )

    @abstractmethod
    def log_likelihood(self, out: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities of the candidates for each view, mask with 1 at the correct candidate), both (2B, n).

        Args:
            out: Embeddings of two views per sample, (B, 2, D).
            mask: 1 for the samples whose views are candidates, (B,).
        """

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return self.among(out.new_ones(len(out))).each(out, y)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        return self.among(out.new_ones(len(out))).correct(out, y)

    def among(self, mask: Tensor) -> Loss:
        return _MaskedContrastive(self, mask)

    def label(self, out: TensorSpec) -> TensorSpec:
        if len(out.shape) != 2 or out.shape[0] != 2:
            raise output_error(self, out, "(2, features), the embeddings of two views,")
        return TensorSpec((), torch.int64)


@dataclass(frozen=True)
class InfoNCE(_Contrastive):
    """Contrastive loss: find the second view of a sample among the second views of the batch, and vice versa.

    As in CLIP (van den Oord et al. 2018, equation 4). ``out`` is (B, 2, D), the embeddings of two views (two crops, or
    an image and its text). With s(a, b) the cosine divided by ``temperature``: ``-log softmax_j(s(a_i, b_j))[i]``, the
    mean of both directions. Labels are not read, but devices still send a class number. The loss of a sample depends on
    the rest of its batch: rows that pad a batch are not candidates, and the loss on a test set depends on its division
    into batches.

    Args:
        temperature: Divisor of the cosines; above 0.

    Raises:
        ModelError: ``temperature`` is out of range.
    """

    temperature: float = 0.07

    def log_likelihood(self, out: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities of the candidates for each view, mask with 1 at the correct candidate), both (2B, B).

        The candidates of a view are the B views on the opposite side. ``out`` has the embeddings of two views per
        sample, (B, 2, D). ``mask`` (B,) is 1 for the samples whose views are candidates.
        """
        one, other = F.normalize(out, dim=-1).unbind(dim=1)
        similarity = one @ other.T / self.temperature
        both = torch.cat((similarity, similarity.T))
        logp = torch.log_softmax(torch.where(mask > 0, both, torch.full_like(both, _MASKED)), dim=1)
        same = torch.eye(len(out), dtype=out.dtype, device=out.device)
        return logp, torch.cat((same, same))


@dataclass(frozen=True)
class NTXent(_Contrastive):
    """Contrastive loss: find the second view of a sample among all 2B - 1 other views of the batch.

    SimCLR's normalised temperature-scaled cross entropy (Chen et al. 2020, equation 1). ``out`` is (B, 2, D), the
    embeddings of two views. Labels are not read. The loss of a sample depends on the rest of its batch.

    Args:
        temperature: Divisor of the cosines; above 0.

    Raises:
        ModelError: ``temperature`` is out of range.
    """

    temperature: float = 0.5

    def log_likelihood(self, out: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities of the candidates for each view, mask with 1 at the correct candidate), both (2B, 2B).

        The candidates of a view are all other views. ``out`` has the embeddings of two views per sample, (B, 2, D).
        ``mask`` (B,) is 1 for the samples whose views are candidates.
        """
        rows = len(out)
        views = torch.cat(F.normalize(out, dim=-1).unbind(dim=1))
        similarity = views @ views.T / self.temperature
        same = torch.eye(rows, dtype=out.dtype, device=out.device)
        none = torch.zeros_like(same)
        own = torch.cat((torch.cat((same, none)), torch.cat((none, same))), dim=1)
        visible = torch.cat((mask, mask)) * (1.0 - own)
        logp = torch.log_softmax(
            torch.where(visible > 0, similarity, torch.full_like(similarity, _MASKED)), dim=1
        )
        return logp, torch.cat((own[rows:], own[:rows]))


@dataclass(frozen=True)
class _MaskedContrastive:
    """Contrastive loss ``loss`` in which only views of the samples whose ``mask`` (B,) is 1 are candidates."""

    loss: _Contrastive
    mask: Tensor

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        logp, right = self.loss.log_likelihood(out, self.mask)
        values = -(logp * right).sum(dim=1)
        return values.reshape(2, -1).mean(dim=0)

    def correct(self, out: Tensor, y: Tensor) -> Tensor:
        logp, right = self.loss.log_likelihood(out, self.mask)
        hits = (logp.argmax(dim=1) == right.argmax(dim=1)).to(torch.float32)
        return hits.reshape(2, -1).mean(dim=0)

    def label(self, out: TensorSpec) -> TensorSpec:
        return self.loss.label(out)
