"""Stop strings: never shown, found however the text is cut (FE12), and joined with the text."""

from __future__ import annotations

import itertools

import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from interlace.engine.sampling_params import SamplingParams
from interlace.engine.stop_strings import StopStrings
from interlace.engine.text_stream import TextStream
from interlace.engine.tokenizer import Tokenizer
from interlace.engine.tokenizer_parts import TokenizerParts

SMALL_TEXT = st.text("ab", max_size=30)
SMALL_STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def oracle(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The match that ends first, of those the one that starts first, by trying all of them."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@given(SMALL_TEXT, SMALL_STOPS, st.lists(st.integers(0, 99), max_size=8), st.booleans())
def test_fe12_any_cut_gives_what_the_oracle_gives(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    watcher = StopStrings(stops, include)
    shown = "".join(watcher.push(piece) for piece in cut(text, cuts)) + watcher.finish()
    assert (shown, watcher.matched) == oracle(text, stops, include=include)


@given(SMALL_TEXT, SMALL_STOPS)
def test_held_text_is_the_longest_end_that_may_become_a_stop(text: str, stops: list[str]) -> None:
    watcher = StopStrings(stops, include_in_output=False)
    shown = "".join(watcher.push(char) for char in text)
    if watcher.matched is None:
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max((len(b) for b in beginnings if text.endswith(b)), default=0)
        assert shown == text[: len(text) - held]


def test_fe12_nothing_of_a_stop_is_shown_whatever_the_split() -> None:
    text = "ABCDEFGHIJKLM"
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            watcher = StopStrings(["DEFGHIJ"], include_in_output=False)
            pieces = (text[:first], text[first:second], text[second:])
            assert "".join(map(watcher.push, pieces)) == "ABC"
            assert watcher.matched == "DEFGHIJ"
            assert watcher.push("more") == watcher.finish() == ""


def test_fe12_of_a_stop_and_its_prefix_the_prefix_ends_first() -> None:
    watcher = StopStrings(["END.", "END"], include_in_output=False)
    assert watcher.push("the END.") == "the "
    assert watcher.matched == "END"


def test_fe12_of_a_stop_and_its_suffix_the_longer_starts_first() -> None:
    watcher = StopStrings(["ND", "END"], include_in_output=False)
    assert watcher.push("the END.") == "the "
    assert watcher.matched == "END"


def test_held_text_comes_out_when_the_match_fails_and_at_the_end() -> None:
    watcher = StopStrings(["\n\n"], include_in_output=False)
    assert watcher.push("a\n") == "a"
    assert watcher.push("b\n") == "\nb"
    assert watcher.finish() == "\n"
    assert watcher.finish() == ""


def test_a_stop_that_is_shown_holds_nothing_back() -> None:
    watcher = StopStrings(["END"], include_in_output=True)
    assert watcher.push("the EN") == "the EN"
    assert watcher.push("D of it") == "D"
    assert watcher.matched == "END"


def test_without_stops_text_passes_at_once() -> None:
    watcher = StopStrings([], include_in_output=False)
    assert watcher.push("anything") == "anything"
    assert watcher.finish() == ""


# --- joined with the detokenizer -----------------------------------------------------------------

PIECES = [b"a", b"b", b"ab", b"ba", b"", "é".encode(), b"\xc3", b"\xa9", b"END", b"<eos>"]
EOS = len(PIECES) - 1


def toy_tokenizer() -> Tokenizer:
    return Tokenizer(
        TokenizerParts(
            backend=tokenizers.Tokenizer(tokenizers.models.BPE()),
            table=PIECES,
            eos_token_ids=(EOS,),
        )
    )


TOKENS = st.lists(st.integers(0, len(PIECES) - 2), max_size=20)
STOPS = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@given(TOKENS, STOPS, st.lists(st.integers(0, 99), max_size=5), st.booleans(), st.integers(0, 6))
def test_deltas_add_up_to_the_text_before_the_stop(
    tokens: list[int], stops: list[str], cuts: list[int], include: bool, min_tokens: int
) -> None:
    tokenizer = toy_tokenizer()
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=99
    )
    stream = TextStream(tokenizer, [0], params)
    text, used, stop = "", 0, None
    bounds = [0, *sorted(c % (len(tokens) + 1) for c in cuts), len(tokens)]
    for low, high in itertools.pairwise(bounds):
        delta = stream.push(tokens[low:high])
        text, used, stop = text + delta.text, used + delta.num_tokens_used, delta.stop
        if stop is not None:
            break
    text += stream.finish()

    known = tokens_to_known_text(tokens)
    early = known[min(min_tokens, len(tokens))]
    watched = tokenizer.decode(tokens)[len(early) :]
    if len(tokens) < min_tokens:
        expected, matched = tokenizer.decode(tokens), None
    else:
        shown, matched = oracle(watched, list(stops), include=include)
        expected = early + shown
    assert (text, stream.matched) == (expected, matched)
    if stop is not None:
        end = len(early) + watched.index(stop) + len(stop)
        assert len(known[used]) >= end > len(known[used - 1]), "the token that completed the stop"
        assert used > min_tokens
    else:
        assert used == len(tokens)


def tokens_to_known_text(tokens: list[int]) -> list[str]:
    """For each number of tokens, the text that no later token can change."""
    known = []
    for n in range(len(tokens) + 1):
        data = b"".join(PIECES[i] for i in tokens[:n])
        unfinished = data.endswith(b"\xc3")
        known.append(data[: len(data) - unfinished].decode("utf-8", "replace"))
    return known


def test_text_before_min_tokens_is_no_part_of_a_match() -> None:
    params = SamplingParams(stop="ab", min_tokens=1)
    stream = TextStream(toy_tokenizer(), [], params)
    assert stream.push([0]).text == "a"
    assert stream.push([1]).stop is None, "its first half was shown already"
    delta = stream.push([0, 1, 0])
    assert (delta.text, delta.stop, delta.num_tokens_used) == ("", "ab", 2)


def test_a_stop_ending_inside_a_token_drops_the_rest_of_it() -> None:
    stream = TextStream(toy_tokenizer(), [], SamplingParams(stop="EN"))
    delta = stream.push([0, EOS - 1, 0])
    assert (delta.text, delta.stop, delta.num_tokens_used) == ("a", "EN", 2)
    assert stream.finish() == ""


def test_the_token_that_ends_the_answer_is_hidden_unless_asked_for() -> None:
    for include, expected in ((False, "a"), (True, "a<eos>")):
        params = SamplingParams(include_stop_str_in_output=include)
        stream = TextStream(toy_tokenizer(), [], params)
        delta = stream.push([0, EOS], hide_last=True)
        assert (delta.text, delta.num_tokens_used) == (expected, 2)


def test_a_mark_at_the_end_can_complete_a_stop_and_is_not_shown() -> None:
    stream = TextStream(toy_tokenizer(), [], SamplingParams(stop="\ufffd"))
    assert stream.push([0, 6]).text == "a"
    assert stream.finish() == ""
    assert stream.matched == "\ufffd"
