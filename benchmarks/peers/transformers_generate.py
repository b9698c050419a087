"""Batches for `transformers` generate, run in a process of their own and driven over stdin and stdout.

    python -m benchmarks.peers.transformers_generate --model out/smollm2-hf --dtype bfloat16

One JSON object per line in, `{"prompts": [[ids]], "max_tokens": n, "batch": b}`; one per line out: the
times of each prompt. transformers has no scheduler here: it runs static batches, one after the other,
and a batch's requests all start and end together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.client import Timing


class StepClock(StoppingCriteria):
    """Never stops; notes when each token of the batch is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Called by generate after each token; input_ids: int64 [batch, tokens so far]."""
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run_batch(model: Any, prompts: Sequence[list[int]], max_tokens: int) -> list[Timing]:
    """Greedy answers of exactly `max_tokens` tokens to prompts of equal length, as one static batch."""
    clock = StepClock()
    started = time.perf_counter()
    ids = torch.tensor(prompts)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=max_tokens,
        max_new_tokens=max_tokens,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    made = output.shape[1] - ids.shape[1]
    if made != max_tokens:
        raise RuntimeError(f"generate made {made} tokens, asked for {max_tokens}")
    ttft, e2e = clock.times[0] - started, clock.times[-1] - started
    return [Timing(started, ttft, e2e, len(prompt), max_tokens) for prompt in prompts]


def main() -> None:
    """Answer jobs until stdin ends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    arguments = parser.parse_args()
    # Answers keep the real stdout; whatever a library prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    model.eval()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        timings: list[Timing] = []
        for first in range(0, len(job["prompts"]), job["batch"]):
            batch = job["prompts"][first : first + job["batch"]]
            timings += run_batch(model, batch, job["max_tokens"])
        print(json.dumps([asdict(timing) for timing in timings]), file=answers, flush=True)


if __name__ == "__main__":
    main()
