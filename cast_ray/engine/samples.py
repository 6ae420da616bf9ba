"""The `n` samples of one request: sequences of their own, with seeds of their own, reported together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from cast_ray.request import Completion, SamplingParams, derive_seed


@dataclass(eq=False)
class Samples:
    """Who belongs together. request_id: the request's; done: completions so far, by index."""

    request_id: str
    count: int
    done: dict[int, Completion] = field(default_factory=dict)

    def sequence_id(self, index: int) -> str:
        """The id of a sample's sequence; the first bears the request's own."""
        return f"{self.request_id}\x1f{index}" if index else self.request_id

    def add(self, index: int, completion: Completion) -> Completion | None:
        """Take in a sample's completion; the request's, once it was the last: the first sample's, with the others."""
        self.done[index] = replace(completion, request_id=self.request_id, index=index)
        if len(self.done) < self.count:
            return None
        first, *others = (self.done[i] for i in range(self.count))
        return replace(first, others=others)


def sample_params(params: SamplingParams, seed: int) -> list[tuple[SamplingParams, int]]:
    """Parameters and seed of each sample. What is a matter of the prompt alone is asked by the first only."""
    if params.n == 1:
        return [(params, seed)]
    rest = replace(params, prompt_logprobs=None, choice_probabilities=False)
    return [(rest if i else params, derive_seed(seed, "sample", i)) for i in range(params.n)]
