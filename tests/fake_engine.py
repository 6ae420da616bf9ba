"""Engines without a model, with the manners of the real one: for tests of what happens around engines.

What `FakeEngine` does is in the prompt's words: `poison` ends the process, `break` breaks the engine, `hang` makes it
stop to work, `reject` is refused, `strange` raises something unexpected; everything else is answered with itself in
capitals. `WaitingEngine` has a speed instead. Nothing here imports PyTorch.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from cast_ray.config import EngineConfig
from cast_ray.errors import EngineError, ModelError, RequestError
from cast_ray.request import Completion, Prompt, RequestStats, SamplingParams


class FakeEngine:
    def __init__(self, config: EngineConfig) -> None:
        for field in ("target", "drafter"):
            if getattr(config, field) == "missing":
                raise ModelError(f"{field}='missing': does not exist. Check the path")
        self._config = config
        self.healthy = True
        self._hangs = False
        self._finished = 0
        self._tokens = 0

    async def generate(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Completion:
        text = prompt if isinstance(prompt, str) else str(prompt[-1]["content"])  # type: ignore[index, call-overload]
        await self._work(len(text.split()))
        if "hang" in text:
            self._hangs = True
        if self._hangs:
            await asyncio.Event().wait()
        if "poison" in text:
            os._exit(1)
        if "reject" in text:
            raise RequestError("prompt=9000: is longer than the context of 8192. Shorten it")
        if "strange" in text:
            raise KeyError("strange")
        if "break" in text:
            self.healthy = False
        if not self.healthy:
            raise EngineError("the engine failed: RuntimeError: broken. Start another one.")
        words = text.upper().split()[: params.max_tokens]
        self._finished += 1
        self._tokens += len(words)
        stats = RequestStats(rounds=max(1, len(words) // 2), tokens_committed=len(words))
        seed = params.seed
        return Completion(request_id or "", " ".join(words), list(range(len(words))), "stop", len(text), seed, stats)

    async def _work(self, tokens: int) -> None:
        await asyncio.sleep(0.002)

    def stats(self) -> dict[str, Any]:
        return fake_stats(self._finished, self._tokens, self._config.threads or 1)

    def close(self) -> None:
        self.healthy = False


class WaitingEngine(FakeEngine):
    """Decodes `max_batch_size` rows at once, each at its own pace. `threads` is its speed: words a second of a full
    batch, in hundreds."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._places = asyncio.Semaphore(config.max_batch_size)
        self._word_s = config.max_batch_size / (100.0 * (config.threads or 1))

    async def _work(self, tokens: int) -> None:
        async with self._places:
            await asyncio.sleep(tokens * self._word_s)


def fake_stats(finished: int = 0, tokens: int = 0, threads: int = 1) -> dict[str, Any]:
    """Statistics in the shape of `Engine.stats()`."""
    points = [(1, 10.0), (4, 11.0), (16, 20.0)]
    depths = [(1, 60.0, 55.0), (2, 30.0, 21.0), (3, 12.0, 6.0)]
    return {
        "device": {"name": "fake", "dtype": "float32", "threads": threads},
        "requests_finished": finished,
        "tokens_generated": tokens,
        "steps": tokens // 2,
        "rounds": tokens // 2,
        "mean_round_length": 2.0 if tokens else 0.0,
        "nodes_verified": 3 * tokens,
        "draft_ms": 10.0,
        "verify_ms": 70.0,
        "host_ms": 5.0,
        "prefill_ms": 15.0,
        "width": {
            "width": "deployment",
            "calibrated": True,
            "chosen": [{"batch": 1, "context": 0, "nodes": 3}],
            "predicted_round_length": 2.2,
            "achieved_round_length": 2.0,
            "by_depth": [{"depth": d, "promised": p, "accepted": a, "nodes": p} for d, p, a in depths],
        },
        "latency": {
            "version": 1,
            "host_ms": 0.5,
            "verify": [{"tokens": n, "batch": 1, "context": 0, "ms": ms, "noise_ms": 0.0} for n, ms in points],
            "draft": [{"batch": 1, "context": 0, "ms": 2.0, "noise_ms": 0.0}],
        },
    }
