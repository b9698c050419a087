"""Prompts of mixed kind and length: the traffic that gates are fitted and calibrated on.

`read_prompts` takes any JSON-lines file of prompts. `PromptFactory` builds them from a folder of public sets (schemas
in its functions), with long forms of short tasks: many shots, several documents, key-value and passkey recall.
"""

from __future__ import annotations

import gzip
import json
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from morph.errors import CorruptFile, ModelNotFound

CHARS_PER_TOKEN = 4
LETTERS = "ABCDEFGH"
EXCLUDED = frozenset({"dialogsum.dev", "logiqa.eval", "mctest.dev", "mctest.train"})
"""Sets whose licence is non-commercial, research only or unknown: never read."""

INSTRUCTION_SETS = ("gpteacher.train", "self_instruct_seed.train")
CHOICE_SETS = ("arc_challenge.train", "openbookqa.train", "commonsenseqa.train", "mmlu.val", "aqua.dev")
MATHS_SETS = ("gsm8k.train", "math_cot_lla.train")
PASSAGE_TASKS = ("adversarial", "quoref", "duorc", "ropes", "wiki")
REFERENCE_TEXTS = (
    "docs_python_peps",
    "docs_git",
    "docs_rust_book",
    "docs_d2l",
    "openstax_textbooks",
    "world_factbook",
)
PROSE = ("novels_100_english", "us_presidential_speeches", "wikipedia_boolq_docs", *REFERENCE_TEXTS)


@dataclass(frozen=True)
class Prompt:
    """One prompt: chat `messages` or raw `text`, and the kind of task that it is."""

    kind: str
    messages: tuple[dict[str, str], ...] = ()
    text: str = ""


def user(kind: str, content: str) -> Prompt:
    """A chat of one user message."""
    return Prompt(kind, ({"role": "user", "content": content},))


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON-lines file, gzipped or not.

    Raises:
        ModelNotFound: no such file. CorruptFile: a line that is no JSON.
    """
    if not path.exists():
        raise ModelNotFound(f"no file {path}; point --data at a folder with train/, prompts/ and corpus/")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise CorruptFile(f"{path} line {number} is no JSON ({error})") from error


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a JSON-lines file: `{"messages": [...]}`, `{"turns": [...]}` or `{"prompt": "..."}`, optional `kind`.

    Raises:
        CorruptFile: a line with none of the three.
    """
    prompts = []
    for number, row in enumerate(json_lines(path), 1):
        kind = str(row.get("kind", "file"))
        if "messages" in row:
            prompts.append(Prompt(kind, tuple(dict(m) for m in row["messages"])))
        elif "turns" in row:
            prompts.append(user(kind, str(row["turns"][0])))
        elif "prompt" in row:
            prompts.append(user(kind, str(row["prompt"])))
        else:
            raise CorruptFile(f"{path} line {number} has no 'messages', 'turns' or 'prompt'")
    return prompts


def tokenize(tokenizer: Any, prompt: Prompt, longest: int) -> list[int]:
    """Token ids as a server would see them; raw text is cut at `longest` tokens, a longer chat gives an empty list."""
    if prompt.text:
        return [int(i) for i in tokenizer.encode(prompt.text, add_special_tokens=False)][:longest]
    text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    ids = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]
    return ids if len(ids) <= longest else []


