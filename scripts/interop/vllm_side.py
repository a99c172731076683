"""What vLLM says: one job a process, `python vllm_side.py JOB.json ANSWER.json`, in the environment of vLLM.

A job is {"target", "drafter" (or null), "num_speculative_tokens", "prompts": [[id, ...], ...], "max_tokens"}.
The answer is {"version", "tokens": [[id, ...], ...], "drafts", "stand_ins", "seconds"}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a small model; more threads wait for one another, on a busy machine forever
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the log in order, and one process to end
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import stand_ins
import vllm


def answer(job: dict[str, Any]) -> dict[str, Any]:
    speculative = None
    if job["drafter"] is not None:
        speculative = {
            "method": "dflash",
            "model": job["drafter"],
            "num_speculative_tokens": job["num_speculative_tokens"],
        }
    start = time.perf_counter()
    replaced = stand_ins.put_in()
    llm = vllm.LLM(
        job["target"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=1,  # a batch of another size rounds otherwise
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,  # they count the drafts
        speculative_config=speculative,
        # Scores in bfloat16 tie wherever they are within 1/16 of one another; the target's head in float32 does not.
        hf_overrides={"head_dtype": "float32"},
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return {
        "version": vllm.__version__,
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "drafts": counted.get("vllm:spec_decode_num_drafts", 0),
        "stand_ins": replaced,
        "seconds": time.perf_counter() - start,
    }


if __name__ == "__main__":
    given, written = Path(sys.argv[1]), Path(sys.argv[2])
    written.write_text(json.dumps(answer(json.loads(given.read_text()))))
