"""Whether two outputs are the same, where the arithmetic of one shape of a batch is not bit by bit that of another.

Token identity, with one exception: where the reference's two best scores lie so close that either token is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cast_ray.sampling.keyed import perturbed_scores

TIE = 1e-4  # in float32: the two best scores closer than this are a near-tie
TIES_PER_TOKEN = 1 / 5000  # in float32, no more of them than this are by chance
# In 16 bits: so many spacings of numbers as large as the largest logit. Rounding goes through every layer.
SPACINGS = 8


class Comparison:
    """Counts over many outputs. tokens: compared, up to where two part; ties: near-ties; differences: what is none."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ties = 0
        self.differences: list[str] = []
        self._exact = True

    @property
    def holds(self) -> bool:
        """Nothing differs but by near-ties, and in float32 these are as rare as chance has them, and one."""
        return not self.differences and (not self._exact or self.ties <= 1 + self.tokens * TIES_PER_TOKEN)

    @torch.inference_mode()
    def add(
        self,
        model: Any,
        prompt: list[int],
        ours: list[int],
        reference: list[int],
        temperature: float = 0.0,
        seed: int = 0,
    ) -> None:
        """Compare an output with its reference. model: a Hugging Face module, whose scores tell a near-tie.

        Behind the first place where the two part nothing is compared: they follow other prefixes.
        """
        parted = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b), None)
        if parted is None:
            self.tokens += min(len(ours), len(reference))
            if len(ours) != len(reference):
                self.differences.append(f"{len(ours)} tokens, the reference has {len(reference)}")
            return
        self.tokens += parted + 1
        prefix = torch.tensor([prompt + reference[:parted]], device=model.device)
        logits = model(prefix).logits[0, -1:]
        self._exact = self._exact and logits.dtype == torch.float32
        warmth = torch.tensor([temperature], device=logits.device)
        key = torch.tensor([seed], device=logits.device), torch.tensor([prefix.shape[1]], device=logits.device)
        best, contenders = perturbed_scores(logits, warmth, *key)[0].topk(2)
        gap = float(best[0] - best[1])
        places = f"token {parted}: {ours[parted]} instead of {reference[parted]}"
        if {ours[parted], reference[parted]} != set(contenders.tolist()):
            self.differences.append(f"{places}: they are not the two best there")
        elif gap >= tolerance(logits, temperature):
            self.differences.append(f"{places}: scores {gap:.2e} apart")
        else:
            self.ties += 1


def tolerance(logits: Tensor, temperature: float) -> float:
    """How close two scores are a near-tie, by the precision of the logits `[.., vocab]`."""
    if logits.dtype == torch.float32:
        return TIE
    spacing = torch.finfo(logits.dtype).eps * float(logits.abs().max())
    return SPACINGS * spacing / (temperature or 1.0)


def reference_greedy(model: Any, prompt: list[int], max_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """Hugging Face's own greedy output: new tokens only."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        repetition_penalty=1.0,
        max_new_tokens=max_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
