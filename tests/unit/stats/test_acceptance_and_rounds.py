"""What trials of an engine count is what the engine did."""

from __future__ import annotations

import pytest
import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.errors import ConfigError
from cast_ray.stats.acceptance import chain_acceptance, drafter_of
from cast_ray.stats.explain import explain_round
from cast_ray.stats.rounds import Balanced, decode
from cast_ray.trees.pack import DraftScores, pack
from cast_ray.width.fixed import FixedWidth
from tests.support import qwen3, save_tiny_drafter, save_tiny_model

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
PARAMS = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "target", qwen3())
    save_tiny_drafter(folder / "drafter", target=qwen3())
    return Engine(
        EngineConfig(
            target=str(folder / "target"),
            drafter=str(folder / "drafter"),
            width="fixed:20",
            dtype="float32",
            device="cpu",
            max_batch_size=4,
        )
    )


def test_acceptance_by_depth_adds_up_to_the_round_length(engine: Engine) -> None:
    engine.use_policy(FixedWidth("chain", 4, branching=False))
    found = chain_acceptance(engine, PROMPTS, PARAMS)
    outs = engine.generate(PROMPTS, PARAMS)
    # The last round of each request is not counted, for it may have been cut.
    assert found.rounds == sum(out.stats.rounds - 1 for out in outs)
    assert 1.0 <= found.round_length <= 5.0
    assert list(found.accepted) == sorted(found.accepted, reverse=True)
    assert list(found.predicted) == sorted(found.predicted, reverse=True)
    assert len(found.accepted) == len(found.predicted) == 4
    assert "propose" not in vars(drafter_of(engine))


def test_runs_count_tokens_rounds_and_nodes(engine: Engine) -> None:
    alone = decode(engine, FixedWidth("fixed:6", 6, branching=True), PROMPTS[:1], PARAMS)
    assert alone.tokens == 24
    assert alone.nodes == 6 * alone.request_rounds
    assert alone.round_length == pytest.approx(24 / alone.request_rounds)
    plain = decode(engine, FixedWidth("ar", 0, branching=False), PROMPTS[:1], PARAMS)
    assert (plain.tokens, plain.request_rounds, plain.nodes) == (24, 24, 0)
    assert plain.ms > 0


def test_a_balanced_tree_has_two_children_everywhere(engine: Engine) -> None:
    class Fixed:
        block_size, taps = 4, (0,)

        def propose(self, contexts: object, top_k: int) -> DraftScores:
            logits = torch.tensor([[[0.1, 3.0, 2.0]] * 3])
            return DraftScores(logits.log_softmax(-1), torch.tensor([[[7, 8, 9]] * 3]))

    tree = pack(Balanced(Fixed()).propose(None, 1), 14)  # type: ignore[arg-type]
    assert tree.depths[0].tolist() == [1] * 2 + [2] * 4 + [3] * 8
    assert set(tree.tokens[0].tolist()) == {8, 9}


def test_an_explained_round_is_the_one_that_was_decoded(engine: Engine) -> None:
    plain = decode_text(engine)
    for number in (1, 3):
        engine.use_policy(FixedWidth("fixed:20", 20, branching=True))
        explained = explain_round(engine, PROMPTS[0], PARAMS, number)
        text = [*PROMPTS[0], *plain]
        assert text[explained.position] == explained.root
        assert text[explained.position + 1 :] == explained.following
        path = [int(explained.tree.tokens[0, node]) for node in explained.path]
        assert explained.committed[:-1] == path
        assert explained.chain_committed == explained.following[: len(explained.chain_committed)]
        # A tree of 20 nodes by mass holds the chain's first token.
        assert len(explained.committed) >= min(2, len(explained.chain_committed))
        assert explained.width == 20


def test_a_round_that_was_not_decoded_cannot_be_explained(engine: Engine) -> None:
    engine.use_policy(FixedWidth("fixed:20", 20, branching=True))
    with pytest.raises(ConfigError, match="the request had candidates in 13 rounds"):
        explain_round(engine, PROMPTS[0], PARAMS, 99)


def decode_text(engine: Engine) -> list[int]:
    engine.use_policy(FixedWidth("ar", 0, branching=False))
    return engine.generate(PROMPTS[:1], PARAMS)[0].token_ids
