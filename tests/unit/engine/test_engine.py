"""The engine's promises beside exactness: limits, stops, bad input, aborts, and what it reports."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.engine.async_engine import AsyncEngine
from cast_ray.errors import ConfigError, EngineError, ModelError, RequestError
from tests.support import qwen3, save_tiny_drafter, save_tiny_model


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    config = qwen3(vocab_size=16, max_position_embeddings=64)
    save_tiny_model(folder / "target", config, spread=2.0)
    save_tiny_drafter(folder / "drafter", target=config)
    return {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "width": "fixed:15",
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "max_batch_size": 3,
        "max_step_tokens": 16,
        "max_nodes": 15,
    }


@pytest.fixture
def engine(settings: dict[str, Any]) -> Engine:
    return Engine(EngineConfig(**settings))


def pages_in_use(engine: Engine) -> int:
    stats = engine.stats()
    return int(stats["kv_pages"] - stats["kv_pages_free"])


def test_max_tokens_is_exact_wherever_it_falls_in_an_accepted_path(engine: Engine) -> None:
    whole = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=30))[0].token_ids
    for most in range(1, 31):
        out = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=most))[0]
        assert out.token_ids == whole[:most]
        assert out.finish_reason == "length"
    assert pages_in_use(engine) == 0


def test_a_stop_token_ends_the_output_wherever_it_falls(engine: Engine) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    whole = engine.generate([[1, 2, 3]], params)[0].token_ids
    for token in set(whole):
        stopped = SamplingParams(max_tokens=40, temperature=1.0, seed=3, stop_token_ids=(token,))
        out = engine.generate([[1, 2, 3]], stopped)[0]
        assert out.token_ids == whole[: whole.index(token) + 1]
        assert out.finish_reason == "stop"
        assert f"t{token}" not in out.text.split()


def test_the_context_limit_ends_the_output(engine: Engine) -> None:
    prompt = [i % 16 for i in range(50)]
    out = engine.generate([prompt], SamplingParams(max_tokens=500))[0]
    assert (len(out.token_ids), out.finish_reason, out.num_input_tokens) == (14, "length", 50)
    last = engine.generate([[1] * 63], SamplingParams(max_tokens=5))[0]
    assert len(last.token_ids) == 1


def test_the_models_own_end_token_stops_unless_ignored(settings: dict[str, Any], tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1)
    whole = Engine(EngineConfig(**settings)).generate([[5, 6]], params)[0].token_ids
    end = whole[4]
    model = AutoModelForCausalLM.from_pretrained(settings["target"])
    model.generation_config.eos_token_id = [end]
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(settings["target"]).save_pretrained(tmp_path)
    engine = Engine(EngineConfig(**{**settings, "target": str(tmp_path)}))
    out = engine.generate([[5, 6]], params)[0]
    assert (out.token_ids, out.finish_reason) == (whole[: whole.index(end) + 1], "stop")
    ignored = engine.generate([[5, 6]], replace(params, ignore_eos=True))[0]
    assert ignored.token_ids == whole


def test_statistics_add_up(engine: Engine) -> None:
    outs = engine.generate([[1, 2], [3], [4, 5, 6], [7] * 20], SamplingParams(max_tokens=17))
    stats = engine.stats()
    assert stats["requests_finished"] == 4
    assert stats["tokens_generated"] == sum(len(o.token_ids) for o in outs) == 4 * 17
    assert stats["rounds"] == sum(o.stats.rounds for o in outs)
    assert stats["nodes_verified"] == sum(o.stats.nodes_verified for o in outs) == 15 * stats["rounds"]
    assert stats["mean_round_length"] == pytest.approx(68 / stats["rounds"])
    assert stats["finish_reasons"] == {"length": 4}
    for out in outs:
        assert out.stats.tokens_committed == 17
        assert out.stats.mean_round_length == 17 / out.stats.rounds


def test_prompts_longer_than_a_step_are_cut_into_chunks(settings: dict[str, Any]) -> None:
    prompts = [[(i * 7 + j) % 16 for j in range(n)] for i, n in enumerate((45, 1, 33, 16, 17))]
    outputs = []
    for step_tokens in (16, 64, 512):
        engine = Engine(EngineConfig(**{**settings, "max_step_tokens": step_tokens}))
        outputs.append([o.token_ids for o in engine.generate(prompts, SamplingParams(max_tokens=12))])
    assert outputs[0] == outputs[1] == outputs[2]


def test_more_requests_than_places_all_finish_in_a_small_pool(settings: dict[str, Any]) -> None:
    engine = Engine(EngineConfig(**{**settings, "kv_cache_tokens": 100}))
    prompts = [[i % 16, 3] * (1 + i % 9) for i in range(12)]
    small = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_tokens=20))]
    large = [o.token_ids for o in Engine(EngineConfig(**settings)).generate(prompts, SamplingParams(max_tokens=20))]
    assert small == large
    engine.check_integrity()
    assert pages_in_use(engine) == 0


def test_an_aborted_request_frees_its_pages_and_leaves_the_rest_unchanged(engine: Engine) -> None:
    prompts = {f"r{i}": [i + 1, 2, 3] for i in range(5)}
    alone = {name: engine.generate([p], SamplingParams(max_tokens=25))[0].token_ids for name, p in prompts.items()}
    for name, prompt in prompts.items():
        engine.submit(name, prompt, SamplingParams(max_tokens=25))
    engine.step()
    running = engine.abort("r0")
    waiting = engine.abort("r4")
    assert running is not None
    assert waiting is not None
    assert running.finish_reason == waiting.finish_reason == "abort"
    assert engine.abort("nobody") is None
    done = {}
    while engine.has_work:
        for event in engine.step():
            engine.check_integrity()
            if event.completion is not None:
                done[event.request_id] = event.completion.token_ids
    assert done == {name: alone[name] for name in ("r1", "r2", "r3")}
    assert pages_in_use(engine) == 0


def test_a_second_run_on_one_engine_gives_what_the_first_gave(engine: Engine) -> None:
    prompts = [[1, 2, 3], [9, 9], [4, 5, 6, 7, 8, 9, 10, 11]]
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=5)
    first = [o.token_ids for o in engine.generate(prompts, params)]
    assert [o.token_ids for o in engine.generate(prompts, params)] == first


def test_a_sampled_request_without_a_seed_reports_the_one_it_drew(engine: Engine) -> None:
    outs = engine.generate([[1, 2], [1, 2]], SamplingParams(max_tokens=30, temperature=1.0))
    assert outs[0].seed != outs[1].seed
    again = engine.generate([[1, 2]], SamplingParams(max_tokens=30, temperature=1.0, seed=outs[0].seed))[0]
    assert again.token_ids == outs[0].token_ids


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("hello", "Wrap a single prompt in a list"),
        ([1, 2, 3], "Wrap the prompt in a list"),
        ([{"role": "user", "content": "hi"}], "Wrap the prompt in a list"),
        ([[1], []], r"prompts\[1\]: prompt=\[\]: has no tokens"),
        ([""], r"prompts\[0\]: prompt='': has no tokens"),
        ([[1], [99]], r"prompts\[1\]: prompt=99: is no token id below 16"),
        ([[1], None], r"prompts\[1\]: prompt=None: is neither text"),
        ([[1.5]], "is neither text"),
        ([[{"role": "user"}]], r"messages\[0\]=.*must have a role and a content"),
        ([[{"role": "user", "content": "t1"}]], "has no chat template"),
        ([[1] * 64], r"prompts\[0\]: prompt: 64 tokens leave no room for an answer in a context of 64"),
    ],
)
def test_a_bad_prompt_is_named_before_any_work(engine: Engine, prompts: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(prompts, SamplingParams(max_tokens=4))
    assert not engine.has_work


def test_a_request_larger_than_the_pool_is_refused(settings: dict[str, Any]) -> None:
    engine = Engine(EngineConfig(**{**settings, "kv_cache_tokens": 40}))
    with pytest.raises(RequestError, match=r"need 56 KV places, the pool has 40. Lower max_tokens"):
        engine.generate([[1] * 20], SamplingParams(max_tokens=20))
    assert engine.generate([[1] * 4], SamplingParams(max_tokens=4))[0].finish_reason == "length"


def test_parameters_are_matched_to_prompts(engine: Engine) -> None:
    outs = engine.generate([[1], [2]], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=7)])
    assert [len(o.token_ids) for o in outs] == [3, 7]
    with pytest.raises(RequestError, match="1 given for 2 prompts"):
        engine.generate([[1], [2]], [SamplingParams()])
    assert engine.generate([], SamplingParams()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_tokens": 2.0}, "max_tokens=2.0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "seed="),
        ({"stop_token_ids": 5}, "stop_token_ids=5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids="),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"top_q": 1}, "top_q=1: is not a sampling parameter"),
    ],
)
def test_a_bad_sampling_parameter_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict(change)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"width": "wide"}, ConfigError, "width='wide'.*Known: ar, chain"),
        ({"width": "fixed:40"}, ConfigError, "width='fixed:40'.*wider than max_nodes=15"),
        ({"width": "chain", "drafter": "none"}, ConfigError, "width='chain'.*needs a drafter"),
        ({"max_context": 65}, ConfigError, "max_context=65.*64 tokens"),
        ({"kv_cache_tokens": 16}, ModelError, "kv_cache_tokens=16.*too few"),
        ({"max_batch_size": 0}, ConfigError, "max_batch_size=0"),
        ({"widht": "ar"}, ConfigError, "widht='ar'.*no setting"),
        ({"target": "./no-such-model"}, ModelError, "no-such-model"),
    ],
)
def test_a_bad_setting_is_named(
    settings: dict[str, Any], change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Engine(EngineConfig(**{**settings, **change}))


def test_without_a_drafter_the_default_width_decodes_plainly(settings: dict[str, Any]) -> None:
    for drafter in ("auto", "none"):
        engine = Engine(EngineConfig(**{**settings, "drafter": drafter, "width": "deployment"}))
        out = engine.generate([[1, 2]], SamplingParams(max_tokens=6))[0]
        assert out.stats.rounds == 6
        assert engine.stats()["width"]["width"] == "ar"


def test_async_completions_equal_synchronous_ones(settings: dict[str, Any], engine: Engine) -> None:
    prompts = [[i, 3, i] for i in range(12)]
    expected = [o.token_ids for o in engine.generate(prompts, SamplingParams(max_tokens=15))]
    front = AsyncEngine(EngineConfig(**settings))

    async def run() -> list[Any]:
        calls = [front.generate(p, SamplingParams(max_tokens=15), f"r{i}") for i, p in enumerate(prompts)]
        return await asyncio.gather(*calls, front.generate([99]), return_exceptions=True)

    *outs, bad = asyncio.run(run())
    assert [o.token_ids for o in outs] == expected
    assert [o.request_id for o in outs] == [f"r{i}" for i in range(12)]
    assert isinstance(bad, RequestError)
    assert front.stats()["requests_finished"] == 12
    front.close()
    assert not front.healthy
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(front.generate([1]))


def test_a_cancelled_call_frees_its_request(settings: dict[str, Any]) -> None:
    front = AsyncEngine(EngineConfig(**settings))

    async def run() -> None:
        kept = asyncio.create_task(front.generate([1, 2], SamplingParams(max_tokens=40)))
        dropped = asyncio.create_task(front.generate([3, 4], SamplingParams(max_tokens=40)))
        await asyncio.sleep(0.01)
        dropped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropped
        assert len((await kept).token_ids) == 40

    asyncio.run(run())
    stats = front.stats()
    assert (stats["running"], stats["waiting"], stats["kv_pages"]) == (0, 0, stats["kv_pages_free"])
    assert stats["finish_reasons"] == {"abort": 1, "length": 1}
    front.close()


def test_a_failing_loop_fails_every_pending_request_with_its_cause(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    front = AsyncEngine(EngineConfig(**settings))

    def break_down(deliver: Any) -> None:
        raise ValueError("the device fell off")

    async def run() -> list[Any]:
        monkeypatch.setattr(front._engine, "advance", break_down)
        return await asyncio.gather(*(front.generate([1, 2]) for _ in range(4)), return_exceptions=True)

    for error in asyncio.run(run()):
        assert isinstance(error, EngineError)
        assert "ValueError: the device fell off" in str(error)
    assert not front.healthy
    assert front.stats()["requests_finished"] == 0
    front.close()


def test_a_failing_action_fails_every_waiting_request_too(settings: dict[str, Any]) -> None:
    front = AsyncEngine(EngineConfig(**settings))

    def break_down(*_: Any) -> None:
        raise ValueError("the device fell off")

    async def run() -> list[Any]:
        front._engine.abort = break_down  # type: ignore[method-assign, assignment]
        dropped = asyncio.create_task(front.generate([3, 4], SamplingParams(max_tokens=60)))
        others = [asyncio.create_task(front.generate([1, 2], SamplingParams(max_tokens=60))) for _ in range(3)]
        await asyncio.sleep(0.02)
        dropped.cancel()
        return await asyncio.gather(*others, return_exceptions=True)

    for error in asyncio.run(asyncio.wait_for(run(), 60)):
        assert isinstance(error, EngineError)
        assert "the device fell off" in str(error)
    assert not front.healthy


def test_an_interrupted_call_leaves_nothing_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = engine.advance
    steps = iter(range(100))

    def interrupted(deliver: Any) -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt
        advance(deliver)

    monkeypatch.setattr(engine, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2], [3], [4], [5]], SamplingParams(max_tokens=50))
    assert not engine.has_work
    assert pages_in_use(engine) == 0
