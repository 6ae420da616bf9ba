"""Each family's forward over trees and prompt chunks is transformers' own over every path; other families are told."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config, Lfm2Config, Llama4TextConfig

from cast_ray.errors import ModelError
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.families import HYBRID, PROVEN, check_family
from cast_ray.models.flatten import PromptChunk, Roots, flatten_trees, make_step
from cast_ray.models.loading import LoadedTarget
from cast_ray.models.target import ATTENTION_NAME, Target
from cast_ray.trees.pack import DraftScores, pack, pack_chain
from tests import families

PAGE, PAGES = 4, 20
PROMPTS = ([3, 9, 1, 4, 4, 7, 0, 11, 2, 5, 8, 8, 6, 10, 3, 1, 9, 2, 7, 5, 0, 4, 6, 2, 11], [7, 3, 3, 10, 1, 5])


def models(config: object) -> tuple[torch.nn.Module, Target]:
    """The model of transformers, and a target with the same random weights."""
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=ATTENTION_NAME).eval()
    ours.load_state_dict(reference.state_dict())
    loaded = LoadedTarget(ours.requires_grad_(False), None, "tiny", "tiny", (), 512)  # type: ignore[arg-type]
    return reference, Target(loaded, SdpaBackend(PAGE), 2 * PAGES * PAGE, rows=2)


@torch.inference_mode()
def worst_difference(reference: torch.nn.Module, target: Target, chain: bool) -> float:
    """Between logits of every node of two trees and those of transformers over its path, in shares of the largest."""
    random = torch.Generator().manual_seed(1)
    tables = torch.arange(2 * PAGES).view(2, PAGES)
    long, short = PROMPTS
    first = [PromptChunk(long[:10], 0, tables[0], 0), PromptChunk(short, 0, tables[1], 1)]
    target.forward(make_step(None, first, PAGE), torch.arange(0))
    target.forward(make_step(None, [PromptChunk(long[10:], 10, tables[0], 0)], PAGE), torch.arange(0))
    scores = DraftScores(
        torch.randn(2, 5, 3, generator=random).log_softmax(-1), torch.randint(12, (2, 5, 3), generator=random)
    )
    tree = pack_chain(scores, 5) if chain else pack(scores, 16)
    widths = [tree.max_nodes, tree.max_nodes - 2]
    roots = Roots(torch.tensor([3, 4]), torch.tensor([25, 6]), [25, 6], tables, torch.arange(2))
    rows = flatten_trees(roots, tree, widths, PAGE, 500)
    logits = target.forward(make_step(rows, [], PAGE), torch.arange(rows.group.rows)).logits
    worst, row = 0.0, itertools.count()
    for b, width in enumerate(widths):
        own = [int(roots.tokens[b]), *tree.tokens[b].tolist()]
        for node in range(width + 1):
            path = [own[place] for place in range(width + 1) if rows.mask[b, node, place]]
            expected = reference(torch.tensor([PROMPTS[b] + path]), use_cache=False).logits[0, -1]
            away = (expected - logits[next(row)]).abs().max() / expected.abs().max()
            worst = max(worst, float(away))
    return worst


@pytest.mark.parametrize("name", [*families.MAIN, *families.OTHERS])
def test_a_tree_of_each_family_gives_the_logits_of_transformers(name: str) -> None:
    config = {**families.MAIN, **families.OTHERS}[name]()
    check_family(config, name)
    assert worst_difference(*models(config), chain=False) < 1e-4


@pytest.mark.parametrize("name", families.HYBRIDS)
def test_a_chain_of_each_hybrid_gives_the_logits_of_transformers(name: str) -> None:
    config = families.HYBRIDS[name]()
    check_family(config, name)
    assert worst_difference(*models(config), chain=True) < 1e-4


def test_there_is_a_model_of_every_family() -> None:
    made = {**families.MAIN, **families.OTHERS, **families.HYBRIDS}
    kinds = {config().get_text_config().model_type for config in made.values()}
    assert kinds == PROVEN.keys() | HYBRID.keys()


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "falcon", "opt", "stablelm", "diffllama", "doge"])
def test_families_that_were_not_proven_are_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=rf"target='my/model': is of a family \({kind}\) .* Use one of: llama, "):
        check_family(CONFIG_MAPPING[kind](), "my/model")


def test_layers_whose_state_is_not_kept_are_refused() -> None:
    with pytest.raises(ModelError, match=r"layers of kind conv \(lfm2\)"):
        check_family(Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2), "m")
    with pytest.raises(ModelError, match="layers of kind chunked_attention"):
        check_family(Llama4TextConfig(num_hidden_layers=4), "m")
    with pytest.raises(ModelError, match="multi-head latent attention"):
        check_family(DeepseekV3Config(), "m")


def test_windows_that_a_family_only_masks_are_refused_where_contexts_reach_beyond_them() -> None:
    check_family(families.of("phimoe", **families.LOCAL_EXPERTS, sliding_window=512)(), "m")
    with pytest.raises(ModelError, match=r"windows of 9 tokens, .* max_position_embeddings to 9"):
        check_family(families.of("phimoe", **families.LOCAL_EXPERTS, sliding_window=9)(), "m")
    with pytest.raises(ModelError, match="windows of 9 tokens"):
        check_family(families.of("qwen2_moe", **families.MIXED, use_sliding_window=True)(), "m")


def test_a_model_that_looks_ahead_is_refused() -> None:
    config = families.of("gemma3_text", use_bidirectional_attention=True)()
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        check_family(config, "m")
