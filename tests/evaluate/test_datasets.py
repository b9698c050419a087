"""Short and long forms ask the same questions; long ones have the wanted length and leak no asked row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from morph.checkpoint.tokenizer import load_tokenizer
from morph.errors import CorruptFile, InvalidRequest, UnsupportedModel
from morph.evaluate.datasets import DATASETS, SIX, SUITES, dataset
from morph.evaluate.forms import Draw, split
from morph.evaluate.items import check_tokenizer, prompt_tokens
from morph.evaluate.sources import FolderSource, MissingData, PackageSource
from tests.evaluate.conftest import write_rows


@pytest.fixture(scope="module")
def tokenizer(roomy_model: Path) -> Any:
    return load_tokenizer(roomy_model)


@pytest.mark.parametrize("name", ["arc_challenge", "boolq", "squad", "scitldr"])
def test_long_items_ask_the_short_ones_questions_at_the_wanted_length(
    name: str, data_folder: Path, tokenizer: Any
) -> None:
    # Questions about a text come after two solved ones, and need more room for anything else.
    lengths = (450, 600) if name == "squad" else (250, 400)
    draw = Draw(FolderSource(data_folder), tokenizer, 4, 1000, lengths=lengths)
    short = {item.id: item for item in DATASETS[name].build(draw)}
    long = DATASETS[f"{name}_long"].build(draw)
    asked, pool = split(FolderSource(data_folder).rows(name))
    assert len(long) == 4 and len(pool) == 3
    for item in long:
        assert item.id in {row["id"] for row in asked}
        own = short[item.id]
        assert (item.choices, item.gold, item.references) == (own.choices, own.gold, own.references)
        assert len(item.prompt) > len(own.prompt) + 50
        assert len(prompt_tokens(tokenizer, item)) <= lengths[1] + 120
        question = next(row for row in asked if row["id"] == item.id)
        assert str(question.get("question", question.get("document"))) in item.prompt
        # No other asked row's question is among the examples.
        for row in asked:
            if row["id"] != item.id and name == "arc_challenge":
                assert row["question"] not in item.prompt


def test_items_do_not_depend_on_how_many_are_built(data_folder: Path, tokenizer: Any) -> None:
    few = Draw(FolderSource(data_folder), tokenizer, 2, 1000, lengths=(250, 400))
    more = Draw(FolderSource(data_folder), tokenizer, 5, 1000, lengths=(250, 400))
    for name in ("arc_challenge_long", "squad_long", "scitldr_long", "boolq_long"):
        assert DATASETS[name].build(more)[:2] == DATASETS[name].build(few)


def test_the_examples_show_right_answers(data_folder: Path, tokenizer: Any) -> None:
    draw = Draw(FolderSource(data_folder), tokenizer, 1, 1000, lengths=(390, 400))
    (item,) = DATASETS["arc_challenge_long"].build(draw)
    _, pool = split(FolderSource(data_folder).rows("arc_challenge"))
    shown = [row for row in pool if row["question"] in item.prompt]
    assert shown
    for row in shown:
        assert f"Question: {row['question']}\nAnswer: {row['choices'][row['answer']]}\n\n" in item.prompt


def test_the_quick_suite_needs_nothing_but_the_package(tokenizer: Any) -> None:
    suite = SUITES["quick"]
    for name, count in suite.counts.items():
        draw = Draw(PackageSource(), tokenizer, count, 8192, lengths=suite.lengths)
        assert len(DATASETS[name].build(draw)) == count


def test_the_six_have_a_long_form_each() -> None:
    assert set(SUITES["six"].counts) == {*SIX, *(f"{name}_long" for name in SIX)}
    assert {DATASETS[name].kind for name in SIX} == {"reasoning", "qa", "summary"}
    assert sum(len(DATASETS[name].metrics) for name in SIX) + len(SIX) >= 18  # with agreement


def test_key_value_items_hold_the_asked_pair(tmp_path: Path, tokenizer: Any) -> None:
    pairs = {f"k{i:04}": f"v{i:04}" for i in range(60)}
    rows = [{"id": f"kv{i}", "context": json.dumps(pairs), "question": f"k{i:04}", "answers": []} for i in range(3)]
    write_rows(tmp_path / "eval/kv_retrieval/kv75.jsonl.gz", rows)
    items = DATASETS["key_value"].build(Draw(FolderSource(tmp_path), tokenizer, None, 1000, lengths=(300, 500)))
    for item in items:
        key = item.prompt.split('key "')[1].split('"')[0]
        assert item.references == (pairs[key],) and f'"{key}": "{pairs[key]}"' in item.prompt
        assert 200 < len(prompt_tokens(tokenizer, item)) < 600


def test_minilongbench_items_are_judged_by_their_tasks_rule(tmp_path: Path, tokenizer: Any) -> None:
    rows = [
        {"id": "1", "task": "trec", "prompt": "Type:", "answers": [{"all_classes": ["City"], "answers": ["City"]}]},
        {"id": "2", "task": "lcc", "prompt": "x = 1\n", "answers": ["y = 2"]},
        {"id": "3", "task": "qasper", "prompt": "word " * 400, "answers": ["yes"]},
    ]
    write_rows(tmp_path / "eval/minilongbench/test.jsonl.gz", rows)
    items = DATASETS["minilongbench"].build(Draw(FolderSource(tmp_path), tokenizer, None, 600))
    assert {(item.score, item.chat) for item in items} == {("class", False), ("code", False), ("f1", True)}
    with pytest.raises(CorruptFile, match="task 'chess'"):
        write_rows(tmp_path / "eval/minilongbench/test.jsonl.gz", [rows[0] | {"task": "chess"}])
        DATASETS["minilongbench"].build(Draw(FolderSource(tmp_path), tokenizer, None, 600))


def test_a_set_of_one_row_has_no_long_form(tmp_path: Path, tokenizer: Any) -> None:
    write_rows(tmp_path / "eval/scitldr/test.jsonl.gz", [{"id": "1", "document": "d", "summary": "s"}])
    with pytest.raises(MissingData, match="1 rows"):
        DATASETS["scitldr_long"].build(Draw(FolderSource(tmp_path), tokenizer, None, 600))


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(InvalidRequest, match=r"'race' is unknown.*arc_challenge"):
        dataset("race")


def test_a_tokenizer_of_another_model_is_refused(tokenizer: Any) -> None:
    check_tokenizer(tokenizer, 300)
    with pytest.raises(UnsupportedModel, match="another model"):
        check_tokenizer(tokenizer, 20)

    class Deaf:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * len(text)

        def decode(self, ids: list[int]) -> str:
            return "?" * len(ids)

    with pytest.raises(UnsupportedModel, match=r"restore tokenizer\.json"):
        check_tokenizer(Deaf(), 300)


def test_questions_about_a_text_follow_solved_ones_that_are_never_asked(data_folder: Path, tokenizer: Any) -> None:
    rows = FolderSource(data_folder).rows("squad")
    items = DATASETS["squad"].build(Draw(FolderSource(data_folder), tokenizer, None, 1000))
    assert [item.id for item in items] == [row["id"] for row in rows[:-2]]
    for row in rows[-2:]:
        solved = f"{row['context']}\n\nQuestion: {row['question']}\nAnswer: {row['answers'][0]}\n\n"
        assert all(solved in item.prompt for item in items)
