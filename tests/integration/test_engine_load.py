"""The engine under load: whatever the company, the pool, the order and the breaks, a request's output is its own.

A tiny model whose few tokens make trees hit often; the reference of every request is itself, alone, decoded plainly.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cast_ray import Engine, SamplingParams
from cast_ray.width.policy import FixedWidth
from cast_ray.width.shape import RoundShape
from tests.support import Comparison, qwen3, save_tiny_drafter, save_tiny_model, tiny_engine

PAGE = 4


class Swinging(FixedWidth):
    """Drafts for some rounds, then not for some, at random."""

    def __init__(self, seed: int) -> None:
        super().__init__("fixed:7", 7, branching=True)
        self._rng = random.Random(seed)
        self._left, self._drafts = 0, False

    def drafts(self, shape: RoundShape) -> bool:
        if not self._left:
            self._left, self._drafts = self._rng.randrange(1, 6), not self._drafts
        self._left -= 1
        return self._drafts


@dataclass(frozen=True)
class Job:
    """A request of a schedule."""

    name: str
    prompt: list[int]
    params: SamplingParams
    priority: int


class Reference:
    """Outputs of requests alone, by plain decoding without any sharing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = engine_for(folder, "ar", prefix_cache=False)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder / "target", dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._known: dict[Any, list[int]] = {}

    def tokens(self, prompt: list[int], params: SamplingParams) -> list[int]:
        key = (tuple(prompt), params.max_tokens, params.temperature, params.seed)
        if key not in self._known:
            self._known[key] = self.engine.generate([prompt], params)[0].token_ids
        return self._known[key]

    def compare(self, comparison: Comparison, job: Job, ours: list[int]) -> None:
        reference = self.tokens(job.prompt, job.params)
        comparison.same(self.model, job.prompt, ours, reference, job.params.temperature, job.params.seed or 0)


def engine_for(folder: Path, width: str, **changes: Any) -> Engine:
    sizes = {"page_size": PAGE, "max_batch_size": 6, "max_step_tokens": 32, "max_nodes": 15, "kv_cache_tokens": 4096}
    return tiny_engine(folder / "target", folder / "drafter", width, **{**sizes, **changes})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("load")
    config = qwen3(max_position_embeddings=1024)
    save_tiny_model(folder / "target", config, spread=2.0)
    save_tiny_drafter(folder / "drafter", target=config, max_position_embeddings=1024)
    return Reference(folder)


def jobs_of(rng: random.Random, count: int) -> list[Job]:
    """Mixed lengths, seeds, temperatures and priorities; many share a prefix."""
    prefixes = [[rng.randrange(12) for _ in range(length)] for length in (9, 16, 30)]
    jobs = []
    for number in range(count):
        prompt = list(rng.choice([[], *prefixes]))
        prompt += [rng.randrange(12) for _ in range(rng.choice([1, 2, 5, 13, 24]))]
        temperature = rng.choice([0.0, 0.7, 1.0])
        params = SamplingParams(
            max_tokens=rng.choice([1, 3, 10, 30]),
            temperature=temperature,
            seed=rng.choice([3, 4]) if temperature else None,
        )
        jobs.append(Job(f"r{number}", prompt, params, rng.choice([0, 0, 1, 5])))
    return jobs


@pytest.mark.parametrize("seed", range(6))
def test_every_output_is_the_one_the_request_gives_alone_through_any_schedule(reference: Reference, seed: int) -> None:
    rng = random.Random(seed)
    jobs = jobs_of(rng, 50)
    width = ("fixed:7", "chain", "joint", "fixed:7", "ar", "fixed:15")[seed]
    # One request needs up to 25 pages: a few of them, or a prefix more than fits, and somebody has to go.
    engine = engine_for(reference.folder, width, kv_cache_tokens=PAGE * rng.choice([30, 40, 60]))
    if seed % 2:
        engine._rounds.policy = Swinging(seed)
    waiting, aborted, done = list(jobs), set(), {}
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 1, 4])):
            if waiting:
                job = waiting.pop()
                engine.submit(job.name, job.prompt, job.params, priority=job.priority)
        if rng.random() < 0.05:
            name = rng.choice(jobs).name
            if engine.abort(name) is not None:
                aborted.add(name)
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
        engine.check_integrity()
    assert done.keys() | aborted == {job.name for job in jobs}
    comparison = Comparison()
    for job in jobs:
        if job.name in done:
            reference.compare(comparison, job, done[job.name].token_ids)
    comparison.check()
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert engine._scheduler.pool.evictions > 0
    assert stats["prefix_tokens_reused"] > 0
    assert stats["kv_pages_free"] == stats["kv_pages"]


@pytest.mark.parametrize("width", ["ar", "fixed:7"])
def test_requests_with_one_prefix_that_arrive_together_compute_its_pages_once(reference: Reference, width: str) -> None:
    rng = random.Random(1)
    prefix = [rng.randrange(12) for _ in range(700)]
    prompts = [[*prefix, *(rng.randrange(12) for _ in range(1 + i % 7))] for i in range(64)]
    engine = engine_for(
        reference.folder, width, max_batch_size=64, max_step_tokens=512, kv_cache_tokens=6000, page_size=16
    )
    outs = engine.generate(prompts, SamplingParams(max_tokens=4))
    engine.check_integrity()
    rounds = sum(out.stats.rounds + out.stats.nodes_verified for out in outs)
    # 43 whole pages once; of each prompt the rest of the last page and its own tokens, without the root.
    expected = 43 * 16 + sum(len(prompt) - 1 - 43 * 16 for prompt in prompts)
    assert engine.stats()["target_tokens"] - rounds == expected
    comparison = Comparison()
    for prompt, out in list(zip(prompts, outs, strict=True))[::8]:
        reference.compare(comparison, Job("", prompt, SamplingParams(max_tokens=4), 0), out.token_ids)
    comparison.check()


