"""What `load_target` promises of folders and hub ids: good ones load exactly, bad ones say what to do."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    T5Config,
    dynamic_module_utils,
)
from transformers.utils import logging as hf_logging

from cast_ray.models.families import check_family
from cast_ray.models.loading import load_target, target_fingerprint
from tests import families
from tests.checkpoints import (
    CPU,
    VOCAB,
    cache_hub_model,
    edit_config,
    read_weights,
    refused,
    write_folder,
    write_gguf,
    write_tokenizer,
)

pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_folder_loads_with_its_exact_weights_ready_to_run(tmp_path, kind):
    folder = write_folder(tmp_path / "m", kind)
    loaded = load_target(str(folder), torch.float32, CPU)
    weights, stored = loaded.model.state_dict(), read_weights(folder)
    assert all(torch.equal(weights[name], value) for name, value in stored.items())
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert (loaded.name, loaded.source, loaded.max_context) == (str(folder), str(folder), 128)
    assert loaded.tokenizer.decode(loaded.tokenizer("hé  12")["input_ids"]) == "hé  12"
    assert loaded.model(torch.tensor([[4, 5]])).logits.shape == (1, 2, len(VOCAB))


def test_dtype_and_attention_are_what_the_caller_asked_for(tmp_path):
    folder = write_folder(tmp_path / "m")
    loaded = load_target(str(folder), torch.bfloat16, CPU, attn_implementation="eager")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.config._attn_implementation == "eager"
    assert load_target(str(folder), torch.float32, CPU).model.config._attn_implementation == "sdpa"
    refused(folder, "no_such_attention", attn_implementation="no_such_attention")


def test_every_end_token_of_the_three_configs_counts(tmp_path):
    folder = write_folder(tmp_path / "m", eos_token_id=3)
    GenerationConfig(eos_token_id=[7, 3]).save_pretrained(folder)
    assert load_target(str(folder), torch.float32, CPU).eos_token_ids == (7, 3, VOCAB["<|im_end|>"])


def test_an_end_token_that_the_model_has_no_logits_for_is_none(tmp_path):
    folder = write_folder(tmp_path / "m", eos_token_id=len(VOCAB))
    GenerationConfig(eos_token_id=[len(VOCAB) + 1, 5]).save_pretrained(folder)
    assert load_target(str(folder), torch.float32, CPU).eos_token_ids == (5, VOCAB["<|im_end|>"])


def test_a_cached_hub_model_loads_without_a_network(tmp_path):
    snapshot = cache_hub_model(tmp_path, "org/tiny")
    loaded = load_target("org/tiny", torch.float32, CPU)
    assert (loaded.name, loaded.source) == ("org/tiny", "org/tiny")
    stored = read_weights(snapshot)
    assert torch.equal(loaded.model.state_dict()["model.norm.weight"], stored["model.norm.weight"])


def test_loading_prints_nothing_and_leaves_the_logging_of_transformers_as_it_was(tmp_path, capfd):
    folder = write_folder(tmp_path / "m")
    weights = read_weights(folder)
    save_file({**weights, "model.extra": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    path = write_gguf(tmp_path / "tiny.gguf")
    logged: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = logged.append
    hf_logging.add_handler(listener)
    hf_logging.set_verbosity_warning()
    before = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    capfd.readouterr()
    load_target(str(folder), torch.float32, CPU)
    load_target(str(path), torch.float32, CPU)
    (folder / "model.safetensors").write_bytes(b"broken")
    refused(folder)
    hf_logging.remove_handler(listener)
    assert capfd.readouterr() == ("", "")
    assert logged == []
    assert (hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "embeded", "~/nothing/at/all", "org/model.gguf"])
def test_a_path_that_is_not_there_is_told_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr("cast_ray.models.loading.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    refused(name, "no such file or folder", "org/name", "embedded")


def test_a_hub_id_that_cannot_be_fetched_says_what_to_check():
    refused("org/name", "cannot be fetched from the hub", "HF_TOKEN", "HF_HOME")


def test_a_folder_without_config_is_refused_and_a_gguf_inside_is_pointed_out(tmp_path):
    refused(tmp_path, "has no config.json", "save_pretrained")
    path = write_gguf(tmp_path / "tiny.gguf")
    refused(tmp_path, "has no config.json", str(path))


def test_a_config_that_is_not_json_or_of_no_known_type_is_told(tmp_path):
    folder = write_folder(tmp_path / "m")
    edit_config(folder, model_type="fancynet")
    refused(folder, "fancynet", "newer transformers")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "cannot be read")


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    refused(folder, "has no weights", "safetensors")


def test_pickled_weights_are_refused_with_the_way_to_convert_them(tmp_path):
    folder = write_folder(tmp_path / "m")
    torch.save(read_weights(folder), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused(folder, "pytorch_model.bin", "pickle", "use_safetensors=False", "save_pretrained")


def test_damaged_or_incomplete_weights_are_refused(tmp_path):
    folder = write_folder(tmp_path / "m")
    file = folder / "model.safetensors"
    weights = read_weights(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(folder, "cannot be loaded", "cut short")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: value for name, value in weights.items() if name != lost}, file, {"format": "pt"})
    refused(folder, "lack 1 tensors", lost)


def test_a_missing_shard_is_refused(tmp_path):
    folder = write_folder(tmp_path / "m")
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink()
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[-1].unlink()
    refused(folder, "cannot be loaded", shards[-1].name)


def test_models_that_do_not_decode_are_refused(tmp_path):
    small = {"vocab_size": len(VOCAB), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = tmp_path / "bert"
    BertForMaskedLM(BertConfig(**small, intermediate_size=8)).save_pretrained(encoder)
    write_tokenizer(encoder)
    refused(encoder, "no causal language model", "BertForMaskedLM", "decoder-only")
    edit_config(encoder, architectures=None)
    refused(encoder, "no causal language model", "bert")
    seq2seq = write_folder(tmp_path / "t5")
    T5Config(vocab_size=len(VOCAB)).save_pretrained(seq2seq)
    refused(seq2seq, "no causal language model", "t5")


def test_of_a_model_with_eyes_the_text_part_loads_with_its_weights(tmp_path):
    text = families.of("qwen3_5_text", **families.DELTA, vocab_size=len(VOCAB))().to_dict()
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    whole = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=tower)).eval()
    whole.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    loaded = load_target(str(tmp_path), torch.float32, CPU, check=check_family)
    tokens = torch.tensor([[5, 3, 9, 4]])
    torch.testing.assert_close(loaded.model(tokens).logits, whole(tokens).logits)


def test_a_family_that_is_not_known_is_refused_before_its_weights_are_read(tmp_path):
    GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=len(VOCAB), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    refused(tmp_path, "gpt_neox", "not proven", "docs/models.md", check=check_family)


def test_a_model_that_states_no_context_length_is_refused(tmp_path):
    folder = tmp_path / "bloom"
    BloomForCausalLM(BloomConfig(vocab_size=len(VOCAB), hidden_size=8, n_layer=1, n_head=2)).save_pretrained(folder)
    write_tokenizer(folder)
    refused(folder, "how long its context is", "max_position_embeddings")


def test_a_missing_or_broken_tokenizer_is_named(tmp_path):
    folder = write_folder(tmp_path / "m")
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "tokenizer in", "cannot be read", "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    refused(folder, "has no tokenizer", "tokenizer.json")


def test_code_of_a_checkpoint_runs_only_where_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, ran = write_folder(tmp_path / "m"), tmp_path / "ran"
    (folder / "custom.py").write_text(
        "import pathlib\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"pathlib.Path({str(ran)!r}).touch()\n"
        "class TinyConfig(LlamaConfig):\n    model_type = 'tiny_custom'\n"
        "class TinyForCausalLM(LlamaForCausalLM):\n    config_class = TinyConfig\n"
    )
    auto_map = {"AutoConfig": "custom.TinyConfig", "AutoModelForCausalLM": "custom.TinyForCausalLM"}
    edit_config(folder, model_type="tiny_custom", architectures=["TinyForCausalLM"], auto_map=auto_map)
    refused(folder, "tiny_custom", "trust_remote_code=true")
    assert not ran.exists()
    loaded = load_target(str(folder), torch.float32, CPU, trust_remote_code=True)
    assert ran.exists()
    assert type(loaded.model).__name__ == "TinyForCausalLM"


def test_fingerprint_tells_shapes_apart_and_is_plain(tmp_path):
    folder = write_folder(tmp_path / "m")
    one = target_fingerprint(load_target(str(folder), torch.float32, CPU))
    assert one == target_fingerprint(load_target(str(folder), torch.float32, CPU))
    assert json.loads(json.dumps(one)) == one
    assert one["architecture"] == "LlamaForCausalLM"
    write_folder(folder, num_hidden_layers=3)
    assert target_fingerprint(load_target(str(folder), torch.float32, CPU)) != one
