"""How often a round makes the host wait for the device, counted on CPU tensors: what a GPU would stand still for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.engine import books
from cast_ray.engine import round as engine_round
from cast_ray.engine.emission import Emission
from cast_ray.errors import RequestError
from cast_ray.models.graph_safety import Watch
from cast_ray.sampling import processors
from cast_ray.width.latency import DraftPoint, LatencyPoint, LatencyTable
from cast_ray.width.policy import make_policy
from tests.support import qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_tiny_model(folder / "target", qwen3(), spread=2.0)
    save_tiny_drafter(folder / "drafter", target=qwen3())
    return folder


# Wide forwards for nothing and drafts for little: `joint` drafts in every round.
FLAT = LatencyTable([LatencyPoint(1, 1, 64, 10.0), LatencyPoint(60, 1, 64, 10.1)], [DraftPoint(1, 64, 0.01)], 0.1)


GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.8}
FILTERED = {"temperature": 1.1, "top_p": 0.9, "top_k": 9, "min_p": 0.01}
PENALISED = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
BANNED = {"bad_words": ("a b",), "min_tokens": 150, "logit_bias": {3: 2.0}, "stop_token_ids": (5,)}
SCORED = {"logprobs": 2}
# What each of the three requests of a batch asks for.
BATCHES = {
    "greedy": [GREEDY] * 3,
    "sampled": [SAMPLED] * 3,
    "filtered": [FILTERED] * 3,
    "penalised": [PENALISED] * 3,
    "banned": [BANNED] * 3,
    "scored": [SCORED] * 3,
    "mixed": [GREEDY, SAMPLED | SCORED, FILTERED | PENALISED | BANNED],
}


def engine_of(folder: Path, width: str, graphs: str = "on") -> Engine:
    # Captured forwards, and with them shapes that no value decides, as wherever looking at values means waiting.
    config = EngineConfig(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        width="fixed:12",
        dtype="float32",
        device="cpu",
        max_batch_size=4,
        max_nodes=12,
        max_context=400,
        graphs=graphs,
        graph_seconds=0.0,
    )
    engine = Engine(config)
    engine.use_policy(make_policy(width, block_size=5, max_nodes=12, latency=FLAT), health=engine.health)
    return engine


@pytest.mark.parametrize(
    ("batch", "width"),
    [
        *[("greedy", width) for width in ("ar", "chain", "fixed:12", "joint")],
        *[(batch, width) for batch in BATCHES if batch != "greedy" for width in ("ar", "joint")],
    ],
)
def test_a_round_waits_for_what_it_must_know_and_no_more(folder: Path, batch: str, width: str) -> None:
    engine = engine_of(folder, width)
    for number, asked in enumerate(BATCHES[batch]):
        params = SamplingParams(max_tokens=200, **({"seed": number} | asked))
        engine.submit(f"r{number}", [1 + number, 2, 3] * (3 + number), params)
    for _ in range(3):  # until all three decode
        engine.step()
    stats = engine._scheduler.running[0].stats
    drafted = set()
    for _ in range(8):
        before = stats.draft_rounds
        with Watch() as watch:
            engine.step()
        drafted.add(stats.draft_rounds > before)
        # What was emitted; and where the drafter ran, the widths or the masses that those are chosen by.
        waits = 2 if stats.draft_rounds > before else 1
        assert sum(watch.reads.values()) == waits, watch.reads
        assert not watch.uploads, watch.uploads
    assert (True in drafted) == (width != "ar")


@pytest.mark.parametrize("width", ["ar", "chain", "fixed:12", "joint"])
def test_a_step_that_is_not_captured_waits_no_more(folder: Path, width: str) -> None:
    engine = engine_of(folder, width, graphs="off")
    backend: Any = engine._parts.target.backend
    # As on a device: no look at pages, nor at values to choose tokens by.
    backend.looks, engine._rounds._fixed = False, True
    for number in range(3):
        params = SamplingParams(max_tokens=200, seed=number, temperature=0.7 * number)
        engine.submit(f"r{number}", [1 + number, 2, 3] * (3 + number), params)
    with Watch() as watch:
        engine.step()  # prompts alone
    assert not watch.reads
    assert not watch.uploads
    engine.step()
    stats = engine._scheduler.running[0].stats
    for number in range(6):
        if number == 3:  # a prompt rides along
            engine.submit("r3", [7, 7, 7], SamplingParams(max_tokens=50))
        before = stats.draft_rounds
        with Watch() as watch:
            engine.step()
        assert sum(watch.reads.values()) == 1 + (stats.draft_rounds > before), watch.reads
        assert not watch.uploads, watch.uploads


def test_rows_whose_nucleus_is_too_wide_are_chosen_again_in_one_wait_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    params = [SamplingParams(max_tokens=40, seed=i, temperature=1.5, top_p=0.9, logprobs=1) for i in range(3)]
    expected = engine_of(folder, "ar", graphs="off").generate(prompts, params)
    monkeypatch.setattr(processors, "NUCLEUS_FIXED", 3)
    again: list[int] = []
    surely = Emission.emit_surely

    def counted(*given: Any) -> Any:
        again.append(1)
        return surely(*given)

    monkeypatch.setattr(Emission, "emit_surely", counted)
    found = engine_of(folder, "joint").generate(prompts, params)
    assert [out.token_ids for out in found] == [out.token_ids for out in expected]
    assert again
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert [s.logprob for s in one.logprobs] == pytest.approx([s.logprob for s in other.logprobs], abs=1e-4)


def test_what_a_round_brought_is_told_while_the_next_is_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, "ar")
    order: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            order.append(name)
            return function(*given, **more)

        return call

    monkeypatch.setattr(engine._parts.target, "forward", noted("launch", engine._parts.target.forward))
    monkeypatch.setattr(engine_round, "read_back", noted("read", engine_round.read_back))
    monkeypatch.setattr(books, "show", noted("text", books.show))
    found: list[int] = []

    def deliver(events: list[books.Event]) -> None:
        order.append("deliver")
        for event in events:
            found.extend(event.token_ids)

    engine.submit("r", [1, 2, 3], SamplingParams(max_tokens=4), stream=True)
    while engine.has_work:
        engine.advance(deliver)
    # A prompt; then the first of four tokens is told when the second is under way, and the last at once.
    told = ["text", "deliver"]
    assert order == ["launch", "launch", "read", *["launch", *told, "read"] * 3, *told]
    assert engine.stats()["hidden_ms"] > 0
    monkeypatch.undo()
    assert (
        found == engine_of(folder, "ar", graphs="off").generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids
    )


def test_a_drafted_round_tells_while_the_drafter_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(folder, "fixed:12")
    order: list[str] = []
    drafter: Any = engine._parts.drafter
    propose, forward = drafter.propose, engine._parts.target.forward
    monkeypatch.setattr(drafter, "propose", lambda *given: (order.append("draft"), propose(*given))[1])
    monkeypatch.setattr(engine._parts.target, "forward", lambda *given: (order.append("verify"), forward(*given))[1])
    engine.submit("r", [1, 2, 3], SamplingParams(max_tokens=60))
    for _ in range(4):
        engine.advance(lambda events: order.append("deliver"))
    assert order == ["verify", "draft", "verify", *["draft", "deliver", "verify"] * 2]


def test_what_is_not_told_yet_is_not_lost(folder: Path) -> None:
    engine = engine_of(folder, "fixed:12")
    events: list[books.Event] = []
    asked = {"short": 1, "long": 90, "dropped": 90}
    for name, most in asked.items():
        engine.submit(name, [4, 5], SamplingParams(max_tokens=most, ignore_eos=True))
    engine.advance(events.extend)
    engine.advance(events.extend)
    assert not events
    with pytest.raises(RequestError, match="is in use"):  # it has ended, and nobody knows yet
        engine.submit("short", [1], SamplingParams())
    stats = engine.stats()
    assert (stats["requests_finished"], stats["running"]) == (1, 2)
    dropped = engine.abort("dropped")
    assert dropped is not None
    assert dropped.finish_reason == "abort"
    while engine.has_work:
        engine.advance(events.extend)
    assert [e.request_id for e in events if e.completion is not None] == ["short", "long"]
    gained = {name: [t for e in events if e.request_id == name for t in e.token_ids] for name in asked}
    assert {name: len(tokens) for name, tokens in gained.items() if name != "dropped"} == {"short": 1, "long": 90}
    assert gained["dropped"] == dropped.token_ids
    engine.check_integrity()
