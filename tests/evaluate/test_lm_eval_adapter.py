"""Morph behind lm-eval: the base gets the figures of lm-eval's own model, and gates never see an answer."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from tokenizers import Tokenizer

from morph import SamplingParams
from morph.errors import InvalidRequest
from morph.evaluate.lm_eval_adapter import MorphLM
from morph.evaluate.lm_eval_tasks import TASKS
from tests.convert.bases import tiny_base


def ask(*args: Any) -> Any:
    """A request as lm-eval makes them."""
    return SimpleNamespace(args=args)


PAIRS = [
    ("Question: why\nAnswer:", " because"),
    ("Question: why\nAnswer:", " no"),
    ("The river ", "runs"),  # a space at the end of the context moves to the answer
    ("", "alone"),
    ("Question: who\nAnswer:", " you"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf") / "base"
    tiny_base(folder, bos_token_id=256, eos_token_id=256, model_type="llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": "<|end|>", "bos_token": "<|end|>", "pad_token": "<|end|>"})
    )
    return folder


@pytest.fixture(scope="module")
def hf(base: Path) -> HFLM:
    return HFLM(pretrained=str(base), dtype="float32", device="cpu", batch_size=2)


@pytest.fixture(scope="module")
def ours(base: Path) -> MorphLM:
    return MorphLM(pretrained=str(base), dtype="float32", layout="attention", device="cpu")


def test_the_model_is_registered() -> None:
    assert get_model("morph") is MorphLM


def test_the_base_scores_as_lm_evals_own_model(hf: HFLM, ours: MorphLM) -> None:
    pairs = [ask(*pair) for pair in PAIRS]
    theirs = hf.loglikelihood(pairs, disable_tqdm=True)
    found = ours.loglikelihood(pairs, disable_tqdm=True)
    for (ours_value, ours_greedy), (value, greedy) in zip(found, theirs, strict=True):
        assert ours_value == pytest.approx(value, abs=1e-3)
        assert ours_greedy == greedy


def test_an_empty_context_is_the_begin_token(ours: MorphLM) -> None:
    ((value, _),) = ours.loglikelihood([ask("", "alone")], disable_tqdm=True)
    direct = ours.llm.score([[ours.prefix_token_id]], [[ours.tok_encode("alone")]], SamplingParams(layout="attention"))
    assert value == pytest.approx(direct[0][0].logprob, abs=1e-5)


def test_answers_equal_those_of_lm_evals_own_model(hf: HFLM, ours: MorphLM) -> None:
    requests = [
        ask("Tell me about the river", {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}),
        ask("And the bridge", {"until": "q", "max_gen_toks": 20}),
    ]
    assert ours.generate_until(requests, disable_tqdm=True) == hf.generate_until(requests, disable_tqdm=True)


def test_whole_texts_score_as_in_lm_evals_own_model(base: Path, ours: MorphLM) -> None:
    text = "the river runs under an old bridge " * 20  # longer than the context
    windows = HFLM(pretrained=str(base), dtype="float32", device="cpu", max_length=ours.max_length)
    (theirs,) = windows.loglikelihood_rolling([ask(text)], disable_tqdm=True)
    (found,) = ours.loglikelihood_rolling([ask(text)], disable_tqdm=True)
    assert found == pytest.approx(theirs, rel=1e-4)


def test_all_choices_share_the_layout_of_their_context(roomy_model: Path) -> None:
    model = MorphLM(pretrained=str(roomy_model), dtype="float32", attention_budget=0.5, device="cpu")
    contexts = [f"Question {i}: {'word ' * i}\nAnswer:" for i in range(1, 7)]
    model.loglikelihood([ask(c, f" {w}") for c in contexts for w in ("one", "twenty words or so")], disable_tqdm=True)
    alone = [model.llm.generate(c, SamplingParams(max_tokens=1, attention_budget=0.5))[0].layout for c in contexts]
    assert model.layouts == alone
    assert len(set(alone)) > 1, "the tiny gates should tell these contexts apart"


def test_perplexity_needs_a_named_layout(roomy_model: Path) -> None:
    model = MorphLM(pretrained=str(roomy_model), device="cpu")
    with pytest.raises(InvalidRequest, match="name a layout"):
        model.loglikelihood_rolling([ask("text")])


def test_a_context_that_is_too_long_loses_its_beginning_alike_for_every_choice(ours: MorphLM) -> None:
    context, choices = "start " + "x" * 600, [" a", " b and more"]
    found = ours.loglikelihood([ask(context, c) for c in choices], disable_tqdm=True)
    cut = ours.tok_encode(context)[-(ours.max_length + 1 - len(ours.tok_encode(choices[1]))) :]
    direct = ours.llm.score([cut], [[ours.tok_encode(c) for c in choices]], SamplingParams(layout="attention"))[0]
    assert [value for value, _ in found] == pytest.approx([score.logprob for score in direct], abs=1e-4)


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(InvalidRequest, match="parallelize"):
        MorphLM(pretrained="x", parallelize=True)
    with pytest.raises(InvalidRequest, match="name a model"):
        MorphLM()


@pytest.mark.parametrize("task", sorted(path.stem for path in TASKS.glob("*.yaml")))
def test_the_task_files_run_offline(task: str, roomy_model: Path, six_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MORPH_EVAL_DATA", str(six_folder))
    found = lm_eval.simple_evaluate(
        model="morph",
        model_args={"pretrained": str(roomy_model), "layout": "ssm", "dtype": "float32"},
        tasks=[load_yaml(TASKS / f"{task}.yaml", resolve_func=True)],
        limit=2,
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(include_defaults=False),
    )
    samples = found["samples"][task]
    assert len(samples) == 2
    values = {k: v for k, v in found["results"][task].items() if k.endswith(",none") and "stderr" not in k}
    assert len(values) in (2, 3) and all(0 <= value <= 1 for value in values.values())


@pytest.fixture(scope="module")
def six_folder(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small sets, with the others that the task files ask for."""
    import shutil

    from tests.evaluate.conftest import write_rows

    folder = tmp_path_factory.mktemp("six")
    shutil.copytree(data_folder / "eval", folder / "eval")
    choice = [{"id": f"c{i}", "question": "why", "choices": ["a b", "c"], "answer": 0} for i in range(3)]
    write_rows(folder / "eval/hellaswag/validation.jsonl.gz", choice)
    write_rows(folder / "eval/openbookqa/test.jsonl.gz", choice)
    write_rows(
        folder / "eval/dialogsum/test.jsonl.gz", [{"id": f"d{i}", "document": "a: b", "summary": "s"} for i in range(3)]
    )
    return folder
