"""What DFlash 2 adds to DFlash (z-lab's public architecture): convolutions inside a block, and a candidate selector.

The selector scores neighbouring candidates against each other, so that a node's probability depends on its parent. It
chooses nothing: trees are packed from its scores elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cast_ray.drafters.checkpoint import DFlash2Config
from cast_ray.trees.pack import DraftScores


class DynamicConv(nn.Module):
    """Two causal convolutions along a block, around a layer's attention or MLP; each block is one for itself.

    A tap of the kernel is a learnt factor per channel plus one per group of channels that the rows themselves give.
    The rows before the first convolution give both kernels.
    """

    def __init__(self, hidden_size: int, block_size: int, config: DFlash2Config) -> None:
        super().__init__()
        self.block_size = block_size
        self.kernel_size = config.conv_kernel_size
        self.group_size = config.conv_group_size
        groups = hidden_size // config.conv_group_size
        base_kernel = torch.zeros(2, config.conv_kernel_size, hidden_size)
        base_kernel[:, 0] = 1.0  # an untrained one lets the rows pass
        self.base_kernel = nn.Parameter(base_kernel)
        self.kernel_projection = nn.Linear(hidden_size, 2 * config.conv_kernel_size * groups, bias=False)

    def forward(self, inner: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        """Convolve, apply `inner`, convolve again: rows `[blocks * block_size, hidden]`, returned in their shape."""
        rows, kernel = self.prepare(rows)
        return self.finish(inner(rows), kernel)

    def prepare(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The first convolution; and the dynamic kernel of the second, for `finish`."""
        groups = rows.shape[-1] // self.group_size
        dynamic = self.kernel_projection(rows).view(-1, self.block_size, 2, self.kernel_size, groups, 1)
        return self._convolve(rows, self.base_kernel[0], dynamic[:, :, 0]), dynamic[:, :, 1]

    def finish(self, rows: Tensor, kernel: Tensor) -> Tensor:
        """The second convolution."""
        return self._convolve(rows, self.base_kernel[1], kernel)

    def _convolve(self, rows: Tensor, base: Tensor, dynamic: Tensor) -> Tensor:
        """Row i becomes the sum over taps t of its kernel times row i - t, within its block.

        base: `[kernel, hidden]`; dynamic: `[blocks, block_size, kernel, groups, 1]`.
        """
        base = base.view(self.kernel_size, -1, self.group_size)
        blocks = rows.view(-1, self.block_size, *base.shape[1:])
        out = blocks * (base[0] + dynamic[:, :, 0])
        for tap in range(1, min(self.kernel_size, self.block_size)):
            out[:, tap:] += blocks[:, :-tap] * (base[tap] + dynamic[:, tap:, tap])
        return out.view_as(rows)


class CandidateSelector(nn.Module):
    """Bilinear scores between a token and the next one, gated by the hidden state of the next one's position."""

    def __init__(self, hidden_size: int, vocab_size: int, config: DFlash2Config) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Embedding(vocab_size, config.selector_rank)
        self.successor_codebook = nn.Embedding(vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(hidden_size, config.selector_rank, bias=False)

    def pair_scores(self, hidden: Tensor, predecessors: Tensor, successors: Tensor) -> Tensor:
        """Scores `[..., J, K]` float32 of successors `[..., K]` after predecessors `[..., J]` (token ids).

        hidden: `[..., hidden]`, final state of the successors' position.
        """
        gated = self.predecessor_codebook(predecessors) * self.hidden_projection(hidden).unsqueeze(-2)
        return gated.float() @ self.successor_codebook(successors).float().transpose(-1, -2)

    def scores(
        self, hidden: Tensor, unary: Tensor, token_ids: Tensor, roots: Tensor, temperatures: Tensor
    ) -> DraftScores:
        """The tokens of every depth, its `top_k` best by their logits, scored against each other.

        A token's probability is a softmax over the `top_k` of its depth alone, of logit plus pair score, both over the
        temperature. The token before the first depth is the root: its pair scores are in `logprobs`.

        hidden: `[B, D, hidden]`; unary: `[B, D, top_k]` float32 logits of token_ids `[B, D, top_k]`; roots: `[B]`;
        temperatures: `[B]`, positive.
        """
        after_root = self.pair_scores(hidden[:, :1], roots[:, None, None], token_ids[:, :1]).squeeze(2)
        unary = torch.cat([unary[:, :1] + after_root, unary[:, 1:]], dim=1) / temperatures[:, None, None]
        pairwise = self.pair_scores(hidden[:, 1:], token_ids[:, :-1], token_ids[:, 1:])
        return DraftScores(unary.log_softmax(dim=-1), token_ids, pairwise / temperatures[:, None, None, None])
