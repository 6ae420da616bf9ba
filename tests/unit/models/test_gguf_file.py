"""GGUF files keep their values, are converted once, and leave nothing half done."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from cast_ray.models import gguf_file
from cast_ray.models.loading import load_target
from tests.checkpoints import (
    CPU,
    VOCAB,
    refused,
    write_gguf,
)

pytestmark = pytest.mark.usefixtures("own_caches")


def count_conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    done: list[Path] = []
    convert = gguf_file._convert
    monkeypatch.setattr(gguf_file, "_convert", lambda path, folder: (done.append(path), convert(path, folder)))
    return done


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
