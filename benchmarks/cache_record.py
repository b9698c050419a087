"""Records what the gates decide on traffic with shared prefixes: the workloads of `benchmarks/cache_replay.py`.

    python -m benchmarks.cache_record MODEL

Real prompts go through the real model; kept are their tokens, the answers, each block's decision at the budgets
0.25 and 0.5, and what a decision against the gate would cost. Layouts are a function of tokens alone, so a replay
of the cache needs no model. Three kinds of traffic, all over texts of the World Factbook:

- `user`: an article and a question in one message;
- `system`: the article is the system message, the question the user's; recorded also with the layout decided at the
  end of the article;
- `chat`: conversations of 2 to 12 turns, of which the first has a shorter text.
"""

from __future__ import annotations

import gzip
import random
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import track

from benchmarks.workload import DOCUMENT_SEPARATOR

DATA = Path(__file__).parent / "data"
BUDGETS = (0.25, 0.5)
ASKS = (
    "Summarise what the text says about {}.",
    "What does the text say about {}?",
    "Give one figure that the text names for {}.",
    "Is {} mentioned in the text? Quote the sentence.",
    "Explain {} in one sentence, using the text alone.",
    "Which facts about {} would a visitor need?",
    "How does {} matter here?",
    "Name three things from the text that have to do with {}.",
)


def articles() -> list[str]:
    """60 texts of 5,000 to 15,000 characters."""
    text = gzip.decompress((DATA / "world_factbook.txt.gz").read_bytes()).decode()
    return [part.strip() for part in text.split(DOCUMENT_SEPARATOR)]


def questions(article: str, count: int, rng: random.Random) -> list[str]:
    """Distinct questions about words of the article."""
    words = sorted(
        set(re.findall(r"\b[A-Z][a-z]{4,}(?: [a-z]{4,})?", article)) | set(re.findall(r"\b[a-z]{7,}\b", article))
    )
    pairs = [(ask, word) for ask in ASKS for word in words]
    return [ask.format(word) for ask, word in rng.sample(pairs, count)]


class Recorder:
    """Runs prompts on one engine and keeps what each block decided."""

    def __init__(self, model: str, boundary: str) -> None:
        from morph import LLM

        self.llm = LLM(model, dtype="bfloat16", layout_boundary=boundary, cache_share=0.8, max_requests=8)
        self._seen: dict[tuple[int, ...], Any] = {}
        engine = self.llm.engine
        publish = engine.admission.publish

        def watched(request: Any) -> None:
            self._seen[tuple(request.tokens[: request.prompt_len])] = request
            publish(request)

        engine.admission.publish = watched  # type: ignore[method-assign]

    def tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation as the model sees it."""
        text = self.llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self.llm.tokenizer.encode(text, add_special_tokens=False))

    def run(self, prompts: list[list[int]], budget: float, max_tokens: int) -> list[dict[str, Any]]:
        """Answer prompts; one record each."""
        from morph import SamplingParams
        from morph.gate.policy import UtilityPolicy

        params = SamplingParams(max_tokens=max_tokens, attention_budget=budget)
        records = []
        for prompt, output in zip(prompts, self.llm.generate(prompts, params), strict=True):
            request = self._seen.pop(tuple(prompt))
            policy = request.policy
            assert isinstance(policy, UtilityPolicy)
            regret = [policy.regret(b, u, request.gate_tokens) for b, u in enumerate(request.utilities)]
            records.append(
                {
                    "prompt": prompt,
                    "answer": list(output.token_ids),
                    "bits": list(request.bits),
                    "regret": regret,
                    "tau": policy.tau,
                }
            )
        return records


def article_prompts(recorder: Recorder, form: str, count: int, asks: int) -> list[tuple[int, list[int]]]:
    """(article, prompt) of every question, article by article."""
    found = []
    for number, article in enumerate(articles()[:count]):
        for question in questions(article, asks, random.Random(number)):
            if form == "user":
                messages = [{"role": "user", "content": f"{article}\n\n{question}"}]
            else:
                messages = [
                    {"role": "system", "content": f"Answer questions about this text.\n\n{article}"},
                    {"role": "user", "content": question},
                ]
            found.append((number, recorder.tokens(messages)))
    return found


def conversations(recorder: Recorder, count: int, tokens: int) -> list[list[list[int]]]:
    """Prompts of the turns of each conversation; the answers are the model's at budget 0.5."""
    rng = random.Random(7)
    texts = articles()
    states: list[tuple[list[dict[str, str]], list[str]]] = []
    for number in range(count):
        article = texts[number % len(texts)]
        begin = rng.randrange(max(1, len(article) - 3000))
        asks = questions(article, rng.randint(2, 12), rng)
        asks[0] = f"{article[begin : begin + rng.randint(600, 3000)]}\n\n{asks[0]}"
        states.append(([], asks))
    prompts: list[list[list[int]]] = [[] for _ in range(count)]
    for turn in range(12):
        open_ = [i for i, (_, asks) in enumerate(states) if turn < len(asks)]
        for i in open_:
            states[i][0].append({"role": "user", "content": states[i][1][turn]})
            prompts[i].append(recorder.tokens(states[i][0]))
        records = recorder.run([prompts[i][turn] for i in open_], 0.5, tokens)
        for i, record in zip(open_, records, strict=True):
            text = recorder.llm.tokenizer.decode(record["answer"], skip_special_tokens=True)
            states[i][0].append({"role": "assistant", "content": text.strip() or "I do not know."})
    return prompts


