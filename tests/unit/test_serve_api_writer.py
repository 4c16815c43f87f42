"""Text as it comes out of tokens: whole characters, no part of a stop sequence, one text however it is cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from talkoot.model.tokenizer import Tokenizer
from talkoot.serve.api.writer import Writer

BYTES = Tokenizer.bytes()
PAIRS = Tokenizer.train(["the quick brown fox — ein süßer Fuchs — 狐 🦊 " * 3], 300)


def shown(text: str, *stops: str, tokenizer: Tokenizer = BYTES) -> list[str]:
    writer, parts = Writer(tokenizer, stops), []
    for token in tokenizer.encode(text):
        parts.append(writer.push(token))
        if writer.stopped:
            return parts
    return [*parts, writer.end()]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.sampled_from([BYTES, PAIRS]))
def test_parts_make_the_text(text, tokenizer):
    assert "".join(shown(text, tokenizer=tokenizer)) == text


def test_a_character_is_shown_when_it_is_whole():
    assert shown("a🦊") == ["a", "", "", "", "🦊", ""]


@settings(max_examples=100, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_sequence_is_ever_shown(text, stops):
    places = [text.find(stop) for stop in stops if stop in text]
    wanted = text if not places else None
    out = "".join(shown(text, *stops))
    if wanted is not None:
        assert out == wanted
    else:
        assert text.startswith(out)
        assert not any(stop in out for stop in stops)
        assert any(text[len(out) :].startswith(stop) for stop in stops)


def test_what_might_become_a_stop_sequence_is_held_back_and_then_shown():
    assert shown("a##b", "###") == ["a", "", "", "##b", ""]
    assert shown("a##", "###")[-1] == "##"


def test_bytes_that_are_no_text_are_shown_as_such_and_hold_nothing_up():
    writer = Writer(BYTES)
    parts = [writer.push(0xFF + 2) for _ in range(8)]
    assert set("".join(parts)) == {"\ufffd"}


def test_another_model_goes_on_in_its_own_ids():
    writer = Writer(BYTES, ["stop"])
    for token in BYTES.encode("süß s"):
        writer.push(token)
    assert writer.text == "süß "
    assert writer.pass_on(BYTES, same=True) == BYTES.encode("süß s")
    assert writer.pass_on(PAIRS, same=False) == PAIRS.encode("süß s")
    assert [writer.push(token) for token in PAIRS.encode("top")][-1] == ""
    assert writer.stopped
    assert writer.text == "süß "
