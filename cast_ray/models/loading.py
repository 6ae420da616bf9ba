"""Finds a target by name, loads it, and says plainly why it cannot: a folder, a hub id, a .gguf file, or `embedded`.

Only safetensors and GGUF are read, never pickles. It does not know how the engine drives the model.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub import utils as hub_utils
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from cast_ray.errors import ModelError, describe
from cast_ray.models.embedded import HUB_ID, INSTALL, embedded_gguf
from cast_ray.models.fit import check_fits
from cast_ray.models.gguf_file import converted_folder
from cast_ray.models.quantized import check_quantization, make_plain

HUB_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# What a model needs, from the top of a repository: subfolders and `consolidated*` hold the same weights again.
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.safetensors"]
HUB_SKIPPED = ["*/*", "consolidated*"]
TOKENIZER_FILES = ["tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json"]

_QUIET = threading.RLock()
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedTarget:
    """A target ready to run, and what the engine must know of it."""

    model: PreTrainedModel  # eval mode, on its device, in its dtype, without gradients
    tokenizer: PreTrainedTokenizerBase
    name: str  # what the user asked for
    source: str  # where it came from: folder, hub id or GGUF file
    eos_token_ids: tuple[int, ...]  # every token that ends an output; may be empty
    max_context: int  # positions that the model was made for


def load_target(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    check: Callable[[Any, str], None] | None = None,
) -> LoadedTarget:
    """Load a target and its tokenizer.

    name: a Hugging Face folder, a hub id (`org/name`), a .gguf file, or `embedded`. trust_remote_code: run modelling
    code that comes with the checkpoint. attn_implementation: a name known to transformers' AttentionInterface; None:
    its own choice. check: sees the config and the name before weights are read, and may refuse; a model of foreign
    code is not shown to it. The first load of a GGUF file converts it (see `gguf_file.converted_folder`). Raises
    ModelError.
    """
    folder, source = _find(name, trust_remote_code)
    with _quiet():
        config, foreign = _read_config(name, folder, trust_remote_code)
        if check is not None and not foreign:
            check(config, name)
        quantized = check_quantization(config, name, device)
        plain = quantized is None or make_plain(config, quantized, device)
        _require_weights(name, folder)
        check_fits(name, folder, dtype, device)
        max_context = getattr(config.get_text_config(), "max_position_embeddings", None)
        if not max_context:
            remedy = "Add max_position_embeddings to config.json"
            raise ModelError(describe("target", name, f"{folder} does not say how long its context is", remedy))
        tokenizer = _read_tokenizer(name, folder, trust_remote_code)
        with _explained(name, f"the weights in {folder} cannot be loaded", f"Check that folder; {_again(source)}"):
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attn_implementation,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                # Quantised layers are made on the device that they compute on.
                device_map=None if plain else {"": device},
            )
    if missing := sorted(info["missing_keys"]):  # transformers fills them with random numbers
        problem = f"the weights in {folder} lack {len(missing)} tensors, first {missing[0]}"
        raise ModelError(describe("target", name, problem, f"Check that folder; {_again(source)}"))
    if plain:
        remedy = "Use a device with more memory, bfloat16, or a smaller model"
        with _explained(name, f"does not go onto {device}", remedy):
            model = model.to(device)
    if foreign and check is not None:
        problem = "target %r runs code of its checkpoint, and nothing shows that trees are exact under it: %s"
        logger.warning(problem, name, "try `cast-ray check` first")
    if plain and quantized is not None:
        logger.warning("target %r: its %s weights become plain %s ones on this device", name, quantized, model.dtype)
    return LoadedTarget(
        model=model.requires_grad_(False).eval(),
        tokenizer=tokenizer,
        name=name,
        source=source,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_context=int(max_context),
    )


def load_outline(
    name: str, *, trust_remote_code: bool = False, check: Callable[[Any, str], None] | None = None
) -> LoadedTarget:
    """A target without its weights, which are not read: the model is on the meta device. Named and refused as by
    `load_target`, for what can be known without weights. Raises ModelError."""
    folder, source = _find(name, trust_remote_code)
    with _quiet():
        config, foreign = _read_config(name, folder, trust_remote_code)
        if check is not None and not foreign:
            check(config, name)
        _require_weights(name, folder)
        tokenizer = _read_tokenizer(name, folder, trust_remote_code)
        with (
            _explained(name, f"no model can be made of {folder}", f"Check its config.json; {_again(source)}"),
            torch.device("meta"),
        ):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    return LoadedTarget(model, tokenizer, name, source, _eos_token_ids(model, tokenizer), int(longest))


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a target alone, named as for `load_target`. Raises ModelError."""
    folder, _ = _find(name, trust_remote_code)
    with _quiet():
        return _read_tokenizer(name, folder, trust_remote_code)


def target_fingerprint(loaded: LoadedTarget) -> dict[str, Any]:
    """What makes two targets cost the same time: their name and shape, as plain values for a profile's key."""
    config = loaded.model.config.get_text_config()
    return {
        "name": loaded.name,
        "architecture": type(loaded.model).__name__,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None),
        "experts": getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None),
        "vocab_size": config.vocab_size,
    }


def _find(name: str, trust_remote_code: bool) -> tuple[Path, str]:
    """The folder to load from, and the source to tell the user."""
    if name == "embedded":
        return _find_embedded(trust_remote_code)
    path = Path(name).expanduser()
    if path.is_dir():
        return path, str(path)
    if path.is_file():
        with _quiet():
            return converted_folder(path), str(path)
    if HUB_PATTERN.fullmatch(name) and not name.endswith(".gguf"):
        problem = "is no folder here and cannot be fetched from the hub"
        remedy = "Check the spelling, the network, HF_TOKEN (for gated models) and HF_HOME (the hub's cache)"
        return _fetch(name, name, trust_remote_code, problem, remedy), name
    remedy = "Check the path; a hub id is written org/name, and `embedded` is SmolLM2-135M-Instruct"
    raise ModelError(describe("target", name, "no such file or folder", remedy))


