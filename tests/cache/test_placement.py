"""Where checkpoints are taken."""

from __future__ import annotations

from morph.cache.placement import Tails, cuts, first_message


def test_nothing_seen_names_no_place() -> None:
    assert Tails().place(1000) == 0


def test_the_place_where_questions_part_from_documents_is_learnt() -> None:
    tails = Tails(grid=64)
    for document in range(4):
        tails.saw(2000 + document, 0)
    for tail in (30, 42, 35):
        tails.saw(2000 + tail, 2000)
    place = tails.place(3042)
    assert place == 3000 // 64 * 64, "the longest tail that was seen is left out, on the grid"


def test_one_long_tail_does_not_move_the_place() -> None:
    tails = Tails()
    for _ in range(10):
        tails.saw(2040, 2000)
    tails.saw(5000, 100)
    assert tails.place(2040) == 1984


def test_traffic_that_shares_nothing_gets_no_checkpoints() -> None:
    tails = Tails()
    for _ in range(40):
        tails.saw(1000, 0)
    tails.saw(1000, 900)
    assert tails.place(1000) == 0, "one prompt in forty is no evidence"


def test_a_prompt_shorter_than_the_tail_gets_none() -> None:
    tails = Tails()
    for _ in range(8):
        tails.saw(2000, 1000)
    assert tails.place(500) == 0


def test_cuts_keep_their_distance_and_always_name_the_end() -> None:
    tokens = [1] * 1000
    for at in (99, 120, 400, 900):
        tokens[at] = 2
    assert cuts(tokens, 0, 999, {2}, 0) == [100, 401, 901, 999]
    assert cuts(tokens, 0, 999, {2}, 500, 512) == [100, 500, 901, 999], "512 is too close to where prompts part"
    assert cuts(tokens, 0, 999, {2}, 0, 640, most=2) == [640, 999]
    assert cuts(tokens, 999, 999, {2}, 0) == []


def test_the_first_long_message_ends_where_its_last_token_is() -> None:
    tokens = [1] * 20 + [2] + [1] * 80 + [2] + [1] * 10
    assert first_message(tokens, {2}) == 102
    assert first_message([1] * 50, {2}) == 50
