"""Metrics give the values that their definitions give by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from morph.evaluate.items import Item
from morph.evaluate.metrics import (
    best_f1,
    bootstrap,
    choice_kl,
    choose,
    classification,
    contains,
    exact_match,
    first_line_similarity,
    judge_choice,
    judge_text,
    number_share,
    paired,
    rouge,
    token_f1,
)


def test_exact_match_and_f1_follow_squads_normalisation() -> None:
    assert exact_match("The  Eiffel-Tower!", ["eiffeltower"]) == 1
    assert exact_match("Eiffel", ["Eiffel Tower"]) == 0
    # 2 shared words, 3 and 2 of them: 2·2 / (3 + 2).
    assert token_f1("the old Eiffel tower", "Eiffel Tower") == pytest.approx(4 / 5)
    assert best_f1("in Paris", ["London", "Paris"]) == pytest.approx(2 / 3)
    assert token_f1("", "the") == 1 and token_f1("", "word") == 0
    assert best_f1("anything", []) == 0


def test_rouge_takes_the_best_reference_of_each_kind() -> None:
    found = rouge("the cats sat", ["a dog ran", "the cat sat"])
    assert found == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0}
    assert rouge("cat sat the", ["the cat sat"])["rougeL"] == pytest.approx(2 / 3)


def test_scores_of_mixed_tasks() -> None:
    assert contains("It is 4711.", ["4711"]) == 1 and contains("It is 47", ["4711"]) == 0
    assert first_line_similarity("# why\nreturn x\nmore", ["return x"]) == 1
    assert classification("Type: City", ["City"], ["City", "Country"]) == 1
    assert classification("City or Country", ["City"], ["City", "Country"]) == 0.5
    # A label that is part of the wanted one is not another answer.
    assert classification("Other number", ["Other number"], ["number", "Other number"]) == 1
    assert number_share("Paragraph 3, or 4", ["Paragraph 3"]) == 0.5
    item = Item("x", "", references=("City",), score="class", classes=("City", "Country"))
    assert judge_text("City", item, ("score",)) == {"score": 1.0}


def test_choices_are_judged_by_likelihood_and_by_likelihood_per_character() -> None:
    item = Item("x", "", choices=("ab", "abcdefgh"), gold=1)
    assert judge_choice([-2.0, -4.0], item) == {"acc": 0.0, "acc_norm": 1.0}
    assert choose([-1.0, -1.0]) == 0


def test_kl_of_choices_is_of_normalised_distributions() -> None:
    assert choice_kl([-1.0, -2.0], [-11.0, -12.0]) == pytest.approx(0)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert choice_kl([0.0, 0.0], [math.log(0.25), math.log(0.75)]) == pytest.approx(expected)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=40))
def test_an_interval_holds_its_mean_and_shrinks_to_it(values: list[float]) -> None:
    found = bootstrap(values, draws=200)
    assert found.low - 1e-9 <= found.value <= found.high + 1e-9 or np.ptp(values) > 0
    assert found.value == pytest.approx(float(np.mean(values)))
    same = bootstrap([values[0]] * 5, draws=50)
    assert same.low == pytest.approx(values[0]) and same.high == pytest.approx(values[0])


def test_a_paired_interval_does_not_see_what_both_share() -> None:
    rng = np.random.default_rng(0)
    hard = rng.random(200)
    found = paired(hard + 0.1, hard)
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)
    apart = bootstrap(hard + 0.1)
    assert apart.high - apart.low > 0.05


def test_no_values_have_no_mean() -> None:
    with pytest.raises(ValueError, match="no values"):
        bootstrap([])


def test_the_coverage_of_the_interval_is_about_95_percent() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for seed in range(200):
        found = bootstrap((rng.random(60) < 0.4).astype(float), seed=seed, draws=300)
        hits += found.low <= 0.4 <= found.high
    assert 0.88 <= hits / 200 <= 0.99
