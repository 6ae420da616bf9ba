"""Carries a drafter's training to a GPU machine that has no network, in files of at most 15 MB, and runs it there.

    python benchmarks/train_on_gpu.py pack --target embedded --prompts prompts.jsonl --work WORK --to pack
    python benchmarks/train_on_gpu.py train --pack pack --minutes 6 --output drafter -- --answers 8000 --batch-size 256
    python benchmarks/train_on_gpu.py train --pack pack --tiny --output drafter      # all of it in little, on any CPU

`pack` writes the target's weights in bfloat16, the prompts, the answers that WORK already has, and on request a drafter
to go on from. `train` runs the same job as `cast-ray train-drafter`, with its answers, features and training on the
device; what follows `--` goes to it. It says how long it took in all: time for answers and features comes on top of
`--minutes`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import cast_ray  # noqa: F401 - before PyTorch: it says how long OpenMP threads spin

SHARD_BYTES = 15_000_000
# With --tiny: every step of the job, but hardly any work in each.
TINY = {"answers": 64, "held-out": 8, "evaluated": 2, "answer-tokens": 12, "sequences": 2, "anchors": 8}


def pack(target: str, prompts: Path | None, work: Path | None, start_from: str | None, to: Path) -> list[Path]:
    """Write the pack. Returns its files."""
    import torch

    from cast_ray.drafters.checkpoint import find_drafter
    from cast_ray.models.loading import load_target

    loaded = load_target(target, torch.bfloat16, torch.device("cpu"))
    loaded.model.save_pretrained(to / "target", max_shard_size=SHARD_BYTES)
    loaded.tokenizer.save_pretrained(to / "target")
    if prompts is not None:
        shutil.copyfile(prompts, to / "prompts.jsonl")
    for folder in ("answers", "held_out"):
        if work is not None and (work / folder).exists():
            shutil.copytree(work / folder, to / "work" / folder, dirs_exist_ok=True)
    if start_from is not None:
        shutil.copytree(find_drafter(start_from), to / "start_from", dirs_exist_ok=True)
    cut_large(to)
    return sorted(path for path in to.rglob("*") if path.is_file())


def cut_large(folder: Path) -> None:
    """Replace every file above SHARD_BYTES by pieces of it: one tensor may be larger than a shard."""
    for path in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > SHARD_BYTES]:
        data = path.read_bytes()
        for number, start in enumerate(range(0, len(data), SHARD_BYTES)):
            path.with_name(f"{path.name}.piece{number:03d}").write_bytes(data[start : start + SHARD_BYTES])
        path.unlink()


def unpack(source: Path, to: Path) -> None:
    """The folders as they were before they were cut."""
    shutil.copytree(source, to, dirs_exist_ok=True)
    for first in to.rglob("*.piece000"):
        pieces = sorted(first.parent.glob(f"{first.stem}.piece*"))
        with first.with_suffix("").open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
                piece.unlink()


def train(source: Path, minutes: float, output: Path, device: str, scratch: Path, flags: list[str]) -> None:
    """Unpack beside the output and run the job."""
    from cast_ray.commands.train_drafter import train_drafter

    if not (source / "target").is_dir():
        sys.exit(f"error: pack={str(source)!r} has no target. Make it with the pack command.")
    unpack(source, scratch)
    arguments = ["--target", str(scratch / "target"), "--work", str(scratch / "work"), "--output", str(output)]
    arguments += ["--minutes", str(minutes), "--device", device]
    if (scratch / "prompts.jsonl").exists():
        arguments += ["--prompts", str(scratch / "prompts.jsonl")]
    if (scratch / "start_from").exists():
        arguments += ["--start-from", str(scratch / "start_from")]
    began = time.monotonic()
    sys.argv = ["cast-ray train-drafter", *arguments, *flags]
    import typer

    app = typer.Typer(add_completion=False)
    app.command()(train_drafter)
    app(standalone_mode=False)
    print(f"{time.monotonic() - began:.0f} s in all on {device}; the drafter is in {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("pack", help="write what the other machine needs")
    one.add_argument("--target", default="embedded")
    one.add_argument("--prompts", type=Path)
    one.add_argument("--work", type=Path, help="a work folder whose answers go along")
    one.add_argument("--start-from", help="a drafter to go on from: a folder, or 'embedded'")
    one.add_argument("--to", type=Path, required=True)
    two = commands.add_parser("train", help="run the job from a pack; flags of train-drafter may follow after --")
    two.add_argument("--pack", type=Path, required=True)
    two.add_argument("--minutes", type=float, default=6.0, help="of training; answers and features come before")
    two.add_argument("--output", type=Path, required=True)
    two.add_argument("--device", default="cuda")
    two.add_argument("--tiny", action="store_true", help="hardly any work, on the CPU: to see that all of it runs")
    two.add_argument("--scratch", type=Path, default=Path("train-on-gpu"), help="folder to work in")
    ours, flags = sys.argv[1:], []
    if "--" in ours:
        ours, flags = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    asked = parser.parse_args(ours)
    if asked.command == "pack":
        files = pack(asked.target, asked.prompts, asked.work, asked.start_from, asked.to)
        sizes = [path.stat().st_size for path in files]
        print(f"{len(files)} files, {sum(sizes) / 1e6:.0f} MB in all, the largest {max(sizes) / 1e6:.1f} MB")
    elif asked.tiny:
        small = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
        train(asked.pack, 0.1, asked.output, "cpu", asked.scratch, [*small, *flags])
    else:
        train(asked.pack, asked.minutes, asked.output, asked.device, asked.scratch, flags)


if __name__ == "__main__":
    main()
