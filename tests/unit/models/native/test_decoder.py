"""The compiled decoder gives the numbers of the plain model, and a token the same bits in every step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from cast_ray.models import native
from cast_ray.models.attention.base import Group, Step
from cast_ray.models.attention.sdpa import SdpaBackend
from cast_ray.models.fused import speed_up
from cast_ray.models.loading import load_target
from cast_ray.models.target import ATTENTION_NAME, Target
from tests.support import TINY, save_tiny_model

if sys.platform != "linux":
    pytest.skip("compiled kernels are for Linux", allow_module_level=True)
assert native.available(), "numba is a dependency, so a failure to compile is one"

PAGE = 4
SHAPE = {
    **TINY,
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**{**SHAPE, "head_dim": 64}, sliding_window=None),
    "qwen2": Qwen2Config(**{**SHAPE, "hidden_size": 192}),
    "qwen3": Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}),
}
OTHERS: dict[str, Any] = {
    "windows": MistralConfig(**SHAPE, sliding_window=4),
    "narrow heads": LlamaConfig(**{**SHAPE, "head_dim": 8}),
    "another activation": LlamaConfig(**SHAPE, hidden_act="gelu"),
}


def load(folder: Path) -> Target:
    loaded = load_target(str(folder), torch.float32, torch.device("cpu"), attn_implementation=ATTENTION_NAME)
    speed_up(loaded.model)
    target = Target(loaded, SdpaBackend(PAGE), slots=400, taps=(0, 2))
    target.cache.data.normal_()
    return target


def tree_step(contexts: list[int], nodes: int, tokens: Tensor) -> Step:
    """Requests with random pages and trees of `nodes` new tokens: node i hangs below node (i - 1) // 2."""
    count = len(contexts)
    generator = torch.Generator().manual_seed(len(contexts) * 100 + nodes)
    pages = -(-(max(contexts) + nodes) // PAGE)
    tables = torch.randperm(100, generator=generator)[: count * pages].view(count, pages)
    mask = torch.eye(nodes, dtype=torch.bool)
    depth = torch.zeros(nodes, dtype=torch.int64)
    for node in range(1, nodes):
        parent = (node - 1) // 2
        mask[node] |= mask[parent]
        depth[node] = depth[parent] + 1
    places = torch.tensor(contexts)[:, None] + torch.arange(nodes)
    slots = tables.gather(1, places // PAGE) * PAGE + places % PAGE
    positions = torch.tensor(contexts)[:, None] + depth
    group = Group(0, [nodes] * count, contexts, tables, positions, mask.expand(count, nodes, nodes))
    return Step(tokens, positions.reshape(-1), slots.reshape(-1), [group])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_features_are_those_of_the_plain_layers(name: str, tmp_path: Path) -> None:
    target = load(save_tiny_model(tmp_path, CONFIGS[name]))
    compiled = target.native
    assert compiled is not None
    for contexts, nodes in [([9], 1), ([0], 5), ([7, 30, 0], 1), ([13, 6, 22], 7), ([40], 33)]:
        tokens = torch.arange(len(contexts) * nodes) % 50
        step, rows = tree_step(contexts, nodes, tokens), torch.arange(tokens.shape[0])
        with torch.inference_mode():
            found = target.forward(step, rows)
            written = target.cache.data.clone()
            target.native = None
            expected = target.forward(step, rows)
            target.native = compiled
        assert found.features is not None
        assert expected.features is not None
        torch.testing.assert_close(found.logits, expected.logits, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found.features, expected.features, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(written, target.cache.data, atol=2e-5, rtol=1e-5)


def test_a_token_has_the_same_bits_in_a_tree_alone_and_in_a_batch(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    target = load(save_tiny_model(tmp_path, CONFIGS["qwen3"]))
    nodes, context = 15, 21
    tokens = torch.arange(nodes) + 7
    tree = tree_step([context], nodes, tokens)
    assert tree.groups[0].mask is not None
    table, mask = tree.groups[0].tables, tree.groups[0].mask[0]
    others = torch.arange(100)[~torch.isin(torch.arange(100), table)][:60].view(6, 10)
    with torch.inference_mode():
        whole = target.forward(tree, torch.arange(nodes)).logits
        path = mask[nodes - 1].nonzero()[:, 0]  # from the root to the last leaf
        for threads, (step, node) in enumerate(enumerate(path.tolist())):
            torch.set_num_threads(1 + threads % 2)
            place = context + step
            slot = table[0, place // PAGE] * PAGE + place % PAGE
            # The same token as one of seven requests with one new token each.
            tables = torch.cat([torch.nn.functional.pad(table, (0, 10 - table.shape[1])), others])
            places = torch.tensor([place, 1, 2, 3, 17, 30, 39])
            group = Group(0, [1] * 7, places.tolist(), tables, places[:, None])
            slots = tables.gather(1, places[:, None] // PAGE)[:, 0] * PAGE + places % PAGE
            assert slots[0] == slot
            ids = torch.cat([tokens[node][None], torch.arange(6)])
            alone = target.forward(Step(ids, places, slots, [group]), torch.arange(7)).logits
            assert torch.equal(alone[0], whole[node]), step
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_kinds_keep_their_modules(name: str, tmp_path: Path) -> None:
    assert load(save_tiny_model(tmp_path, OTHERS[name])).native is None


def test_long_prompts_and_empty_steps_are_left_to_pytorch(tmp_path: Path) -> None:
    target = load(save_tiny_model(tmp_path, CONFIGS["llama"]))
    assert target.native is not None
    assert target.native.can_run(tree_step([3], 8, torch.arange(8)))
    assert not target.native.can_run(tree_step([3], 257, torch.arange(257)))
