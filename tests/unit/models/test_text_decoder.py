"""Of a model with a vision tower the text decoder alone says the same, and its forwards can be captured."""

from __future__ import annotations

from pathlib import Path

import torch

from cast_ray import Engine, EngineConfig, SamplingParams
from cast_ray.models.loading import load_target
from cast_ray.models.text_decoder import text_alone
from tests import families
from tests.support import qwen3, save_tiny_model

CPU = torch.device("cpu")


@torch.inference_mode()
def test_it_gives_the_whole_models_logits_with_its_own_weights(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, families.gemma3_with_eyes(), spread=2.0)
    loaded = load_target(str(tmp_path), torch.float32, CPU)
    whole = loaded.model
    alone = text_alone(loaded)
    assert type(alone.model).__name__ == "Gemma3ForCausalLM"
    tokens = torch.randint(12, (2, 30))
    assert alone.model(tokens).logits.equal(whole(tokens).logits)
    assert not any("vision" in name for name, _ in alone.model.named_parameters())
    assert alone.model.get_input_embeddings() is whole.get_input_embeddings()


def test_a_model_of_text_stays_as_it_is(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, qwen3())
    loaded = load_target(str(tmp_path), torch.float32, CPU)
    assert text_alone(loaded) is loaded


def test_its_forwards_are_replayed_in_an_engine(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, families.gemma3_with_eyes(), spread=2.0)
    shared = {"target": str(tmp_path), "dtype": "float32", "device": "cpu", "max_context": 200, "max_batch_size": 2}
    found = {}
    for graphs in ("off", "on"):
        engine = Engine(EngineConfig(**shared, drafter="none", graphs=graphs, graph_seconds=0.0))
        outs = engine.generate([[1, 2, 3] * 9, [4]], SamplingParams(max_tokens=12, temperature=0.5, seed=1))
        found[graphs] = [out.token_ids for out in outs]
    assert found["on"] == found["off"]
    report = engine.stats()["graphs"]
    assert report["off"] is None
    assert report["replays"] > 5
