"""Sources, shards, packing and settings: what is read, in which order, and what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from morph.errors import CorruptFile, InvalidRequest, ModelNotFound, MorphError
from morph.gate.answers import Requests
from morph.train.config import load_config
from morph.train.prepare import prepare
from morph.train.recall import RecallFactory
from morph.train.run import Options, run_distill
from morph.train.sources import Tokenising, parse_source, read_sources, row_document
from morph.train.stream import Mixture, PackedStream
from morph.train.tokens import TokenSet, load_tokens, merge, save_shards
from tests.convert.bases import write_texts

# ---- sources


def test_weights_come_after_the_last_at() -> None:
    assert parse_source("a/b.txt@0.25") == ("a/b.txt", 0.25)
    assert parse_source("a@b/c.txt") == ("a@b/c.txt", 1.0)
    assert parse_source("recall:4e6@2") == ("recall:4e6", 2.0)
    with pytest.raises(InvalidRequest, match=r"the weight after @ is 'x'"):
        parse_source("a.txt@x")


def test_folders_are_read_without_evaluation_data_and_closed_licences(converted: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("corpus", "eval", "train"):
        (data / name).mkdir(parents=True)
    with gzip.open(data / "corpus" / "a.txt.gz", "wt") as file:
        file.write("first\n<|doc|>\nsecond\n")
    (data / "eval" / "secret.txt").write_text("never")
    (data / "train" / "logiqa.eval.jsonl").write_text('{"text": "closed"}\n')
    (data / "train" / "rows.jsonl").write_text('{"text": "third"}\n{"prompt": "p", "completion": "c"}\n')
    ((tokens, weight),) = read_sources([str(data)], converted)
    text = Tokenising(converted).tokenizer.decode(tokens.tokens.tolist(), skip_special_tokens=False)
    assert weight == 1 and tokens.name == "data" and len(tokens.ends) == 4
    assert "first" in text and "second" in text and "third" in text and "never" not in text and "closed" not in text
    with pytest.raises(InvalidRequest, match="holds evaluation data"):
        read_sources([str(data / "eval")], converted)


def test_rows_of_many_schemas_become_documents() -> None:
    assert row_document({"text": "t"}).text == "t"  # type: ignore[union-attr]
    choice = row_document({"question": "q", "choices": ["x", "y"], "answer": 1})
    assert choice is not None and choice.answer == "B. y" and "A. x" in choice.messages[0]["content"]
    maths = row_document({"question": "q", "rationale": "because", "answer": "3"})
    assert maths is not None and maths.answer == "because\n3"
    chat = row_document({"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]})
    assert chat is not None and chat.answer == "a" and len(chat.messages) == 1
    assert row_document({"document": "d", "summary": "s"}).answer == "s"  # type: ignore[union-attr]
    assert row_document({"number": 3}) is None and row_document([1]) is None


def test_unreadable_sources_name_file_and_remedy(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no data at"):
        read_sources([str(tmp_path / "none")], converted)
    (tmp_path / "empty.txt").write_text("  \n")
    with pytest.raises(InvalidRequest, match=r"empty.txt has no text; name files that have some"):
        read_sources([str(tmp_path / "empty.txt")], converted)
    (tmp_path / "odd.jsonl").write_text('{"number": 1}\n')
    with pytest.raises(CorruptFile, match=r"odd.jsonl line 1 has none of the fields text, .*it has number"):
        read_sources([str(tmp_path / "odd.jsonl")], converted)
    (tmp_path / "broken.txt.gz").write_bytes(b"\x1f\x8bno")
    with pytest.raises(CorruptFile, match=r"broken.txt.gz cannot be read as text"):
        read_sources([str(tmp_path / "broken.txt.gz")], converted)
    (tmp_path / "image.png").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="is of a kind that cannot be read"):
        read_sources([str(tmp_path / "image.png")], converted)


def test_hub_sets_need_their_package(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MorphError, match="needs the package datasets; install it with"):
        read_sources(["hf:some/set"], converted)


def test_recall_answers_are_in_their_texts() -> None:
    made = iter(RecallFactory(seed=3, lengths=(64, 400)))
    for _ in range(30):
        one = next(made)
        for line in one.answer.splitlines():
            last = line.rstrip(".").split()[-1].strip('"')
            assert last in one.prompt, (one.prompt, line)
    again = iter(RecallFactory(seed=3, lengths=(64, 400)))
    assert next(again) == next(iter(RecallFactory(seed=3, lengths=(64, 400))))


# ---- shards


def test_prepared_shards_train_like_their_texts(converted: Path, texts: Path, tmp_path: Path) -> None:
    paths = prepare(converted, [str(texts), "recall:3000@0.5"], tmp_path / "shards", 4000, say=lambda line: None)
    assert {path.name.rsplit("-", 1)[0] for path in paths} == {"words", "recall"} and len(paths) > 3
    shards = {tokens.name: tokens for tokens, _ in read_sources([str(tmp_path / "shards")], tmp_path / "nowhere")}
    (fresh, _), (recall, _) = read_sources([str(texts), "recall:3000"], converted)
    for one in (fresh, recall):
        stored = shards[one.name]
        assert np.array_equal(stored.tokens, one.tokens) and np.array_equal(stored.ends, one.ends)
        assert stored.tokenizer == Tokenising(converted).fingerprint
    assert shards["words"].answer is None and shards["recall"].answer is not None
    assert shards["recall"].tokens.dtype == np.uint16
    fewer = prepare(converted, [str(texts)], tmp_path / "shards", 10**6, say=lambda line: None)
    assert len(fewer) == 1 and len(list((tmp_path / "shards").glob("words-*.npz"))) == 1


def test_requests_with_answers_are_read_and_marked(tmp_path: Path) -> None:
    Requests([[1, 2, 3], [4]], ["a", "b"], ["train"] * 2, [[5, 6], [7]]).save(tmp_path / "requests.npz")
    tokens = load_tokens(tmp_path / "requests.npz")
    assert tokens.tokens.tolist() == [1, 2, 3, 5, 6, 4, 7] and tokens.ends.tolist() == [5, 7]
    assert tokens.answer is not None and tokens.answer.tolist() == [0, 0, 0, 1, 1, 0, 1]
    np.save(tmp_path / "plain.npy", np.arange(9))
    assert load_tokens(tmp_path / "plain.npy").ends.tolist() == [9]
    np.save(tmp_path / "floats.npy", np.ones(3))
    with pytest.raises(CorruptFile, match="want one row of integer token ids"):
        load_tokens(tmp_path / "floats.npy")
    (tmp_path / "broken.npz").write_bytes(b"PK no")
    with pytest.raises(CorruptFile, match="is no file of token ids"):
        load_tokens(tmp_path / "broken.npz")


def test_tokens_of_another_tokenizer_are_refused(converted: Path, tmp_path: Path) -> None:
    def run(tokens: TokenSet) -> None:
        save_shards(tokens, tmp_path, 10**6)
        run_distill(Options(converted, (str(tmp_path),), tmp_path / "run", load_config(), device="cpu"))

    with pytest.raises(InvalidRequest, match=r"was tokenised by another tokenizer \(0123"):
        run(TokenSet.of("one", [[1, 2, 3]], tokenizer="0123456789abcdef"))
    with pytest.raises(InvalidRequest, match=r"has token id 300, the model's vocabulary has 300 entries"):
        run(TokenSet.of("one", [[1, 300]]))
    with pytest.raises(InvalidRequest, match="has no tokens"):
        run(TokenSet.of("one", []))
    with pytest.raises(InvalidRequest, match="there is no data to train on; name some with --data"):
        run_distill(Options(converted, (), tmp_path / "run", load_config(), device="cpu"))
    assert not (tmp_path / "run").exists()


# ---- packing


def counting(name: str, documents: int, size: int, first: int = 0) -> TokenSet:
    return TokenSet.of(name, [range(first + i * size, first + (i + 1) * size) for i in range(documents)])


def test_an_epoch_has_every_token_once_and_the_next_is_shuffled_anew() -> None:
    stream = PackedStream(counting("a", 9, 7), np.arange(9), seed=1)
    first, second = stream.window(0, 63)[0], stream.window(63, 63)[0]
    assert sorted(first) == list(range(63)) == sorted(second) and first.tolist() != second.tolist()
    assert np.array_equal(stream.window(5, 100)[0], np.concatenate([first[5:], second[:42]]))


def test_sources_are_drawn_by_weight_and_go_on_where_they_were() -> None:
    sources = [(counting("a", 10, 50), 3.0), (counting("b", 10, 50, 1000), 1.0)]
    whole = Mixture(sources, 0, 16)
    rows = [whole.batch(4, 16).tokens for _ in range(10)]
    assert whole.state() == {"a": 480, "b": 160}
    share = sum(int((row >= 1000).all(1).sum()) for row in rows)
    assert share == 10
    resumed = Mixture(sources, 0, 16)
    for _ in range(6):
        resumed.skip(4, 16)
    state = resumed.state()
    again = Mixture(sources, 0, 16)
    again.restore(state)
    for row in rows[6:]:
        assert torch.equal(again.batch(4, 16).tokens, row)


def test_processes_together_read_the_whole_batch() -> None:
    sources = [(counting("a", 10, 50), 1.0), (counting("b", 10, 50, 1000), 1.0)]
    whole, left, right = (Mixture(sources, 0, 16) for _ in range(3))
    for _ in range(3):
        parts = left.batch(4, 16, 0, 2).tokens, right.batch(4, 16, 2, 4).tokens
        assert torch.equal(torch.cat(parts), whole.batch(4, 16).tokens)


def test_held_out_documents_are_never_trained_on() -> None:
    mixture = Mixture([(counting("a", 100, 10), 1.0)], 0, 10)
    held = mixture.held_out_batch(2, 5)
    assert held is not None and torch.equal(held.tokens, mixture.probe(2, 5))
    trained = mixture.batch(300, 10).tokens.unique()
    assert not torch.isin(held.tokens, trained).any() and len(trained) == 990


def test_too_little_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="has 40 tokens, less than one sequence of 64"):
        Mixture([(counting("a", 4, 10), 1.0)], 0, 64)


def test_shards_of_different_tokenizers_do_not_merge() -> None:
    with pytest.raises(InvalidRequest, match="come from different tokenizers"):
        merge([TokenSet.of("a", [[1]], tokenizer="x"), TokenSet.of("a", [[2]], tokenizer="y")])


# ---- settings


def test_settings_come_from_defaults_file_and_changes(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text("[distill]\nlr = 1e-3\ntokens = 1_000\n")
    config = load_config(tmp_path / "own.toml", ["distill.lr=2e-3", "run.compile=false", "align.tokens=2e6"])
    assert config.distill.lr == 2e-3 and config.distill.tokens == 1000 and config.run.compile is False
    assert config.align.tokens == 2_000_000 and json.dumps(config.to_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("distill.rate=1", r"\[distill\] has no key 'rate'; known: tokens"),
        ("train.lr=1", "there is no section 'train'; known: run, align, distill"),
        ("lr=1", "is not of the form section.key=value"),
        ("align.lr=fast", r"\[align\] lr is 'fast', want a value like"),
        ("align.lengths=[[1.0]]", "want pairs like"),
        ("align.tokens=0", "tokens is 0, want a positive number"),
        ("distill.ema=1.0", "want 0 <= ema < 1"),
    ],
)
def test_wrong_settings_are_named(change: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        load_config(None, [change])


def test_length_schedule_follows_its_shares() -> None:
    config = load_config(None, ["distill.tokens=1000", "distill.tokens_per_step=100",
                                "distill.lengths=[[0.5, 4], [0.3, 8], [0.2, 16]]"]).distill  # fmt: skip
    assert [config.length(step) for step in range(10)] == [4] * 5 + [8] * 3 + [16] * 2
    assert config.rows(0) == 100 // (4 * config.layouts)


def test_full_disk_while_preparing(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    def full(file: object, **arrays: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("morph.train.tokens.np.savez_compressed", full)
    with pytest.raises(MorphError, match="is full"):
        prepare(converted, [str(write_texts(tmp_path / "t.txt"))], tmp_path / "shards", 10**6, say=lambda line: None)
    assert not list((tmp_path / "shards").iterdir())