def record(
    recorder: Recorder, groups: list[int], turns: list[int], prompts: list[list[int]], tokens: int
) -> dict[str, Any]:
    """Arrays of one workload: token ids end to end, and what was decided at each budget."""
    arrays: dict[str, Any] = {"group": np.array(groups, np.int16), "turn": np.array(turns, np.int16)}
    for budget in BUDGETS:
        rows: list[dict[str, Any]] = []
        for at in track(range(0, len(prompts), 64), f"budget {budget}"):
            rows += recorder.run(prompts[at : at + 64], budget, tokens)
        name = f"{budget:g}"
        arrays[f"bits_{name}"] = np.array([row["bits"] for row in rows], bool)
        arrays[f"regret_{name}"] = np.array([row["regret"] for row in rows], np.float32)
        arrays[f"tau_{name}"] = np.array(rows[0]["tau"])
        arrays["prompt_len"] = np.array([len(row["prompt"]) for row in rows], np.int32)
        arrays["answer_len"] = np.array([len(row["answer"]) for row in rows], np.int32)
        arrays["tokens"] = np.concatenate([np.array(row["prompt"] + row["answer"], np.uint16) for row in rows])
    return arrays


def main(
    model: Annotated[str, typer.Argument(help="Name or folder of a model with gates.")] = "smollm2-135m",
    out: Annotated[Path, typer.Option(help="File to write.")] = DATA / "cache_traffic_r2.npz",
    users: Annotated[int, typer.Option(help="Articles of the first kind.")] = 40,
    asks: Annotated[int, typer.Option(help="Questions per article.")] = 20,
    chats: Annotated[int, typer.Option(help="Conversations.")] = 40,
) -> None:
    """Record all three workloads."""
    recorder = Recorder(model, "prompt")
    arrays: dict[str, Any] = {}
    for name, prompts in (
        ("user", article_prompts(recorder, "user", users, asks)),
        ("system", article_prompts(recorder, "system", users // 2, asks // 2)),
    ):
        found = record(recorder, [a for a, _ in prompts], [0] * len(prompts), [p for _, p in prompts], 16)
        arrays |= {f"{name}.{key}": value for key, value in found.items()}
    talks = conversations(recorder, chats, 48)
    flat = [(number, turn, prompt) for number, talk in enumerate(talks) for turn, prompt in enumerate(talk)]
    found = record(recorder, [c for c, _, _ in flat], [t for _, t, _ in flat], [p for _, _, p in flat], 48)
    arrays |= {f"chat.{key}": value for key, value in found.items()}
    system = article_prompts(recorder, "system", users // 2, asks // 2)
    del recorder
    early = Recorder(model, "first_message")
    for name, prompts_ in (("system", [p for _, p in system]), ("chat", [p for _, _, p in flat])):
        for budget in BUDGETS:
            rows = early.run(prompts_, budget, 1)
            arrays[f"{name}.early_{budget:g}"] = np.array([row["bits"] for row in rows], bool)
    np.savez_compressed(out, **arrays)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(main)
