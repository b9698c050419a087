"""Morph as a model of lm-eval (EleutherAI's harness): `lm_eval --model morph`.

Importing this module registers the model. lm-eval has no plug-in mechanism, so one of three things imports it:
the project's own task files (`morph/evaluate/data/lm_eval`, by their path), `python -m morph.evaluate.lm_eval_main`
in place of `lm_eval` with the same arguments, or an import in Python before `simple_evaluate`.

Texts are tokenized by lm-eval's rules, so that the base gets the figures of lm-eval's own `hf` model. Scoring goes
through `LLM.score`: gates see the context and never an answer, and all choices of an item share its layout.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from morph.engine.llm import LLM
from morph.engine.params import SamplingParams
from morph.errors import InvalidRequest

GROUP_TOKENS = 16_384
"""Tokens of work handed to the engine together."""


logger = logging.getLogger(__name__)


def _available(device: str | None) -> str:
    """The wanted device; lm-eval asks for CUDA unless told otherwise, also where there is none."""
    if device and device.startswith("cuda") and not torch.cuda.is_available():
        logger.warning("no CUDA device here: Morph runs on the CPU (say --device cpu to do without this warning)")
        return "cpu"
    return device or "cpu"


@dataclass
class _Ask:
    """One continuation to score."""

    index: int
    key: Any
    continuation: list[int]


@register_model("morph")
class MorphLM(TemplateLM):
    """A Morph engine behind lm-eval's interface.

    Args:
        pretrained: name of a pulled model, a folder, or a GGUF file (`model` is another word for it).
        layout: `auto`, `attention` (the base), `ssm`, or 0/1 per block.
        attention_budget: 0…1, of `auto`.
        dtype, device, max_requests, memory_bytes: the engine's.
        batch_size, max_batch_size: accepted and unused, the engine batches by itself.
        add_bos_token: begin texts with the tokenizer's own tokens, as `hf` does with this argument.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        model: str | None = None,
        layout: str = "auto",
        attention_budget: float | None = None,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        device: str | None = None,
        max_requests: int = 16,
        memory_bytes: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: Any = None,
        max_batch_size: Any = None,
        add_bos_token: bool = False,
        **unknown: Any,
    ) -> None:
        super().__init__()
        name = pretrained or model
        if not name:
            raise InvalidRequest("name a model: --model_args pretrained=smollm2-135m", "pretrained")
        if unknown:
            raise InvalidRequest(
                f"model_args {sorted(unknown)} are unknown to Morph; use pretrained, layout, attention_budget, dtype, "
                "device, max_requests, memory_bytes, max_length, max_gen_toks, add_bos_token",
                "model_args",
            )
        self.llm = LLM(
            str(name),
            dtype=dtype,
            device=_available(device),
            max_requests=int(max_requests),
            memory_bytes=memory_bytes,
        )
        self.params = SamplingParams(layout=str(layout).strip(), attention_budget=attention_budget)
        self.tokenizer = self.llm.tokenizer
        # The engine keeps a place for one answer token.
        self.max_length = min(int(max_length or 2**31), self.llm.engine.max_context - 2)
        self.max_gen_toks = int(max_gen_toks)
        self.add_bos_token = bool(add_bos_token)
        self.layouts: list[str] = []
        """Layout of every scored context and every answer, in the order in which they ran."""

    # ---- text and tokens

    @property
    def eot_token_id(self) -> int:
        """The first token that ends an answer."""
        return int(self.llm.engine.config.eos_token_ids[0])

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context: as in `hf`, the begin token where there is one."""
        bos = self.llm.engine.config.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return self.llm.model_name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation in the model's chat format."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """A name for the model's format where one is asked for; lm-eval only records it."""
        return f"morph:{self.tokenizer_name}" if chat_template else None

    # ---- scoring

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Scores in the order of the requests. Continuations of one context run together and share its layout."""
        groups: dict[tuple[int, ...], list[_Ask]] = defaultdict(list)
        for index, (key, context, continuation) in enumerate(requests):
            groups[tuple(context)].append(_Ask(index, key, continuation))
        results: list[tuple[float, bool] | None] = [None] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Scoring with Morph")
        batch: list[tuple[list[int], list[_Ask]]] = []
        work = 0
        for tokens, asks in groups.items():
            longest = max(len(ask.continuation) for ask in asks)
            # Too long a context loses its beginning, by as much for every choice.
            context = list(tokens)[-max(1, self.max_length + 1 - longest) :]
            batch.append((context, asks))
            work += (len(context) + longest) * len(asks)
            if work >= GROUP_TOKENS:
                self._score(batch, results, bar)
                batch, work = [], 0
        self._score(batch, results, bar)
        bar.close()
        return [result for result in results if result is not None]

    def _score(self, batch: list[tuple[list[int], list[_Ask]]], results: list[Any], bar: Any) -> None:
        if not batch:
            return
        scores = self.llm.score(
            [context for context, _ in batch], [[ask.continuation for ask in asks] for _, asks in batch], self.params
        )
        for (_, asks), row in zip(batch, scores, strict=True):
            self.layouts.append(row[0].layout)
            for ask, score in zip(asks, row, strict=True):
                results[ask.index] = (score.logprob, score.is_greedy)
                if ask.key is not None:
                    self.cache_hook.add_partial("loglikelihood", ask.key, results[ask.index])
                bar.update(1)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log probability of whole texts in windows.

        Raises:
            InvalidRequest: with `layout=auto`: a text without a context has nothing that the gates may see.
        """
        if self.params.layout == "auto":
            raise InvalidRequest(
                "perplexity has no context for the gates to decide on; name a layout, e.g. "
                "--model_args pretrained=…,layout=attention",
                "layout",
            )
        found = []
        for request in requests:
            (text,) = request.args
            windows = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            pairs: list[Any] = [(None, before, after) for before, after in windows]
            scores = self._loglikelihood_tokens(pairs, disable_tqdm=True)
            total = sum(score for score, _ in scores)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
            found.append(total)
        return found

    # ---- answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first of their stop strings, which is not part of them."""
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            one = self._sampling(dict(options))
            prompts.append(self.tok_encode(context)[-(self.max_length - (one.max_tokens or 0)) :])
            params.append(one)
        answers: list[str] = []
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="Answering with Morph")
        begin = work = 0
        for end, prompt in enumerate(prompts, 1):
            work += len(prompt)
            if work < GROUP_TOKENS and end < len(prompts):
                continue
            for number, output in enumerate(self.llm.generate(prompts[begin:end], params[begin:end]), begin):
                if output.error:
                    raise RuntimeError(f"request {number} failed: {output.error}")
                self.layouts.append(output.layout or "")
                answers.append(output.text)
                self.cache_hook.add_partial("generate_until", requests[number].args, output.text)
                bar.update(1)
            begin, work = end, 0
        bar.close()
        return answers

    def _sampling(self, options: dict[str, Any]) -> SamplingParams:
        kwargs = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        eos = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        stop = tuple(text for text in handle_stop_sequences(kwargs.get("until"), eos=eos) if text)
        sampled = bool(kwargs.get("do_sample"))
        return SamplingParams(
            max_tokens=int(kwargs["max_gen_toks"]),
            temperature=float(kwargs.get("temperature") or 0.0) if sampled else 0.0,
            top_p=float(kwargs.get("top_p") or 1.0) if sampled else 1.0,
            top_k=int(kwargs.get("top_k") or 0) if sampled else 0,
            seed=0 if sampled else None,
            stop=stop,
            layout=self.params.layout,
            attention_budget=self.params.attention_budget,
        )

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval's results say about the model."""
        meta = self.llm.source.meta
        return {
            "model_name": self.llm.model_name,
            "model_revision": meta.get("revision"),
            "layout": self.params.layout,
            "attention_budget": self.params.attention_budget,
        }
