"""The eviction's mix follows the traffic."""

from __future__ import annotations

import random

import numpy as np
import pytest

from morph.cache.cost import PrefillCost
from morph.cache.eviction import GreedyDual
from morph.cache.tree import encode
from morph.cache.tuning import CANDIDATES, Tuner
from morph.memory.tables import UnitLayout
from tests.tiny import tiny_config


def tuner(units: int, evictor: GreedyDual, period: int = 32) -> Tuner:
    layout = UnitLayout(kv_heads=2, state_heads=4, unit_bytes=4096, page_tokens=16, max_pages=64, ring_pages=0)
    return Tuner(evictor, units, 4096, layout, PrefillCost(tiny_config()), period=period)


def prompt(document: int, length: int, seed: int) -> bytes:
    shared = np.random.default_rng(document).integers(0, 250, length).tolist()
    return encode(shared + np.random.default_rng(10_000 + seed).integers(0, 250, 20).tolist())


def test_frequency_is_chosen_where_a_few_prompts_come_again_and_again() -> None:
    evictor = GreedyDual(0.0, 0.0)
    tried = tuner(420, evictor)
    rng = random.Random(0)
    bits = (True, False, True, False)
    for number in range(600):
        # Every other prompt is of one of four documents; the rest are seen once and push them out of an LRU.
        document = rng.randrange(4) if number % 8 == 0 else 100 + number
        path = prompt(document, 160, number)
        tried.saw("", path, bits, [160, 179], 179)
    assert evictor.frequency > 0, f"LRU was kept of {CANDIDATES}"


def test_the_copies_keep_their_books() -> None:
    evictor = GreedyDual()
    tried = tuner(300, evictor, period=16)
    rng = random.Random(1)
    for number in range(200):
        bits = tuple(rng.random() < 0.5 for _ in range(4))
        path = prompt(rng.randrange(6), rng.choice((64, 160, 250)), number)
        tokens = len(path) // 4
        tried.saw("", path, bits, [tokens - 20, tokens - 1], tokens - 1)
    for copy in tried._copies:
        copy.cache.check()
        copy.cache.pool.check()
        assert copy.cache.held_units <= 300
        assert copy.cache.pool.num_units - copy.cache.pool.free_units == copy.cache.held_units, "units leaked"


@pytest.mark.parametrize("sample", [1, 4])
def test_a_sample_plays_at_its_own_size(sample: int) -> None:
    layout = UnitLayout(kv_heads=2, state_heads=4, unit_bytes=4096, page_tokens=16, max_pages=64, ring_pages=0)
    tried = Tuner(GreedyDual(), 400, 4096, layout, PrefillCost(tiny_config()), sample=sample)
    assert all(copy.cache.most_units == 400 // sample for copy in tried._copies)
