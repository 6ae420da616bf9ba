"""The scheduler without a model: a pool of remembered tokens shows whose content every page really has."""

from __future__ import annotations

import random

import pytest
import torch

from cast_ray.engine import scheduler as module
from cast_ray.engine.scheduler import Plan, Scheduler
from cast_ray.engine.sequence import Sequence
from cast_ray.errors import EngineError
from cast_ray.models.pages import PagePool
from cast_ray.request import SamplingParams

JUNK = -7


class Machine:
    """A scheduler whose forwards write hashes of prefixes, not keys and values; the prefix decides the next token."""

    def __init__(self, *, pages: int, page_size: int, rows: int, scratch: int, context: int = 200) -> None:
        self.page_size, self.scratch = page_size, scratch
        self.scheduler = Scheduler(PagePool(pages), page_size, rows, context, scratch, torch.device("cpu"))
        self.content = [JUNK] * (pages * page_size)
        self.done: dict[str, list[int]] = {}
        self.computed = 0

    def submit(self, name: str, prompt: list[int], new: int, priority: int = 0) -> None:
        tokens = list(prompt)
        self.scheduler.add(
            Sequence(name, tokens, len(tokens), SamplingParams(), 0, frozenset(), len(tokens) + new, priority=priority)
        )

    def slot(self, sequence: Sequence, index: int) -> int:
        page = int(self.scheduler.tables[sequence.row, index // self.page_size])
        return page * self.page_size + index % self.page_size

    def step(self, budget: int, rng: random.Random) -> Plan:
        plan = self.scheduler.plan(budget)
        self.scheduler.check_integrity()
        for chunk in plan.chunks:
            for index in range(chunk.start, chunk.end):
                self.content[self.slot(chunk.sequence, index)] = entry(chunk.sequence.tokens, index)
            chunk.sequence.cached = chunk.end
            self.computed += chunk.end - chunk.start
        for sequence in plan.decoding:
            # A tree's nodes and the drafter's block write all the scratch; then a part of it is committed.
            root = len(sequence.tokens) - 1
            for index in range(root, root + self.scratch):
                self.content[self.slot(sequence, index)] = JUNK
            for _ in range(min(rng.randrange(1, self.scratch + 1), sequence.max_length - len(sequence.tokens))):
                last = len(sequence.tokens) - 1
                self.content[self.slot(sequence, last)] = entry(sequence.tokens, last)
                sequence.tokens.append(following(sequence.tokens))
            sequence.cached = len(sequence.tokens) - 1
        self.scheduler.settle(plan)
        for sequence in plan.decoding:
            if len(sequence.tokens) == sequence.max_length:
                self.done[sequence.request_id] = sequence.tokens
                self.scheduler.finish(sequence)
        self.check()
        return plan

    def check(self) -> None:
        """Whatever a request believes to be in the cache is there, through its block table."""
        self.scheduler.check_integrity()
        for sequence in self.scheduler.running:
            # Pages that the next plan will have in the tables are known by their list already.
            found = [
                self.content[sequence.pages[i // self.page_size] * self.page_size + i % self.page_size]
                for i in range(sequence.cached)
            ]
            assert found == [entry(sequence.tokens, index) for index in range(sequence.cached)]


def entry(tokens: list[int], index: int) -> int:
    """What a forward writes for a token: it depends on all tokens before, as keys and values do."""
    return hash(tuple(tokens[: index + 1]))


def following(tokens: list[int]) -> int:
    return (3 * tokens[-1] + len(tokens) + sum(tokens[-5:])) % 11


def alone(prompt: list[int], new: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(following(tokens))
    return tokens


@pytest.mark.parametrize("block", range(10))
def test_no_page_has_foreign_content_and_all_finish_through_many_schedules(block: int) -> None:
    preemptions = evictions = reused = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = random.Random(seed)
        page_size, scratch = rng.choice([1, 2, 4]), rng.choice([1, 3, 6])
        longest = 48 + scratch
        pages = -(-longest // page_size) + rng.choice([0, 1, 5, 20])
        machine = Machine(pages=pages, page_size=page_size, rows=rng.choice([1, 3, 8]), scratch=scratch)
        prefixes = [[rng.randrange(11) for _ in range(n)] for n in (0, 4, 9, 20)]
        jobs = {}
        for number in range(20):
            prompt = rng.choice(prefixes) + [rng.randrange(11) for _ in range(rng.choice([1, 1, 3, 8]))]
            jobs[f"r{number}"] = (prompt, rng.choice([1, 4, 20]), rng.choice([0, 0, 1]))
        to_come, aborted = list(jobs), set()
        for _ in range(3000):
            while to_come and rng.random() < 0.4:
                name = to_come.pop()
                prompt, new, priority = jobs[name]
                machine.submit(name, prompt, new, priority)
            if rng.random() < 0.03 and (sequence := machine.scheduler.find(rng.choice(list(jobs)))) is not None:
                machine.scheduler.finish(sequence)
                aborted.add(sequence.request_id)
                machine.check()
            plan = machine.step(rng.choice([1, 5, 40]), rng)
            assert plan.decoding or plan.chunks or not machine.scheduler.waiting, "somebody always goes on"
            if not (to_come or machine.scheduler.waiting or machine.scheduler.running):
                break
        assert machine.done.keys() | aborted == jobs.keys()
        for name, tokens in machine.done.items():
            assert tokens == alone(*jobs[name][:2])
        pool = machine.scheduler.pool
        assert pool.num_available == pool.num_pages
        preemptions += machine.scheduler.preemptions
        evictions += pool.evictions
        reused += machine.scheduler.prefixes.tokens_reused
    assert min(preemptions, evictions, reused) > 20


def test_who_shares_a_prefix_follows_the_one_that_computes_it() -> None:
    machine = Machine(pages=200, page_size=4, rows=8, scratch=2)
    prefix = list(range(10)) * 4
    for number in range(8):
        machine.submit(f"r{number}", [*prefix, number], 3)
    rng = random.Random(0)
    first = machine.step(16, rng)
    assert [(chunk.sequence.request_id, chunk.start, chunk.end) for chunk in first.chunks] == [("r0", 0, 16)]
    while machine.scheduler.running:
        machine.step(16, rng)
    assert machine.computed == len(prefix)


def test_a_follower_goes_on_by_itself_when_its_leader_leaves() -> None:
    machine = Machine(pages=200, page_size=4, rows=8, scratch=2)
    for number in range(3):
        machine.submit(f"r{number}", [*range(10), *range(10), number], 3)
    rng = random.Random(0)
    machine.step(10, rng)
    leader = machine.scheduler.find("r0")
    assert leader is not None
    machine.scheduler.finish(leader)
    plan = machine.step(10, rng)
    # Two pages were whole and are kept; the third begins anew.
    assert [(chunk.sequence.request_id, chunk.start) for chunk in plan.chunks] == [("r1", 8)]


def test_a_more_urgent_follower_takes_over_what_has_not_begun() -> None:
    machine = Machine(pages=200, page_size=4, rows=8, scratch=2)
    machine.submit("other", list(range(10)) * 3, 3, priority=1)
    machine.submit("batch", [9, 8, 7, 6, 5, 4, 3, 2, 1], 3, priority=1)
    rng = random.Random(0)
    machine.step(4, rng)
    machine.submit("online", [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], 3, priority=0)
    plan = machine.step(4, rng)
    assert [chunk.sequence.request_id for chunk in plan.chunks] == ["online"]


def test_the_last_of_the_lowest_priority_gives_way_and_loses_nothing() -> None:
    machine = Machine(pages=12, page_size=2, rows=4, scratch=2)
    machine.submit("low-old", [1] * 3, 6, priority=1)
    machine.submit("low-young", [2] * 3, 6, priority=1)
    machine.submit("high", [3] * 3, 15, priority=0)
    rng = random.Random(0)
    order = []
    for _ in range(60):
        before = {sequence.request_id for sequence in machine.scheduler.running}
        machine.step(20, rng)
        gone = before - {s.request_id for s in machine.scheduler.running} - machine.done.keys()
        order += sorted(gone)
        if not machine.scheduler.running and not machine.scheduler.waiting:
            break
    assert order
    assert order[0] == "low-young"
    assert "high" not in order
    assert machine.done == {
        "low-old": alone([1] * 3, 6),
        "low-young": alone([2] * 3, 6),
        "high": alone([3] * 3, 15),
    }


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    machine = Machine(pages=100, page_size=4, rows=1, scratch=2)
    machine.submit("batch", [1, 2, 3], 40, priority=5)
    rng = random.Random(0)
    machine.step(20, rng)
    machine.submit("same", [1, 2, 4], 2, priority=5)
    machine.submit("urgent", [1, 2, 5], 2, priority=0)
    machine.step(20, rng)
    assert [sequence.request_id for sequence in machine.scheduler.running] == ["urgent"]
    # The one that had to go is again before the one that came after it.
    assert [sequence.request_id for sequence in machine.scheduler.waiting] == ["batch", "same"]


def test_a_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    machine = Machine(pages=20, page_size=2, rows=4, scratch=2)
    machine.submit("first", [1] * 20, 10)
    rng = random.Random(0)
    machine.step(50, rng)
    machine.submit("large", [2] * 30, 2)
    machine.submit("small", [3], 2)
    machine.step(50, rng)
    assert [sequence.request_id for sequence in machine.scheduler.waiting] == ["large", "small"]


def test_who_waits_long_goes_ahead_of_its_betters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 10)
    machine = Machine(pages=100, page_size=4, rows=1, scratch=1)
    rng = random.Random(0)
    machine.submit("urgent-0", [1], 4)
    machine.submit("batch", [5], 4, priority=9)
    for number in range(1, 30):
        machine.submit(f"urgent-{number}", [number % 7], 4)
        for _ in range(4):
            machine.step(10, rng)
    assert "batch" in machine.done
    assert len(machine.done) < 30, "there were always urgent ones waiting"


def test_integrity_finds_a_wrong_table_and_a_writer_in_a_shared_page() -> None:
    machine = Machine(pages=50, page_size=2, rows=3, scratch=2)
    machine.submit("a", list(range(9)), 20)
    machine.submit("b", list(range(5, 11)), 20)
    rng = random.Random(0)
    machine.step(50, rng)
    machine.step(50, rng)
    first = machine.scheduler.running[0]
    machine.scheduler.tables[first.row, 0] += 1
    with pytest.raises(EngineError, match="block table of request 'a' is not its pages"):
        machine.scheduler.check_integrity()
    machine.scheduler.tables[first.row, 0] -= 1
    machine.scheduler.check_integrity()
    machine.scheduler.pool.publish(b"key", first.pages[-1])
    with pytest.raises(EngineError, match="request 'a' writes KV pages that others may read"):
        machine.scheduler.check_integrity()


def test_requests_that_grow_side_by_side_keep_their_pages_in_one_run() -> None:
    machine = Machine(pages=400, page_size=4, rows=8, scratch=2)
    rng = random.Random(0)
    for number in range(8):
        machine.submit(f"r{number}", [number] * (1 + 5 * number), 100)
        machine.step(50, rng)
    for _ in range(40):
        machine.step(50, rng)
    assert len(machine.scheduler.running) == 8
    for sequence in machine.scheduler.running:
        assert len(sequence.pages) > 12
        assert sequence.pages == list(range(sequence.pages[0], sequence.pages[0] + len(sequence.pages)))
