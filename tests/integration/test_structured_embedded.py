"""Labels and documents of a real model, through a tokenizer that was converted from GGUF."""

from __future__ import annotations

import json

import jsonschema
import pytest

from cast_ray import Engine, EngineConfig, SamplingParams

LABELS = ["positive", "negative", "neutral"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "continent": {"enum": ["Africa", "Asia", "Europe"]},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "continent", "capital"],
    "additionalProperties": False,
}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_embedded_model_labels_and_fills_a_schema() -> None:
    engine = Engine(EngineConfig(width="fixed:7", dtype="float32", max_batch_size=4))
    prompts = [
        chat("Is this review positive, negative or neutral? 'I love this phone, it is great!' Answer in one word."),
        chat("Write JSON about the city of Paris, with city, continent and capital."),
        chat("Name the colour of snow."),
    ]
    params = [
        SamplingParams(choice=LABELS, choice_probabilities=True),
        SamplingParams.from_dict({"json_schema": SCHEMA, "max_tokens": 64}),
        SamplingParams(max_tokens=6),
    ]
    label, document, plain = engine.generate(prompts, params)
    assert label.text in LABELS
    assert label.stats.rounds == 1
    assert label.choice_probabilities is not None
    assert sum(label.choice_probabilities.values()) == pytest.approx(1)
    assert document.finish_reason == "stop"
    jsonschema.validate(json.loads(document.text), SCHEMA)
    assert document.stats.mean_round_length > 1, "what the schema forces is verified in one round"
    assert plain.token_ids == engine.generate(prompts[2:], params[2])[0].token_ids
    print(label.text, label.choice_probabilities, document.text, document.stats)
    engine.check_integrity()
