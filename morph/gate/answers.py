"""Answers of the base to the prompts of a traffic: batched sampling with a key-value cache, all-attention."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from morph.errors import CorruptFile
from morph.model.model import MorphModel


@dataclass
class Requests:
    """Prompts with the base's answers.

    Attributes:
        prompts: token ids. kinds: task of each prompt. splits: `train`, `held` or `eval`, e.g.
        answers: token ids after each prompt, at least one once sampled.
    """

    prompts: list[list[int]]
    kinds: list[str]
    splits: list[str]
    answers: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def lengths(self) -> list[int]:
        """Prompt tokens of each request."""
        return [len(prompt) for prompt in self.prompts]

    @property
    def mean_answer_tokens(self) -> float:
        """M of the cost table."""
        return sum(map(len, self.answers)) / len(self.answers)

    def where(self, *splits: str) -> list[int]:
        """Indices of the requests of these splits."""
        return [i for i, split in enumerate(self.splits) if split in splits]

    def save(self, path: Path) -> None:
        """Write an npz file."""
        arrays: dict[str, Any] = {}
        for name, lists in (("prompts", self.prompts), ("answers", self.answers)):
            arrays[name] = np.array([token for tokens in lists for token in tokens], dtype=np.int32)
            arrays[f"{name}_lengths"] = np.array([len(tokens) for tokens in lists], dtype=np.int32)
        labels = json.dumps({"kinds": self.kinds, "splits": self.splits})
        np.savez_compressed(path, labels=np.frombuffer(labels.encode(), dtype=np.uint8), **arrays)

    @classmethod
    def load(cls, path: Path) -> Requests:
        """Read what `save` wrote.

        Raises:
            CorruptFile: no such file, or not of this format.
        """
        try:
            with np.load(path) as file:
                lists = []
                for name in ("prompts", "answers"):
                    ends = np.cumsum(file[f"{name}_lengths"])
                    parts = np.split(file[name], ends[:-1]) if len(ends) else []
                    lists.append([part.tolist() for part in parts])
                labels = json.loads(file["labels"].tobytes())
        except (OSError, KeyError, ValueError) as error:
            raise CorruptFile(f"traffic {path} is not readable ({error}); build it again") from error
        return cls(lists[0], labels["kinds"], labels["splits"], lists[1])


def batches(lengths: Sequence[int], rows: int, tokens: int) -> list[list[int]]:
    """Indices in groups of similar length, each of at most `rows` members and `tokens` padded tokens, or one member."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and len(groups[-1]) < rows and (len(groups[-1]) + 1) * longest <= tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


@torch.no_grad()
def sample_answers(
    model: MorphModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 64,
    greedy_share: float = 0.5,
    seed: int = 0,
    batch_tokens: int = 131_072,
) -> list[list[int]]:
    """The base's answer to each prompt, ended by an end token or after `max_tokens`.

    Args:
        greedy_share: this share of the requests, chosen by their index, is decoded greedily, the rest at temperature 1.
        batch_tokens: padded prompt tokens per batch.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    draws = torch.rand(len(prompts), max_tokens, generator=torch.Generator().manual_seed(seed))
    greedy = torch.rand(len(prompts), generator=torch.Generator().manual_seed(seed + 1)) < greedy_share
    for group in batches([len(p) for p in prompts], 512, batch_tokens):
        made = _sample_batch(model, [prompts[i] for i in group], max_tokens, greedy[group], draws[group])
        for index, answer in zip(group, made, strict=True):
            answers[index] = answer
    return answers


def _sample_batch(
    model: MorphModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    greedy: torch.Tensor,
    draws: torch.Tensor,
) -> list[list[int]]:
    device = model.embedding.weight.device
    config = model.config
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    count, longest = len(prompts), int(lengths.max())
    room = longest + max_tokens
    tokens = torch.zeros(count, longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    tokens, greedy, draws = tokens.to(device), greedy.to(device), draws.to(device)
    cos, sin = model.rope(room, device)
    shape = (count, config.num_kv_heads, room, config.head_dim)
    caches = [torch.zeros(2, *shape, dtype=model.embedding.weight.dtype, device=device) for _ in model.layers]

    hidden = model.embedding(tokens).float()
    for block, cache in zip(model.layers, caches, strict=True):
        assert block.attention is not None, "the base has attention in every block"
        q, k, v = block.attention.project(block.input_norm(hidden), (cos[:longest], sin[:longest]))
        cache[0, :, :, :longest], cache[1, :, :, :longest] = k, v
        hidden = block.finish(hidden, block.attention.attend(q, k, v))
    state = hidden[torch.arange(count, device=device), lengths - 1]
    rows, keys = torch.arange(count, device=device), torch.arange(room, device=device)
    ends = torch.tensor(config.eos_token_ids, device=device)
    finished = torch.zeros(count, dtype=torch.bool, device=device)
    steps = []
    for step in range(max_tokens):
        logits = model.logits(model.norm(state)).float()
        token = torch.where(greedy, logits.argmax(-1), _inverse_cdf(logits, draws[:, step]))
        steps.append(torch.where(finished, -1, token))
        finished |= torch.isin(token, ends)
        if step + 1 == max_tokens or (step % 8 == 7 and bool(finished.all())):
            break
        at = lengths + step
        rope = (cos[at][:, None], sin[at][:, None])
        mask = torch.where(keys[None, :] <= at[:, None], 0.0, -torch.inf)[:, None, None, :]
        hidden = model.embedding(token)[:, None].float()
        for block, cache in zip(model.layers, caches, strict=True):
            assert block.attention is not None
            q, k, v = block.attention.project(block.input_norm(hidden), rope)
            cache[0, rows, :, at], cache[1, rows, :, at] = k[:, :, 0], v[:, :, 0]
            mixed = block.attention.o_proj(_attend_cache(q, cache[0], cache[1], mask))
            hidden = block.finish(hidden, mixed)
        state = hidden[:, 0]
    made = torch.stack(steps, dim=1).tolist()
    return [[token for token in row if token >= 0] for row in made]


def _attend_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of one token per row over its cache, `[rows, 1, q heads * head_dim]`; the cache is read as it lies.

    Args:
        q: `[rows, heads, 1, head_dim]`. k, v: `[rows, kv heads, room, head_dim]`. mask: float32 `[rows, 1, 1, room]`.
    """
    rows, heads, _, width = q.shape
    grouped = q.reshape(rows, k.shape[1], heads // k.shape[1], width)
    scores = (grouped @ k.transpose(-1, -2)).float() * width**-0.5 + mask
    return (scores.softmax(-1).to(v.dtype) @ v).reshape(rows, 1, heads * width)


def _inverse_cdf(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """One token per row at temperature 1; `draws` uniform in [0, 1)."""
    cdf = logits.softmax(-1).cumsum(-1)
    index = torch.searchsorted(cdf, (draws[:, None] * cdf[:, -1:]).contiguous(), right=True).squeeze(-1)
    return index.clamp_max(logits.shape[-1] - 1)
