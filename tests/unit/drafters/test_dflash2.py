"""DFlash 2: its scores are the public package's, trees and chains follow them, and output stays the target's own."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.drafters.checkpoint import DFlash2Config, read_config
from cast_ray.drafters.dflash import DFlashDrafter, build_network
from cast_ray.drafters.dflash2 import CandidateSelector
from cast_ray.engine import round as engine_round
from cast_ray.trees.pack import DraftScores, pack, pack_chain
from tests.support import Comparison, dflash2_block, qwen3, reference_greedy, save_tiny_drafter, save_tiny_model
from tests.unit.drafters.oracle import oracle_rounds
from tests.unit.trees.slow_trees import STYLES, conditional, random_scores
from tests.unit.trees.test_pack import check_order, check_tree

SELECTORS: dict[str, dict[str, Any]] = {
    "rank_4_top_4_grouped_heads": {"dflash_config": dflash2_block()},
    "rank_16_top_7_sliding": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "dflash_config": dflash2_block(block_size=8, selector_rank=16, selector_top_k=7, conv_kernel_size=4),
    },
    "rank_1_whole_vocabulary_scaled_and_capped": {
        "num_key_value_heads": 4,
        "dflash_config": dflash2_block(
            selector_rank=1, selector_top_k=64, output_multiplier=0.5, final_logit_softcapping=2.0
        ),
    },
}


def slow_chain(scores: DraftScores, request: int) -> list[int]:
    """Candidate indices of the likeliest child at each depth."""
    path: tuple[int, ...] = ()
    for _ in range(scores.logprobs.shape[1]):
        values = conditional(scores, request, path)
        if not (values > -math.inf).any():
            break
        path = (*path, int(values.argmax()))
    return list(path)


@pytest.mark.parametrize("shape", SELECTORS)
@torch.inference_mode()
def test_the_greedy_chain_is_the_path_that_the_public_selector_walks(shape: str, tmp_path: Path) -> None:
    parted = 0
    for turn in oracle_rounds(tmp_path, SELECTORS[shape]):
        # A chain asks for one candidate a depth.
        chain = pack_chain(turn.ours.propose(turn.contexts, 1), turn.logits.shape[1])
        path, _, _ = turn.theirs.candidate_selector.select(turn.hidden, turn.logits, turn.contexts.roots, 0.0)
        assert torch.equal(chain.tokens, path)
        parted += int((path != turn.logits.argmax(dim=-1)).sum())
    assert parted > 0, "the pair scores changed nothing"


@pytest.mark.parametrize("shape", SELECTORS)
@torch.inference_mode()
def test_probabilities_along_a_sampled_path_are_the_public_selectors(shape: str, tmp_path: Path) -> None:
    for number, turn in enumerate(oracle_rounds(tmp_path, SELECTORS[shape])):
        # The second request is greedy: its tree is weighed at temperature 1.
        contexts = replace(turn.contexts, temperatures=torch.tensor([0.7, 0.0]))
        scores = turn.ours.propose(contexts, 1 + number)
        for request, temperature in enumerate((0.7, 1.0)):
            own = slice(request, request + 1)
            torch.manual_seed(number)
            select = turn.theirs.candidate_selector.select
            path, candidates, rows = select(turn.hidden[own], turn.logits[own], contexts.roots[own], temperature)
            ours: tuple[int, ...] = ()
            for depth, token in enumerate(path[0].tolist()):
                ids = scores.token_ids[request, depth]
                order = candidates[0, depth].argsort()
                assert torch.equal(ids.sort().values, candidates[0, depth][order])
                values = torch.from_numpy(conditional(scores, request, ours)).exp()
                torch.testing.assert_close(values[ids.argsort()], rows[0, depth][order], atol=2e-5, rtol=1e-4)
                ours = (*ours, ids.tolist().index(token))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@torch.inference_mode()
def test_the_tree_of_a_selectors_scores_is_that_of_a_best_first_search(temperature: float) -> None:
    torch.manual_seed(11)
    for rank, top_k, depths, nodes in ((1, 3, 4, 50), (8, 6, 7, 63), (4, 16, 2, 200)):
        config = DFlash2Config(conv_kernel_size=1, conv_group_size=1, selector_rank=rank, selector_top_k=top_k)
        selector = CandidateSelector(16, 40, config)
        hidden, logits = torch.randn(3, depths, 16), 2 * torch.randn(3, depths, 40)
        scores = selector.scores(hidden, *logits.topk(top_k), torch.tensor([0, 39, 7]), torch.full((3,), temperature))
        tree = pack(scores, nodes)
        check_tree(tree, scores, nodes)
        check_order(tree)


@pytest.mark.parametrize("pairwise", [False, True])
def test_a_chain_is_the_likeliest_child_at_each_depth_and_no_more(pairwise: bool) -> None:
    for seed in range(40):
        scores = random_scores(seed, 3, 1 + seed % 5, 1 + seed % 4, STYLES[seed % 4], pairwise, vocab=9)
        for nodes in (1, 3, 8):
            tree = pack_chain(scores, nodes)
            check_order(tree)
            for request in range(3):
                path = slow_chain(scores, request)[:nodes]
                tokens = [int(scores.token_ids[request, depth, k]) for depth, k in enumerate(path)]
                mass, masses = 0.0, []
                for depth, k in enumerate(path):
                    mass += float(conditional(scores, request, tuple(path[:depth]))[k])
                    masses.append(math.exp(mass))
                count = int(tree.counts[request])
                assert count == len(path)
                assert tree.tokens[request].tolist() == tokens + [0] * (nodes - count)
                assert tree.masses[request, :count].tolist() == pytest.approx(masses, rel=1e-4)
                assert tree.parents[request, :count].tolist() == list(range(-1, count - 1))


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_codebooks_are_read_under_both_of_their_public_names(suffix: str, tmp_path: Path) -> None:
    folder = save_tiny_drafter(tmp_path, target=qwen3(), dflash_config=dflash2_block())
    weights = load_file(folder / "model.safetensors")
    stored = {n.replace("_codebook.weight", f"_codebook{suffix}"): tensor for n, tensor in weights.items()}
    network = build_network(read_config(folder), stored, folder)
    assert sum(n.endswith(f"_codebook{suffix}") for n in stored) == 2
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, weights[name])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny_model(folder / "target", qwen3(), spread=2.0)
    drafter = save_tiny_drafter(folder / "drafter", target=qwen3(), dflash_config=dflash2_block())
    # As the public exporter stores them.
    weights = load_file(drafter / "model.safetensors")
    save_file(
        {n.replace("_codebook.weight", "_codebook"): w for n, w in weights.items()}, drafter / "model.safetensors"
    )
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
    return target, drafter, model.eval()


def engine_for(target: Path, drafter: Path, width: str) -> Engine:
    return Engine(
        EngineConfig(
            target=str(target),
            drafter=str(drafter),
            width=width,
            dtype="float32",
            device="cpu",
            page_size=4,
            max_batch_size=5,
            max_step_tokens=24,
            probe_seconds=1.0,
            watch_drafter=False,  # a random drafter is to go on drafting
            profile_dir=target / "profiles",
        )
    )


def test_output_is_the_targets_own_at_every_width(pair: tuple[Path, Path, Any]) -> None:
    target, drafter, model = pair
    rng = random.Random(4)
    prompts = [[rng.randrange(12) for _ in range(n)] for n in (1, 2, 5, 17, 40, 9, 3)]
    params = [
        SamplingParams(max_tokens=40, temperature=t, seed=60 + i) for i, t in enumerate((0, 0.8, 0, 1, 0.4, 0, 1.5))
    ]
    comparison = Comparison()
    accepted = 0
    plain = engine_for(target, drafter, "ar").generate(prompts, params)
    for prompt, p, out in zip(prompts, params, plain, strict=True):
        if p.temperature == 0:
            comparison.same(model, prompt, out.token_ids, reference_greedy(model, prompt, 40))
    for width in ("chain", "fixed:1", "fixed:7", "fixed:31", "deployment", "joint"):
        engine = engine_for(target, drafter, width)
        outs = engine.generate(prompts, params)
        engine.check_integrity()
        for prompt, p, out, reference in zip(prompts, params, outs, plain, strict=True):
            comparison.same(model, prompt, out.token_ids, reference.token_ids, p.temperature, p.seed or 0)
        accepted += sum(out.stats.tokens_committed - out.stats.rounds for out in outs)
    comparison.check()
    # The promise is about accepted paths: there must have been many of them.
    assert accepted > 100


def test_chain_rounds_verify_the_greedy_path(pair: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter, _ = pair
    proposed: list[DraftScores] = []
    verified: list[list[list[int]]] = []
    propose, flatten = DFlashDrafter.propose, engine_round.flatten_trees

    def spy_propose(*args: Any) -> DraftScores:
        proposed.append(propose(*args))
        return proposed[-1]

    def spy_flatten(roots: Any, tree: Any, *rest: Any) -> Any:
        verified.append(tree.tokens.tolist())
        return flatten(roots, tree, *rest)

    monkeypatch.setattr(DFlashDrafter, "propose", spy_propose)
    monkeypatch.setattr(engine_round, "flatten_trees", spy_flatten)
    engine_for(target, drafter, "chain").generate([[1, 2, 3], [4]], SamplingParams(max_tokens=20))
    assert len(proposed) == len(verified) > 0
    for scores, tokens in zip(proposed, verified, strict=True):
        for request, row in enumerate(tokens):
            path = slow_chain(scores, request)
            assert row == [int(scores.token_ids[request, depth, k]) for depth, k in enumerate(path)]
