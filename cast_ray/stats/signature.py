"""What a drafter guesses on one recorded text: a mismatch that costs too little acceptance to be seen in it shows here.

Numbers without luck: the same tokens, the same roots. Another target, other layers, other positions of the context or
another mask token give other masses, whether they cost anything or not.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cast_ray.engine.engine import Engine
from cast_ray.request import SamplingParams
from cast_ray.stats.acceptance import drafter_of, watched
from cast_ray.stats.positions import OneByOne
from cast_ray.trees.pack import pack_chain

# In the record of the pair, beside `reliability`.
SIGNATURE = "signature"
# Roots that are asked, and tokens of the prompt that are kept.
ROOTS, PROMPT = 24, 256
DECIMALS = 5
# Share of the mass by which two readings of one pair may differ: rounding in 16 bits moves some hundredths of it.
SAME = 0.1


@dataclass(frozen=True)
class Signature:
    """prompt: token ids. written: what the target wrote behind it, greedy. masses: of the likeliest chain behind each
    root, the prompt's last token first, by depth."""

    prompt: list[int]
    written: list[int]
    masses: list[list[float]]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: object) -> Signature | None:
        """Read what `to_dict` wrote; None where it is something else."""
        try:
            signature = cls(**values)  # type: ignore[arg-type]
            whole = all(isinstance(token, int) for token in (*signature.prompt, *signature.written))
            numbers = all(isinstance(mass, int | float) for row in signature.masses for mass in row)
        except TypeError:
            return None
        return signature if whole and numbers and signature.prompt else None

    def off(self, other: Signature) -> float | None:
        """By what share of the mass the other reading differs, on the roots before which both wrote the same. None
        where there is none, or nothing to compare."""
        same = 1
        for ours, theirs in zip(self.written, other.written, strict=False):
            if ours != theirs:
                break
            same += 1
        pairs = [
            (ours, theirs)
            for row, also in zip(self.masses[:same], other.masses[:same], strict=False)
            for ours, theirs in zip(row, also, strict=False)
        ]
        mass = sum(ours for ours, _ in pairs)
        return sum(abs(ours - theirs) for ours, theirs in pairs) / mass if mass > 0 else None


def read_signature(engine: Engine, prompt: list[int]) -> Signature:
    """Ask the engine's drafter behind every token of what the target writes. The engine must share no prefixes."""
    drafter = drafter_of(engine)
    assert drafter is not None
    tokens, policy = prompt[-PROMPT:], engine.policy
    engine.use_policy(OneByOne())
    masses: list[list[float]] = []
    written: list[int] = []
    try:
        with watched(drafter) as proposals:
            engine.submit("signature", tokens, SamplingParams(max_tokens=ROOTS, ignore_eos=True))
            while engine.has_work:
                for event in engine.step():
                    written += event.token_ids
                if (scores := proposals.take()) is not None:
                    chain = pack_chain(scores, scores.logprobs.shape[1]).masses[0]
                    masses.append([round(mass, DECIMALS) for mass in chain.tolist()])
    finally:
        engine.use_policy(policy, health=engine.health)
    return Signature(tokens, written, masses)
