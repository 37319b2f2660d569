"""Text as it comes: FE06, FE07, FE09 and FE11."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from interlace.engine.detokenizer import MAX_HELD_BYTES, IncrementalDetokenizer
from interlace.engine.tokenizer import Tokenizer
from interlace.engine.tokenizer_parts import TokenizerParts

MARK = "\ufffd"
SPECIAL = 256
WORDS = [b"<s>", b" ", b" the", b"word", "안녕".encode(), "สวัสดี".encode()[:4], MARK.encode(), b""]
TABLE = [*(bytes([byte]) for byte in range(256)), *WORDS]
SAMPLES = ["안녕하세요", "สวัสดีครับ", "👩‍👩‍👧 family", "naïve 你好", MARK + "real", " lead"]


def toy_tokenizer(*, strips: bool = False) -> Tokenizer:
    """A token for each byte, and some longer ones; id 256 is special."""
    return Tokenizer(
        TokenizerParts(
            backend=tokenizers.Tokenizer(tokenizers.models.BPE()),
            table=TABLE,
            strips_leading_space=strips,
            special_token_ids=frozenset({SPECIAL}),
        )
    )


def run(tokenizer: Tokenizer, prompt: list[int], pushes: list[list[int]], *, skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return "".join(detokenizer.push(ids) for ids in pushes) + detokenizer.finish()


def answer_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int], *, skip: bool) -> str:
    """The definition: the whole text less what is the prompt's own."""
    data = tokenizer.visible_bytes(prompt, skip)
    added = tokenizer.visible_bytes(answer, skip)
    for cut, more in itertools.product(range(1, 4), range(1, 4)):
        enough = len(data) >= cut and len(added) >= more
        if enough and is_one_character(data[-cut:] + added[:more]):
            return (data[-cut:] + added).decode("utf-8", "replace")
    whole = tokenizer.decode(prompt + answer, skip)
    before = tokenizer.decode(prompt, skip)
    assert whole.startswith(before)
    return whole[len(before) :]


def is_one_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def cut_into_pushes(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


BROKEN = st.sampled_from([0xE2, 0x96, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xEF, 0xBF, 0xBD, 0xC0])
IDS = st.lists(BROKEN | st.integers(0x20, len(TABLE) + 1), max_size=12)


@given(IDS, IDS, st.lists(st.integers(0, 99), max_size=6), st.booleans(), st.booleans())
@example(prompt=[0xF0, 0x9F], answer=[0x98, 0x80], cuts=[], skip=False, strips=False)
@example(prompt=[0xF0, 0x9F], answer=[0x98, 0x41], cuts=[], skip=False, strips=False)
@example(prompt=[0xEF, 0xBF], answer=[0xBD], cuts=[], skip=False, strips=False)
@example(prompt=[0xED, 0xA0], answer=[], cuts=[], skip=False, strips=False)
@example(prompt=[0xED, 0xA0], answer=[0xB0], cuts=[], skip=False, strips=False)
@example(prompt=[SPECIAL], answer=[0x20, 0x41], cuts=[], skip=True, strips=True)
def test_fe11_any_cut_adds_up_to_the_whole_less_the_prompt(
    prompt: list[int], answer: list[int], cuts: list[int], skip: bool, strips: bool
) -> None:
    # I10
    tokenizer = toy_tokenizer(strips=strips)
    pieces = run(tokenizer, prompt, cut_into_pushes(answer, cuts), skip=skip)
    assert pieces == answer_text(tokenizer, prompt, answer, skip=skip)


@pytest.mark.parametrize("text", SAMPLES)
def test_fe07_characters_split_over_byte_tokens_come_out_whole(text: str) -> None:
    tokenizer, ids = toy_tokenizer(), list(text.encode())
    detokenizer = IncrementalDetokenizer(tokenizer, [65], skip_special_tokens=True)
    shown = ""
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert text.startswith(shown), "no mark is shown for a character that is under way"
    assert shown + detokenizer.finish() == text
    for cut in range(len(ids) + 1):
        assert run(tokenizer, [65], [ids[:cut], ids[cut:]], skip=True) == text


@pytest.mark.parametrize("inside", [1, 2, 3])
def test_fe06_a_prompt_that_ends_inside_an_emoji(inside: int) -> None:
    tokenizer, emoji = toy_tokenizer(), list("😀".encode())
    prompt = [*b"look: ", *emoji[:inside]]
    assert run(tokenizer, prompt, [[i] for i in emoji[inside:]] + [[33]], skip=True) == "😀!"
    assert run(tokenizer, prompt, [[33]], skip=True) == "!", "the mark is the prompt's"
    assert run(tokenizer, prompt, [], skip=True) == ""


def test_fe09_real_marks_flow_and_each_token_costs_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = toy_tokenizer()
    looked_up: list[int] = []
    token_bytes = Tokenizer.token_bytes

    def counted(self: Tokenizer, token_id: int) -> bytes:
        looked_up.append(token_id)
        return token_bytes(self, token_id)

    monkeypatch.setattr(Tokenizer, "token_bytes", counted)
    detokenizer = IncrementalDetokenizer(tokenizer, [65] * 1000, skip_special_tokens=True)
    assert len(looked_up) <= MAX_HELD_BYTES, "a long prompt is not decoded"
    for token_id in (256 + WORDS.index(MARK.encode()), 0xFF):
        for _ in range(5000):
            looked_up.clear()
            assert detokenizer.push([token_id]) == MARK
            assert len(looked_up) == 1
    assert detokenizer.finish() == ""


def test_at_most_three_bytes_are_held_back() -> None:
    detokenizer = IncrementalDetokenizer(toy_tokenizer(), [], skip_special_tokens=True)
    assert [detokenizer.push([i]) for i in (0xF0, 0x9F, 0x98)] == ["", "", ""]
    assert detokenizer.push([0x41]) == MARK + "A"
    assert detokenizer.push([0xE2]) == ""
    assert detokenizer.finish() == MARK


def test_fe11_only_the_start_of_the_whole_text_loses_its_space() -> None:
    tokenizer = toy_tokenizer(strips=True)
    the = 256 + WORDS.index(b" the")
    assert run(tokenizer, [], [[the], [the]], skip=True) == "the the"
    assert run(tokenizer, [SPECIAL], [[the]], skip=True) == "the"
    assert run(tokenizer, [SPECIAL], [[the]], skip=False) == " the"
    assert run(tokenizer, [the], [[the]], skip=True) == " the"
    assert tokenizer.decode([the, the]) == "the the"


def test_special_tokens_are_shown_only_if_asked_for() -> None:
    tokenizer = toy_tokenizer()
    assert run(tokenizer, [65], [[66], [SPECIAL], [67]], skip=True) == "BC"
    assert run(tokenizer, [65], [[66], [SPECIAL], [67]], skip=False) == "B<s>C"
