"""Lookup inside an engine: who may look in whose text, what is counted, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cast_ray import Completion, Engine, SamplingParams
from cast_ray.request import scope_of
from cast_ray.width.fixed import FixedWidth
from cast_ray.width.shape import RoundShape
from tests.support import qwen3, save_tiny_drafter, save_tiny_model, tiny_engine

LONG = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lookup")
    save_tiny_model(folder / "target", qwen3(), spread=2.0)
    save_tiny_drafter(folder / "drafter", target=qwen3())
    return folder


def engine_for(folder: Path, drafter: str, width: str = "fixed:15", **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_batch_size": 4, "max_step_tokens": 512, "lookup_tokens": 4096, **changes}
    return tiny_engine(folder / "target", drafter.format(folder / "drafter"), width, **settings)


def finish(engine: Engine) -> dict[str, Completion]:
    done = {}
    while engine.has_work:
        for event in engine.step():
            if event.completion is not None:
                done[event.request_id] = event.completion
    return done


def one(engine: Engine, prompt: list[int], scope: str | None, params: SamplingParams = LONG) -> Completion:
    engine.submit("it", prompt, params, lookup_scope=scope)
    return finish(engine)["it"]


def test_outputs_are_looked_up_in_their_own_scope_only(folder: Path) -> None:
    engine = engine_for(folder, "lookup")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    first = one(engine, prompt, "mine")
    for scope in (None, "yours", "min", "mine "):
        assert one(engine, prompt, scope).stats.accepted_by_source.get("rows", 0) == 0
    again = one(engine, prompt, "mine")
    assert again.stats.accepted_by_source["rows"] > 20
    assert again.stats.rounds < first.stats.rounds
    assert again.token_ids == first.token_ids


def test_nothing_is_kept_of_a_request_without_a_scope(folder: Path) -> None:
    engine = engine_for(folder, "lookup")
    one(engine, [1, 2, 3], None)
    assert engine.stats()["lookup"]["outputs_kept"] == 0
    one(engine, [1, 2, 3], "a")
    assert engine.stats()["lookup"]["outputs_kept"] == 1


def test_prompts_of_one_call_share_and_chats_share_with_those_of_their_system_message() -> None:
    def chat(system: str, text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": system}, {"role": "user", "content": text}]

    assert scope_of(None, chat("a", "b")) is None
    assert scope_of("job", chat("a", "b")) == scope_of("job", chat("a", "c")) != scope_of("job", chat("b", "b"))
    assert scope_of("job", "text") == scope_of("job", [1, 2]) != scope_of("other", "text")


def test_rows_of_one_generate_call_look_in_each_others_outputs(folder: Path) -> None:
    engine = engine_for(folder, "lookup", max_batch_size=1)
    outs = engine.generate([[5, 6, 7, 8]] * 3, LONG)
    assert outs[0].token_ids == outs[1].token_ids == outs[2].token_ids
    assert outs[0].stats.accepted_by_source.get("rows", 0) == 0
    assert outs[2].stats.accepted_by_source["rows"] > 20


class NeverDrafts(FixedWidth):
    def drafts(self, shape: RoundShape) -> bool:
        return False


def test_candidates_at_hand_are_verified_without_running_the_drafter(folder: Path) -> None:
    engine = engine_for(folder, "{}+lookup")
    plain = one(engine_for(folder, "none", "ar"), [1, 2, 3, 4], None)
    engine.use_policy(NeverDrafts("fixed:15", 15, branching=True))
    out = one(engine, [1, 2, 3, 4], "s")
    assert out.token_ids == plain.token_ids
    assert out.stats.draft_rounds == 0
    assert sum(out.stats.accepted_by_source.values()) > 5
    assert "drafter" not in out.stats.accepted_by_source
    # The drafter's context was fed all the same: it goes on as if it had always drafted.
    engine.use_policy(FixedWidth("fixed:15", 15, branching=True))
    assert one(engine, [1, 2, 3, 4], "s").token_ids == plain.token_ids


def test_counts_by_source_add_up(folder: Path) -> None:
    engine = engine_for(folder, "{}+lookup")
    outs = engine.generate([[i, i + 1, i + 2] for i in range(6)] * 2, LONG)
    for out in outs:
        gained = sum(out.stats.accepted_by_source.values())
        # A round commits its accepted candidates and one token more, which the last one may lack.
        assert 0 <= out.stats.rounds + gained - out.stats.tokens_committed <= 1
    stats = engine.stats()
    assert sum(stats["accepted_by_source"].values()) == sum(sum(o.stats.accepted_by_source.values()) for o in outs)
    assert set(stats["lookup"]["sources"]) == {"prompt", "output", "rows"}
    assert stats["drafter"].endswith("+lookup")


def test_lookup_survives_preemption_and_aborts(folder: Path) -> None:
    prompts = [[i % 12, (i * 5) % 12, (i * 7) % 12] for i in range(6)]
    plain = [one(engine_for(folder, "none", "ar"), prompt, None).token_ids for prompt in prompts]
    engine = engine_for(folder, "{}+lookup", kv_cache_tokens=160, max_context=64)
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            engine.submit(f"{turn}-{number}", prompt, LONG, lookup_scope="job")
            engine.submit(f"{turn}-{number}-gone", prompt, LONG, lookup_scope="job")
        for _ in range(3):
            engine.step()
        for number in range(len(prompts)):
            engine.abort(f"{turn}-{number}-gone")
        done = finish(engine)
        assert [done[f"{turn}-{number}"].token_ids for number in range(len(prompts))] == plain
        engine.check_integrity()
    assert engine.stats()["preemptions"] > 0
    # What was aborted is not kept.
    assert engine.stats()["lookup"]["outputs_kept"] == 2 * len(prompts)


def test_structured_rows_and_rows_beside_them_are_the_same_with_lookup(folder: Path) -> None:
    params = SamplingParams(max_tokens=20, choice=("t1 t2 t3 t4 t5", "t1 t2 t3 t6", "t7 t8"))
    prompts = [[1, 2, 3, 1, 2, 3], [4, 5, 6]]
    plain = engine_for(folder, "none", "ar").generate(prompts, params)
    engine = engine_for(folder, "{}+lookup")
    for _ in range(2):
        assert [o.text for o in engine.generate(prompts, params)] == [o.text for o in plain]
    mixed = engine.generate([[1, 2, 3], [1, 2, 3]], [params, LONG])
    assert mixed[1].token_ids == engine_for(folder, "none", "ar").generate([[1, 2, 3]], LONG)[0].token_ids


def test_the_watch_over_the_drafter_does_not_credit_it_with_what_others_found(folder: Path) -> None:
    engine = engine_for(folder, "{}+lookup", watch_drafter=True, max_batch_size=4)
    assert engine.health is not None
    # A drafter that proposes one token for ever, which never comes.
    drafter = engine._parts.drafter
    assert drafter is not None
    propose = drafter.propose

    def wrong(contexts: Any, top_k: int) -> Any:
        scores = propose(contexts, top_k)
        return type(scores)(
            torch.full_like(scores.logprobs[:, :, :1], -0.1), torch.full_like(scores.token_ids[:, :, :1], 11)
        )

    drafter.propose = wrong  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=60, logit_bias={11: -100})
    for _ in range(6):
        engine.generate([[i, i + 1] for i in range(8)], params)
    assert engine.health.verdict == "rejected"
    assert engine.stats()["accepted_by_source"]["output"] + engine.stats()["accepted_by_source"]["rows"] > 50


def test_outputs_of_an_engine_with_a_larger_vocabulary_are_left_alone(folder: Path) -> None:
    engine = engine_for(folder, "lookup")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    plain = one(engine, prompt, None)
    name = scope_of("s", prompt)
    assert name is not None
    engine.exchange_outputs([(name, tuple(prompt), (50_000,) * 20), (name, (4, 99), tuple(plain.token_ids))])
    assert engine.stats()["lookup"]["outputs_kept"] == 0
    engine.exchange_outputs([(name, tuple(prompt), tuple(plain.token_ids))])
    again = one(engine, prompt, "s")
    assert again.token_ids == plain.token_ids
    assert again.stats.accepted_by_source["rows"] > 20


def test_lookup_that_keeps_no_outputs_serves_requests_that_share(folder: Path) -> None:
    plain = engine_for(folder, "none", "ar")
    engine = engine_for(folder, "lookup", lookup_tokens=0)
    for prompt in ([1, 2, 1, 2, 1], [3, 1, 4], [7] * 9, [5, 6] * 4):
        assert one(engine, prompt, "s").token_ids == one(plain, prompt, None).token_ids


def test_plain_width_looks_nothing_up(folder: Path) -> None:
    engine = engine_for(folder, "lookup", "ar")
    assert engine.stats()["lookup"] is None
    assert one(engine, [1, 2, 3], "s").stats.accepted_by_source == {}
