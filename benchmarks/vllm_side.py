"""vLLM's end of `decode.py --concurrency`: runs in vLLM's own virtual environment, one line of prompts in, one out.

    VENV/bin/python vllm_side.py '{"model": FOLDER, "dtype": "float32", "max_tokens": 64, ...}'

Reads JSON lists of token-id prompts from standard input; writes `RESULT {"seconds": ...}` for each to standard output.
Imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
import time

import vllm


def main() -> None:
    settings = json.loads(sys.argv[1])
    engine = vllm.LLM(
        model=settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["max_context"],
        max_num_seqs=settings["max_batch_size"],
        seed=0,
    )
    params = vllm.SamplingParams(temperature=0.0, max_tokens=settings["max_tokens"], ignore_eos=True, detokenize=True)
    print("RESULT", json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        prompts = [{"prompt_token_ids": ids} for ids in json.loads(line)]
        started = time.perf_counter()
        outs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert all(len(out.outputs[0].token_ids) == settings["max_tokens"] for out in outs)
        print("RESULT", json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
