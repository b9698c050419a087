"""Text in pieces is the text of the whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from morph.engine.detokenizer import MAX_WINDOW, Detokenizer


class Bytes:
    """Tokens are bytes, or pairs of bytes from 256 on, so that characters are cut in every way."""

    longest = 0

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(ids))
        data = b"".join(bytes([i]) if i < 256 else bytes([(i - 256) >> 8, (i - 256) & 255]) for i in ids)
        return data.decode("utf-8", errors="replace")


def cut(text: str, sizes: list[int]) -> list[int]:
    """Tokens of one or two bytes."""
    data, tokens = text.encode(), []
    while data:
        size = sizes[len(tokens) % len(sizes)]
        piece, data = data[:size], data[size:]
        tokens.append(piece[0] if len(piece) == 1 else 256 + (piece[0] << 8) + piece[1])
    return tokens


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab é漢🙂\n\ufe0f"), max_size=60), st.lists(st.sampled_from([1, 2]), min_size=1))
def test_pieces_add_up_to_the_text_and_never_change(text: str, sizes: list[int]) -> None:
    decoder = Bytes()
    detokenizer = Detokenizer(decoder, ())
    seen = ""
    for token in cut(text, sizes):
        assert detokenizer.push(token) is None
        assert detokenizer.text.startswith(seen)
        seen = detokenizer.text
    detokenizer.finish(stopped=False)
    assert detokenizer.text == text


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("ab é漢🙂"), max_size=100))
def test_the_window_stays_short(text: str) -> None:
    """Of single bytes: an incomplete character adds three tokens at most."""
    decoder = Bytes()
    detokenizer = Detokenizer(decoder, ())
    for token in text.encode():
        detokenizer.push(token)
    assert detokenizer.text == text
    assert decoder.longest <= MAX_WINDOW + 3


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=50))
def test_broken_bytes_lose_nothing(tokens: list[int]) -> None:
    detokenizer = Detokenizer(Bytes(), ())
    for token in tokens:
        detokenizer.push(token)
    detokenizer.finish(stopped=False)
    assert detokenizer.text == bytes(tokens).decode("utf-8", errors="replace")


def test_a_stop_string_far_in_is_found_across_windows() -> None:
    detokenizer = Detokenizer(Bytes(), ("stop 🙂 here",))
    found = [detokenizer.push(token) for token in cut("x" * 97 + "stop 🙂 here and on", [1, 2])]
    assert found.count("stop 🙂 here") == 1
    assert found[-1] is None or detokenizer.text.startswith("x" * 97)
