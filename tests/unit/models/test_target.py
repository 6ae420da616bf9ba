"""What the engine reads from a target's config: the shape of its cache, and how far its positions go."""

from __future__ import annotations

from transformers import LlamaConfig, Phi3Config, Qwen3NextConfig

from cast_ray.models.target import kv_shape, short_context
from tests.support import qwen3


def test_the_shape_of_the_cache_is_read_from_the_config() -> None:
    assert kv_shape(qwen3(num_hidden_layers=5, num_key_value_heads=1, head_dim=16)) == (5, 1, 16)
    assert kv_shape(LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)) == (2, 4, 16)


def test_layers_without_keys_have_no_place_in_the_cache() -> None:
    assert kv_shape(Qwen3NextConfig(num_hidden_layers=8, num_key_value_heads=2, head_dim=16)) == (2, 2, 16)


def test_contexts_end_where_longrope_changes_its_frequencies() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=128,
        rope_parameters=rope,
        pad_token_id=0,
    )
    assert short_context(config) == 128
    assert short_context(qwen3()) is None
