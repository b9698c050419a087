"""lm-eval's local-completions against the server: its figures are those of `LLM.score`; gates refuse to see answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-eval (extra eval)")
pytest.importorskip("tenacity", reason="needs what lm-eval asks servers with (extra clients)")

from lm_eval.api.registry import get_model
from requests import HTTPError

from morph import LLM
from tests.clients.conftest import NAME, Served
from tests.tiny import tiny_model

PAIRS = [("The river", " runs"), ("The river", " stands"), ("Question: why?\nAnswer:", " because it rains"), ("a", "b")]


def over_http(served: Served, **more: Any) -> Any:
    return get_model("local-completions")(
        base_url=served.url + "/v1/completions", model=NAME, tokenizer=str(served.folder),
        tokenizer_backend="huggingface", max_retries=1, **more,
    )  # fmt: skip


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """An attention-only model."""
    return tiny_model(tmp_path / "plain", ssm=False, eos_token_ids=(10,))


@pytest.mark.parametrize("batch", [1, 4])
def test_log_likelihoods_are_those_of_score(serve: Callable[[Path], Served], plain: Path, batch: int) -> None:
    served = serve(plain)
    asked = [SimpleNamespace(args=pair) for pair in PAIRS]
    told = over_http(served, batch_size=batch).loglikelihood(asked, disable_tqdm=True)
    llm = LLM(str(plain), dtype="float32")
    for (context, answer), (logprob, greedy) in zip(PAIRS, told, strict=True):
        score = llm.score([context], [[answer]])[0][0]
        assert logprob == pytest.approx(score.logprob, abs=1e-4)
        assert greedy == score.is_greedy


def test_answers_stop_where_they_are_told_to(serve: Callable[[Path], Served], plain: Path) -> None:
    served = serve(plain)
    request = SimpleNamespace(args=("The river", {"until": ["\n\n"], "max_gen_toks": 20}))
    (answer,) = over_http(served).generate_until([request], disable_tqdm=True)
    assert isinstance(answer, str) and answer and "\n\n" not in answer


def test_an_adaptive_model_refuses_to_let_its_gates_see_the_answer(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    asked = [SimpleNamespace(args=PAIRS[0])]
    with pytest.raises(HTTPError, match="400"):
        over_http(served).loglikelihood(asked, disable_tqdm=True)
    assert "morph.gate_tokens" in caplog.text
    assert served.engine.stats()["finished"] == 0