def _find_embedded(trust_remote_code: bool) -> tuple[Path, str]:
    if file := embedded_gguf():
        with _quiet():
            return converted_folder(file), str(file)
    problem = f"the package that holds it is not installed, and {HUB_ID} cannot be fetched from the hub"
    remedy = f"Run `{INSTALL}`; or give network access, or an HF_HOME whose cache has {HUB_ID}"
    return _fetch("embedded", HUB_ID, trust_remote_code, problem, remedy), HUB_ID


def _fetch(name: str, hub_id: str, trust_remote_code: bool, problem: str, remedy: str) -> Path:
    """The folder of a hub model: brought up to date where there is a network, else as the cache has it."""
    wanted = [*HUB_FILES, "*.py"] if trust_remote_code else HUB_FILES
    with _explained(name, problem, remedy):
        return Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=HUB_SKIPPED))


def _read_config(name: str, folder: Path, trust_remote_code: bool) -> tuple[Any, bool]:
    """The config, and whether the model's code comes with the checkpoint."""
    if not (folder / "config.json").is_file():
        remedy = "Pass a folder written by save_pretrained"
        if files := sorted(folder.glob("*.gguf")):
            remedy = f"Pass the GGUF file itself: {files[0]}"
        raise ModelError(describe("target", name, f"{folder} has no config.json", remedy))
    with _explained(name, f"{folder / 'config.json'} cannot be read", "Fetch the checkpoint again"):
        stated = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type, remote = stated.get("model_type"), stated.get("auto_map") or {}
    if model_type not in CONFIG_MAPPING and remote and not trust_remote_code:
        problem = f"its model type {model_type!r} runs code that comes with the checkpoint"
        remedy = f"Read the .py files in {folder}; if you trust them, set trust_remote_code=true"
        raise ModelError(describe("target", name, problem, remedy))
    problem = f"transformers {transformers.__version__} cannot read {folder / 'config.json'}"
    with _explained(name, problem, "Check its model_type; a newer transformers may know it"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    own_code = bool(trust_remote_code and "AutoModelForCausalLM" in remote)
    if not own_code and not _is_causal_lm(config):
        problem = f"is no causal language model ({', '.join(config.architectures or [str(model_type)])})"
        raise ModelError(describe("target", name, problem, "Use a decoder-only model, such as Llama or Qwen3"))
    return config, own_code


def _is_causal_lm(config: Any) -> bool:
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if known is None or config.is_encoder_decoder:
        return False
    if config.architectures:
        # Of some models with eyes, transformers loads the text part alone.
        stated = {kind.replace("ForConditionalGeneration", "ForCausalLM") for kind in config.architectures}
        kinds = stated.union(config.architectures)
        return any(kind == known or "CausalLM" in kind or "LMHead" in kind for kind in kinds)
    return getattr(config, "is_decoder", True) is not False  # encoders such as BERT can be told to decode


def _require_weights(name: str, folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        problem = f"{folder} has its weights as pickles only ({pickles[0]}), and a pickle can run any code"
        remedy = (
            "If you trust them, convert them: AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=False)"
            ".save_pretrained(FOLDER)"
        )
    else:
        problem, remedy = f"{folder} has no weights (*.safetensors)", "Fetch the checkpoint again, with its weights"
    raise ModelError(describe("target", name, problem, remedy))


def _read_tokenizer(name: str, folder: Path, trust_remote_code: bool) -> Any:
    remedy = "Copy the tokenizer's files (tokenizer.json, tokenizer_config.json) of the same model there"
    # Some tokenizer classes start from an empty vocabulary where there is no file, so look before asking.
    if not any(file for kind in TOKENIZER_FILES for file in folder.glob(kind)):
        raise ModelError(describe("target", name, f"{folder} has no tokenizer", remedy))
    with _explained(name, f"the tokenizer in {folder} cannot be read", remedy):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The union of what the generation config, the config and the tokenizer call the end, in that order.

    A tokenizer may have tokens that the model has no logits for: these never come.
    """
    text = model.config.get_text_config()
    stated = [
        getattr(model.generation_config, "eos_token_id", None),
        getattr(text, "eos_token_id", None),
        tokenizer.eos_token_id,
    ]
    ids = [item for value in stated for item in (value if isinstance(value, list | tuple) else [value])]
    return tuple(dict.fromkeys(int(item) for item in ids if item is not None and 0 <= int(item) < text.vocab_size))


def _again(source: str) -> str:
    if source.endswith(".gguf"):
        return "delete it, and the GGUF file is converted again"
    return "fetch the checkpoint again if files are cut short or missing"


@contextmanager
def _explained(name: str, problem: str, remedy: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a ModelError. The libraries below raise dozens of kinds; the cause is kept."""
    try:
        yield
    except Exception as error:
        detail = " ".join(str(error).split())[:300]
        raise ModelError(describe("target", name, f"{problem} ({type(error).__name__}: {detail})", remedy)) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or warnings of transformers meanwhile. Its switches are global, so loads take turns."""
    with _QUIET:
        verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        hub_bars = not hub_utils.are_progress_bars_disabled()
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()  # the hub's too
        try:
            yield
        finally:
            hf_logging.set_verbosity(verbosity)
            if bars:
                hf_logging.enable_progress_bar()
            if not hub_bars:
                hub_utils.disable_progress_bars()
