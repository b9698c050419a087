"""The requests of a fit or a calibration: from a file of requests, a JSON-lines file of prompts or a folder of sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from morph.config import ModelConfig
from morph.errors import InvalidRequest, ModelNotFound
from morph.gate.answers import Requests
from morph.gate.traffic import PromptFactory, read_prompts, tokenize

SHORTEST = 8
"""Prompts of fewer tokens say too little about any block."""


def given_requests(path: Path, config: ModelConfig) -> Requests:
    """A file that `Requests.save` wrote, checked against the model.

    Raises:
        ModelNotFound: no such file. InvalidRequest: requests that the model cannot take.
    """
    if not path.exists():
        raise ModelNotFound(f"no file {path}; --requests names a file of requests (.npz)")
    requests = Requests.load(path)
    if not len(requests):
        raise InvalidRequest(f"--requests {path} holds no request; build it again")
    for number, prompt in enumerate(requests.prompts):
        answer = requests.answers[number] if requests.answers else []
        tokens = [*prompt, *answer]
        if not prompt or max(tokens) >= config.vocab_size or min(tokens) < 0:
            raise InvalidRequest(
                f"--requests {path}: request {number} has tokens that this model does not have (or none at all); "
                "it was made for another model"
            )
        if len(tokens) > config.max_context:
            raise InvalidRequest(
                f"--requests {path}: request {number} has {len(tokens)} tokens, the model's context is "
                f"{config.max_context}; leave it out"
            )
    return requests


def drawn_requests(data: Path, tokenizer: Any, count: int, longest: int, seed: int = 0) -> Requests:
    """Up to `count` different prompts of a folder of sets, or of a JSON-lines file, without answers.

    Raises:
        ModelNotFound: no such folder or file. InvalidRequest: no usable prompt in it.
    """
    if not data.exists():
        raise ModelNotFound(f"no folder or file {data}; --data names prompts (a folder of sets, or JSON lines)")
    if data.is_dir():
        prompts = PromptFactory(data, seed=seed, longest=longest).draw(count)
    else:
        prompts = read_prompts(data)[:count]
    seen: set[tuple[int, ...]] = set()
    kinds, tokens = [], []
    for prompt in prompts:
        ids = tokenize(tokenizer, prompt, longest)
        if len(ids) >= SHORTEST and tuple(ids) not in seen:
            seen.add(tuple(ids))
            kinds.append(prompt.kind)
            tokens.append(ids)
    if not tokens:
        raise InvalidRequest(f"--data {data} has no prompt of {SHORTEST} to {longest} tokens; give other prompts")
    return Requests(tokens, kinds, ["train"] * len(tokens), [])