def test_aborting_half_of_the_requests_frees_their_pages_and_leaves_the_rest_unchanged(reference: Reference) -> None:
    rng = random.Random(2)
    jobs = jobs_of(rng, 24)
    engine = engine_for(reference.folder, "fixed:7", max_batch_size=24)
    for job in jobs:
        engine.submit(job.name, job.prompt, job.params, priority=job.priority)
    done: dict[str, list[int]] = {}
    dropped: set[str] = set()
    for step in range(1000):
        if step == 4:
            held = engine.stats()["kv_pages_free"]
            running = [sequence.request_id for sequence in engine._scheduler.running]
            dropped = set(running[::2])
            for name in dropped:
                assert engine.abort(name) is not None
                engine.check_integrity()
            assert engine.stats()["kv_pages_free"] > held
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion.token_ids
        if not engine.has_work:
            break
    assert len(dropped) > 5
    assert done.keys() == {job.name for job in jobs} - dropped
    comparison = Comparison()
    for job in jobs:
        if job.name in done:
            reference.compare(comparison, job, done[job.name])
    comparison.check()


def test_no_state_is_left_over_from_request_to_request(reference: Reference) -> None:
    engine = engine_for(reference.folder, "fixed:15", prefix_cache=False)
    prompt, params = [3, 1, 4, 1, 5, 9, 2, 6, 5], SamplingParams(max_tokens=40)
    outs = [engine.generate([prompt], params)[0] for _ in range(3)]
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids == reference.tokens(prompt, params)
    assert outs[0].stats.rounds == outs[1].stats.rounds == outs[2].stats.rounds


def test_what_is_found_in_the_prefix_cache_drafts_as_well_as_what_is_computed(reference: Reference) -> None:
    """The drafter's part of a cached page is there too: round lengths do not fall from request to request."""
    engine = engine_for(reference.folder, "fixed:15")
    params = SamplingParams(max_tokens=60)
    prompt = [(5 * i + i // 7) % 12 for i in range(61)]
    outs = [engine.generate([prompt], params)[0] for _ in range(3)]
    assert engine.stats()["prefix_tokens_reused"] >= 2 * 60
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
    assert outs[0].stats.rounds == outs[1].stats.rounds == outs[2].stats.rounds < 60


def test_acceptance_does_not_fall_as_concurrency_rises(reference: Reference) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(12) for _ in range(rng.choice([3, 20, 41]))] for _ in range(16)]
    params = SamplingParams(max_tokens=30)
    lengths = []
    for batch in (1, 16):
        engine = engine_for(reference.folder, "fixed:15", max_batch_size=batch, max_step_tokens=512)
        lengths.append([out.stats.mean_round_length for out in engine.generate(prompts, params)])
    assert lengths[0] == lengths[1]
    assert max(lengths[0]) > 1.2


def test_swinging_between_speculation_and_plain_rounds_changes_nothing(reference: Reference) -> None:
    """A load that swings between 1 and many concurrent requests, and a policy that swings with it."""
    rng = random.Random(9)
    jobs = jobs_of(rng, 40)
    engine = engine_for(reference.folder, "fixed:7", max_batch_size=16)

    class ByLoad(FixedWidth):
        def drafts(self, shape: RoundShape) -> bool:
            return shape.batch <= 4

    engine._rounds.policy = ByLoad("fixed:7", 7, branching=True)
    comparison = Comparison()
    start = 0
    drafted = plain = 0
    for size in (1, 14, 1, 1, 12, 2, 9):
        phase = jobs[start : start + size]
        start += size
        outs = engine.generate([job.prompt for job in phase], [job.params for job in phase])
        for job, out in zip(phase, outs, strict=True):
            reference.compare(comparison, job, out.token_ids)
            drafted += out.stats.draft_rounds
            plain += out.stats.rounds - out.stats.draft_rounds
    comparison.check()
    assert drafted > 30
    assert plain > 30


def test_online_requests_go_before_batch_ones_and_nobody_starves(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cast_ray.engine import scheduler

    monkeypatch.setattr(scheduler, "PATIENCE", 40)
    engine = engine_for(reference.folder, "ar", max_batch_size=2)
    for number in range(4):
        engine.submit(f"batch-{number}", [1, 2, number], SamplingParams(max_tokens=12), priority=1)
    engine.step()
    online = 0
    finished: list[str] = []
    for _ in range(400):
        # Never fewer than two online requests: strict priority alone would let no batch request in again.
        while online - sum(name.startswith("online") for name in finished) < 3:
            engine.submit(f"online-{online}", [3, online % 12], SamplingParams(max_tokens=5), priority=0)
            online += 1
        for event in engine.step():
            if event.completion is not None:
                finished.append(event.request_id)
        engine.check_integrity()
    assert finished[0].startswith("online"), "a running batch request gives way"
    assert engine.stats()["preemptions"] >= 2
    assert {f"batch-{number}" for number in range(4)} <= set(finished)
    assert sum(name.startswith("online") for name in finished) > 20