class PromptFactory:
    """Draws prompts from a folder with `train/*.jsonl.gz`, `prompts/*.jsonl.gz` and `corpus/*.txt.gz`.

    Args:
        longest: most tokens of a prompt, approximately; lengths are drawn log-uniformly from 60 on where a kind allows.
    """

    def __init__(self, data: Path, seed: int = 0, longest: int = 4000) -> None:
        self.data, self.longest = data, longest
        self.rng = random.Random(seed)
        self._sets: dict[str, list[dict[str, Any]]] = {}
        self._corpora: dict[str, list[str]] = {}

    @property
    def kinds(self) -> dict[str, Callable[[], Prompt]]:
        """Builders by kind."""
        return {
            "chat": self.chat,
            "choice": self.choice,
            "many_shot": self.many_shot,
            "maths": self.maths,
            "passage": self.passage,
            "documents": self.documents,
            "summary": self.summary,
            "meeting": self.meeting,
            "key_value": self.key_value,
            "passkey": self.passkey,
            "text": self.text,
            "dialogue": self.dialogue,
            "code": self.code,
            "agent": self.agent,
            "language": self.language,
        }

    def draw(self, count: int) -> list[Prompt]:
        """`count` prompts, kinds in turn."""
        builders = list(self.kinds.values())
        return [builders[i % len(builders)]() for i in range(count)]

    # ---- sources

    def rows(self, name: str, folder: str = "train") -> list[dict[str, Any]]:
        """All rows of one set, kept."""
        if name in EXCLUDED:
            raise CorruptFile(f"set {name!r} may not be used: its licence is not open")
        if name not in self._sets:
            self._sets[name] = list(json_lines(self.data / folder / f"{name}.jsonl.gz"))
        return self._sets[name]

    def document(self, corpus: str) -> str:
        """A document of a corpus."""
        if corpus not in self._corpora:
            path = self.data / "corpus" / f"{corpus}.txt.gz"
            if not path.exists():
                raise ModelNotFound(f"no file {path}; point --data at a folder with train/, prompts/ and corpus/")
            with gzip.open(path, "rt", encoding="utf-8") as file:
                parts = [part.strip() for part in file.read().split("<|doc|>")]
            self._corpora[corpus] = [part for part in parts if len(part) > 200]
        return self.rng.choice(self._corpora[corpus])

    def extract(self, corpus: str, chars: int) -> str:
        """A stretch of whole paragraphs, about `chars` long where the corpus has documents of that length."""
        text = self.document(corpus)
        for _ in range(4):
            if len(text) < chars:
                text = max(text, self.document(corpus), key=len)
        begin = self.rng.randrange(max(1, len(text) - chars))
        begin = text.rfind("\n", 0, begin) + 1
        return text[begin : begin + chars]

    def length(self, shortest: int = 60) -> int:
        """A prompt length in characters, log-uniform in tokens."""
        tokens = shortest * (self.longest / shortest) ** self.rng.random()
        return int(tokens * CHARS_PER_TOKEN)

    # ---- short tasks

    def chat(self) -> Prompt:
        """An instruction as people write them."""
        if self.rng.random() < 0.6:
            row = self.rng.choice(self.rows(self.rng.choice(INSTRUCTION_SETS)))
            return user("chat", str(row["prompt"]))
        name = self.rng.choice(("dolly_151", "mt_bench", "self_instruct_user252", "vicuna_bench"))
        return user("chat", str(self.rng.choice(self.rows(name, "prompts"))["turns"][0]))

    def choice_text(self) -> tuple[str, str]:
        """A multiple-choice question and its answer's text."""
        if self.rng.random() < 0.25:
            row = self.rng.choice(self.rows("open_trivia_qa.train"))
            return str(row["prompt"]), str(row["completion"])
        row = self.rng.choice(self.rows(self.rng.choice(CHOICE_SETS)))
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False)]
        answer = f"{LETTERS[row['answer']]}. {row['choices'][row['answer']]}"
        return f"Question: {row['question']}\n" + "\n".join(lines) + "\nAnswer:", answer

    def choice(self) -> Prompt:
        """One multiple-choice question."""
        question, _ = self.choice_text()
        ask = self.rng.choice(("", "Choose the right answer and say why.\n\n", "Answer with the letter.\n\n"))
        return user("choice", ask + question)

    def many_shot(self) -> Prompt:
        """Solved examples, then a question; choice or maths."""
        target = self.length(250)
        example = self.choice_text if self.rng.random() < 0.6 else self.maths_text
        parts: list[str] = []
        while sum(map(len, parts)) < target:
            question, answer = example()
            parts.append(f"{question} {answer}")
        parts.append(example()[0])
        return user("many_shot", "\n\n".join(parts))

    def maths_text(self) -> tuple[str, str]:
        """A word problem and its worked answer."""
        row = self.rng.choice(self.rows(self.rng.choice(MATHS_SETS)))
        return f"Question: {row['question']}\nAnswer:", str(row["rationale"])

    def maths(self) -> Prompt:
        """One word problem."""
        question, _ = self.maths_text()
        ask = self.rng.choice(("", "Solve the problem step by step.\n\n"))
        return user("maths", ask + question.removeprefix("Question: ").removesuffix("\nAnswer:"))

    def language(self) -> Prompt:
        """Classification, paraphrase, common sense: short prompts of the T0 mixture."""
        return user("language", self._t0(lambda task: not task.startswith(PASSAGE_TASKS)))

    def _t0(self, wanted: Callable[[str], bool]) -> str:
        while True:
            row = self.rng.choice(self.rows("t0_mix.train"))
            if wanted(row["task"]) and len(row["prompt"]) < self.longest * CHARS_PER_TOKEN:
                return str(row["prompt"])

    # ---- reading

    def passage(self) -> Prompt:
        """A question about one passage."""
        if self.rng.random() < 0.25:
            row = self.rng.choice(self.rows("boolq_passage.train"))
            return user("passage", f"{row['context']}\n\nQuestion: {row['question']}?")
        return user("passage", self._t0(lambda task: task.startswith(PASSAGE_TASKS)))

    @cached_property
    def _passages(self) -> list[tuple[str, str]]:
        marks = ("quoref_Answer_Question_Given_Context", "quoref_Context_Contains_Answer")
        pairs = []
        for row in self.rows("t0_mix.train"):
            if row["task"] in marks or (row["task"].startswith("adversarial_qa") and "question_context" in row["task"]):
                pairs.append((str(row["prompt"]), str(row["completion"])))
        return pairs

    def documents(self) -> Prompt:
        """A question about one of several documents; the others are in the way."""
        target = self.length(400)
        question, _ = self.rng.choice(self._passages)
        parts = [question]
        while sum(map(len, parts)) < target:
            parts.insert(self.rng.randrange(len(parts) + 1), self.document("wikipedia_fever_intros")[:1500])
        lines = [f"Document {i}:\n{part}" for i, part in enumerate(parts, 1)]
        asked = next(i for i, part in enumerate(parts, 1) if part is question)
        return user("documents", "\n\n".join(lines) + f"\n\nAnswer the question that document {asked} asks.")

    def summary(self) -> Prompt:
        """Summarise an abstract, an article or a chapter, or a question about all of it."""
        ask = self.rng.choice(
            ("Summarize this text.", "What is this text about?", "List the key points of this text.", "TL;DR")
        )
        if self.rng.random() < 0.3:
            text = str(self.rng.choice(self.rows("scitldr.train"))["document"])
        else:
            text = self.extract(self.rng.choice(("wikipedia_boolq_docs", *REFERENCE_TEXTS)), self.length(200))
        return user("summary", f"{text}\n\n{ask}" if self.rng.random() < 0.5 else f"{ask}\n\n{text}")

    def meeting(self) -> Prompt:
        """A question about a meeting: its relevant turns, or a longer piece of the transcript."""
        row = self.rng.choice(self.rows("qmsum.train_queries"))
        text, target = str(row.get("span") or ""), self.length(300)
        if not text or (len(text) < target and self.rng.random() < 0.7):
            documents = {doc["doc_id"]: doc["document"] for doc in self.rows("qmsum.train_docs")}
            whole = str(documents.get(row["doc_id"], text))
            at = max(0, whole.find(text[:80])) if text else 0
            begin = max(0, at - self.rng.randrange(max(1, target - len(text) if target > len(text) else 1)))
            text = whole[begin : begin + target]
        return user("meeting", f"{text[:target]}\n\n{row['query']}")

    # ---- recall

    def key_value(self) -> Prompt:
        """Look a value up in a JSON object or a list."""
        target = self.length(150)
        short = self.rng.random() < 0.5

        def word() -> str:
            value = uuid.UUID(int=self.rng.getrandbits(128), version=4).hex
            return value[:8] if short else str(uuid.UUID(value))

        pairs: dict[str, str] = {}
        while sum(len(k) + len(v) + 6 for k, v in pairs.items()) < target * 0.55:  # hex takes more tokens than prose
            pairs[word()] = word()
        key = self.rng.choice(list(pairs))
        if self.rng.random() < 0.5:
            body, ask = (
                json.dumps(pairs, indent=0 if short else None),
                f'What is the value of the key "{key}"?',
            )
        else:
            body = "\n".join(f"The code of {k} is {v}." for k, v in pairs.items())
            ask = f"What is the code of {key}?"
        return user("key_value", f"{body}\n\n{ask}" if self.rng.random() < 0.7 else f"{ask}\n\n{body}\n\n{ask}")

    def passkey(self) -> Prompt:
        """Find a number that was dropped into other text."""
        filler = self.extract(self.rng.choice(PROSE), self.length(200))
        name = self.rng.choice(("pass key", "secret number", "door code", "ticket number"))
        needle = f"The {name} is {self.rng.randrange(10_000, 1_000_000)}. Remember it."
        lines = filler.split("\n") if "\n" in filler else filler.split(". ")
        lines.insert(self.rng.randrange(len(lines) + 1), needle)
        return user("passkey", "\n".join(lines) + f"\n\nWhat is the {name}?")

    # ---- long forms

    def text(self) -> Prompt:
        """Raw text to go on with."""
        return Prompt("text", text=self.extract(self.rng.choice(PROSE), self.length(60)))

    def dialogue(self) -> Prompt:
        """The next turn of a chat, or a question about a conversation."""
        lines: list[str] = []
        target = self.length(80)
        corpus = self.rng.choice(("dialogue_sgd", "dialogue_topical_chat"))
        while sum(map(len, lines)) < target:
            lines += [line for line in self.document(corpus).split("\n") if ": " in line]
        if self.rng.random() < 0.5:
            ask = self.rng.choice(("Summarize this conversation.", "What do the two talk about?", "What was agreed?"))
            return user("dialogue", "\n".join(lines) + f"\n\n{ask}")
        turns = [line.split(": ", 1)[1] for line in lines]
        turns = turns[: len(turns) - 1 + len(turns) % 2]  # the last turn is the user's
        roles = ("user", "assistant")
        return Prompt("dialogue", tuple({"role": roles[i % 2], "content": t} for i, t in enumerate(turns)))

    def code(self) -> Prompt:
        """Write or explain code, or a question about technical documentation."""
        if self.rng.random() < 0.5:
            rows = [row for row in self.rows("gpteacher.train") if "codegen" in row["task"]]
            return user("code", str(self.rng.choice(rows)["prompt"]))
        text = self.extract(self.rng.choice(("docs_rust_by_example", "docs_tldr_pages", "docs_d2l")), self.length(120))
        ask = self.rng.choice(("Explain this.", "Give an example of how to use this.", "What does this code do?"))
        return user("code", f"{text}\n\n{ask}")

    def agent(self) -> Prompt:
        """The next step of a tool-using session."""
        target = self.length(500)
        messages = self.rng.choice(self.rows("swe_agent_trajectories", "prompts"))["messages"]
        ends = [i for i in range(1, len(messages)) if messages[i]["role"] == "user"]
        end = self.rng.choice(ends)
        kept: list[dict[str, str]] = []
        for message in reversed(messages[: end + 1]):
            if kept and sum(len(m["content"]) for m in kept) + len(message["content"]) > target:
                break
            kept.append({"role": message["role"], "content": message["content"][: self.longest * 3]})
        kept.reverse()
        while kept and kept[0]["role"] == "assistant":
            kept.pop(0)
        return Prompt("agent", tuple(kept))
