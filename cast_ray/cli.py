"""The `cast-ray` command: its subcommands, and how a failure ends the process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from cast_ray.commands.calibrate import calibrate
from cast_ray.commands.check import check
from cast_ray.commands.check_drafter import check_drafter
from cast_ray.commands.doctor import doctor
from cast_ray.commands.explain import explain
from cast_ray.commands.generate import generate
from cast_ray.commands.serve import serve
from cast_ray.commands.sweep import sweep
from cast_ray.commands.train_drafter import train_drafter
from cast_ray.errors import CastRayError, EngineError

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2

app = typer.Typer(
    name="cast-ray", help="Lossless batch generation on Ray.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.command()(generate)
app.command()(serve)
app.command()(calibrate)
app.command()(sweep)
app.command()(explain)
app.command()(check)
app.command()(check_drafter)
app.command()(train_drafter)
app.command()(doctor)


def run(command: Callable[[], Any]) -> None:
    """Call command and leave the process: 0 when done, 2 for bad input or settings, 1 for a failure, one line each."""
    try:
        command()
    except CastRayError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(EXIT_FAILURE if isinstance(error, EngineError) else EXIT_BAD_INPUT)


def main() -> None:
    """The console script."""
    run(app)


def main_generate() -> None:
    """`generate` by itself, for jobs/batch_generate.py."""
    run(lambda: typer.run(generate))


def main_calibrate() -> None:
    """`calibrate` by itself, for jobs/calibrate.py."""
    run(lambda: typer.run(calibrate))


def main_train_drafter() -> None:
    """`train-drafter` by itself, for jobs/train_drafter.py."""
    run(lambda: typer.run(train_drafter))


if __name__ == "__main__":
    main()
