"""A GGUF file as a Hugging Face folder: dequantised once by transformers, then kept in the user's cache.

Weights stay exactly as transformers dequantises them. It runs nothing, and never writes beside the GGUF file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from gguf import GGUFReader
from safetensors import SafetensorError
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers import modeling_gguf_pytorch_utils as gguf_weights

from cast_ray.config import cache_dir
from cast_ray.errors import ModelError, describe

logger = logging.getLogger(__name__)

# Raise it when this file writes other folders than before, so that older copies are left alone.
FORMAT = 1

# Vocabularies whose merges were learned with every digit cut off first. transformers (5.24) has no rule for this name
# and falls back to GPT-2's, which ties the last of several blanks to the digit after them: a list's "\n\n1" would
# become two newline tokens where the model was trained on one.
DIGITS_APART = {"smollm"}


def converted_folder(path: Path) -> Path:
    """The folder of safetensors, config and tokenizer for a GGUF file; the first call converts, others find it.

    The folder lies in the user's cache under the file's name and a digest of its content, so it serves every copy of
    that file. Weights are kept in float32, 4 bytes each (SmolLM2-135M: 538 MB), because a float32 engine must compute
    with the very values that the GGUF encodes; a bfloat16 engine rounds from them. Processes that come at once wait
    for the one that converts. Raises ModelError.
    """
    key = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem)}-{_digest(path)}"
    models = cache_dir() / "models"
    folder = models / key
    if folder.is_dir():  # it came by a rename, so it is whole
        return folder
    remedy = "Free some space there, or set CAST_RAY_HOME to a folder that can be written"
    try:
        models.mkdir(parents=True, exist_ok=True)
        with FileLock(models / f"{key}.lock"):
            if not folder.is_dir():
                for leftover in models.glob(f"{key}.part-*"):  # of a process that was killed; the lock is ours
                    shutil.rmtree(leftover, ignore_errors=True)
                part = models / f"{key}.part-{uuid.uuid4().hex[:8]}"
                try:
                    _convert(path, part)
                    os.rename(part, folder)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        problem = f"the converted copy cannot be kept in {models} ({error})"
        raise ModelError(describe("target", str(path), problem, remedy)) from error
    return folder


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                problem = "is not a GGUF file (its first four bytes are not `GGUF`)"
                remedy = "Pass a .gguf file, or the folder that holds config.json and the safetensors"
                raise ModelError(describe("target", str(path), problem, remedy))
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        raise ModelError(describe("target", str(path), problem, "Check the file and its permissions")) from error
    # Another transformers may name or permute weights otherwise, so its copies are its own.
    release = ".".join(transformers.__version__.split(".")[:2])
    digest.update(f"transformers {release} format {FORMAT}".encode())
    return digest.hexdigest()[:16]


def _convert(path: Path, folder: Path) -> None:
    logger.info("Converting %s once; the copy is kept in %s", path, folder.parent)
    try:
        model, missing = _read_model(path)
        tokenizer = _read_tokenizer(path)
    except Exception as error:  # transformers and gguf raise many kinds for one bad file
        detail = " ".join(str(error).split())[:300] or type(error).__name__
        problem = f"transformers cannot read this GGUF file ({detail})"
        remedy = "If the file may be cut short, fetch it again; else use the model's safetensors folder or hub id"
        raise ModelError(describe("target", str(path), problem, remedy)) from error
    if missing:
        problem = f"lacks {len(missing)} weights of its architecture, first {missing[0]}"
        raise ModelError(describe("target", str(path), problem, "Fetch or convert the file again"))
    folder.mkdir()  # not tempfile.mkdtemp: the user's umask decides who may read the cache
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_model(path: Path) -> tuple[Any, list[str]]:
    """The float32 model, and the names of weights that the file lacks."""
    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    # `from_pretrained(gguf_file=...)` reads the same tensors through this function, but asks for `accelerate` and
    # returns a model marked as quantised, which refuses to be saved.
    with _no_bar():
        tensors = gguf_weights.load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.float32
        )["tensors"]
    model, info = type(skeleton).from_pretrained(
        None, config=config, state_dict=tensors, dtype=torch.float32, output_loading_info=True
    )
    return model, sorted(info["missing_keys"])


def _read_tokenizer(path: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    rule = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if rule is not None and rule.contents() in DIGITS_APART:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer


@contextmanager
def _no_bar() -> Iterator[None]:
    """That function draws its own progress bar, which no setting of transformers turns off."""
    bar = gguf_weights.tqdm
    gguf_weights.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        gguf_weights.tqdm = bar
