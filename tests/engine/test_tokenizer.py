"""Tokenizers from GGUF metadata and from Hugging Face folders, with tiny vocabularies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from interlace.engine.errors import ModelError, PromptError
from interlace.engine.token_bytes import BYTE_ALPHABET, rule_of_decoder
from interlace.engine.tokenizer import Tokenizer

BYTES = sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__)
WORDS = ["Ġt", "he", "Ġthe", "ĠĠ", "12", "hello", "aa"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ", "1 2", "a a"]
ADDED = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<tool>": 4, "<unk>": 2}
TOKENS = [*ADDED, *BYTES, *WORDS]
TYPES = [*ADDED.values(), *(1 for _ in BYTES), *(1 for _ in WORDS)]
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEXTS = [
    "a  1",
    "the the  12",
    "café 你好 😀👩\u200d👩\u200d👧",
    "it's we'll\r\n\n x",
    "<|im_start|>a<tool>b<|im_end|>",
]


def from_bpe(**changes: Any) -> Tokenizer:
    arguments: dict[str, Any] = {
        "tokens": TOKENS,
        "merges": MERGES,
        "pre": "smollm",
        "token_types": TYPES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos": False,
        "chat_template": CHATML,
    }
    return Tokenizer.from_bpe(**arguments | changes)


def spelt(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)]


# --- from GGUF metadata --------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_ids_spell_the_text(pre: str, text: str) -> None:
    tokenizer = from_bpe(pre=pre)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


@given(st.text(max_size=20))
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert ROUND_TRIP.decode(ROUND_TRIP.encode(text), skip_special_tokens=False) == text


ROUND_TRIP = from_bpe()


def test_smollm_takes_digits_one_by_one_before_spaces_are_grouped() -> None:
    assert spelt(from_bpe(), "a  12") == ["a", "  ", "1", "2"]


def test_llama_groups_digits_and_takes_whole_words_before_merges() -> None:
    tokenizer = from_bpe(pre="llama-bpe")
    assert spelt(tokenizer, "12 the") == ["12", " the"]
    assert spelt(tokenizer, "hello") == ["hello"], "no merge leads there"
    assert spelt(tokenizer, "aa\n\n") == ["aa", "\n", "\n"]


def test_qwen_composes_characters_and_takes_digits_one_by_one() -> None:
    tokenizer = from_bpe(pre="qwen2")
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")
    assert spelt(tokenizer, "12") == ["1", "2"]
    assert spelt(tokenizer, "hello") == ["he", *"llo"], "by merges alone"


def test_only_control_and_unknown_tokens_are_special() -> None:
    tokenizer = from_bpe()
    assert tokenizer.special_token_ids == {0, 1, 2, 4}
    ids = tokenizer.encode("<|im_start|>a<tool><unk>")
    assert ids[:2] == [1, TOKENS.index("a")]
    assert ids[2] == 3, "a user-defined token is found in text"
    assert 4 not in ids, "an unknown token is never written"
    assert tokenizer.decode([1, 3, 2, 4]) == "<tool>"
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=False) == "<|im_start|><tool><|im_end|>"


def test_ends_are_the_declared_one_and_those_of_the_family() -> None:
    assert from_bpe().eos_token_ids == (2,)
    assert from_bpe(eos_token_id=0).eos_token_ids == (0, 2)
    assert from_bpe(pre="qwen2").eos_token_ids == (2, 0)
    assert from_bpe(pre="llama-bpe").eos_token_ids == (2,)
    renamed = ["<|eot_id|>", *TOKENS[1:]]
    assert from_bpe(pre="llama-bpe", tokens=renamed).eos_token_ids == (2, 0)
    assert from_bpe(eos_token_id=None).eos_token_ids == (2,)


def test_byte_unused_and_unknown_ids() -> None:
    tokenizer = from_bpe(
        tokens=[*TOKENS, "<0xE2>", "[PAD7]", "<→User→>"], token_types=[*TYPES, 6, 5, 3]
    )
    size = len(TOKENS)
    assert tokenizer.vocab_size == size + 3
    assert tokenizer.token_bytes(size) == b"\xe2"
    assert tokenizer.token_bytes(size + 1) == b""
    assert tokenizer.token_bytes(size + 2) == "<→User→>".encode()
    assert tokenizer.token_bytes(size + 3) == tokenizer.token_bytes(-1) == b""
    assert tokenizer.decode([size, size + 9]) == "\ufffd"


def test_bos_is_added_to_text_and_never_twice_to_a_chat() -> None:
    tokenizer = from_bpe(add_bos=True, chat_template="{{ bos_token }}{{ messages[0].content }}")
    a = TOKENS.index("a")
    assert tokenizer.encode("a") == [1, a]
    assert tokenizer.encode("a", add_special_tokens=False) == [a]
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [1, a]
    assert from_bpe().encode("a") == [a]


def test_a_chat_becomes_a_prompt() -> None:
    messages = [{"role": "user", "content": "a"}]
    tokenizer = from_bpe()
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>user\na<|im_end|>\n"
    assert tokenizer.encode_chat(messages)[-2:] == [2, TOKENS.index("Ċ")]


def test_without_a_template_a_chat_is_refused_and_text_is_not() -> None:
    tokenizer = from_bpe(chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(PromptError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "a"}])
    broken = from_bpe(chat_template="{% if %}")
    assert broken.encode("a")
    with pytest.raises(PromptError, match="broken"):
        broken.encode_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("pre", ["gpt2", "deepseek-llm", ""])
def test_another_pre_tokenizer_is_refused_by_name(pre: str) -> None:
    with pytest.raises(ModelError, match=rf"'{pre}' is not supported.*--tokenizer DIR"):
        from_bpe(pre=pre)


@pytest.mark.parametrize(
    "changes",
    [
        {"token_types": TYPES[:-1]},
        {"tokens": [], "token_types": []},
        {"merges": ["x yz"]},
        {"merges": ["a b"]},
        {"merges": [""]},
        {"bos_token_id": len(TOKENS)},
        {"eos_token_id": -1},
        {"add_bos": True, "bos_token_id": None},
    ],
)
def test_metadata_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="--tokenizer DIR"):
        from_bpe(**changes)


@pytest.mark.parametrize("text", ["\ud800", None, b"bytes", 3])
def test_text_that_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(PromptError, match="tokenised"):
        from_bpe().encode(text)


def test_threads_may_encode_at_once() -> None:
    tokenizer = from_bpe()
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert list(pool.map(tokenizer.encode, TEXTS)) == expected


# --- from a folder -------------------------------------------------------------------------------


def trained_byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|eot|>"],
    )
    backend.train_from_iterator(["the cat sat on the mat, the end"] * 4, trainer)
    backend.add_tokens(["<think>", "日本"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


def sentencepiece_like(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "c", "at"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoder
    return backend


def llama_decoder() -> decoders.Decoder:
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )


def write(folder: Path, backend: tokenizers.Tokenizer, **files: Mapping[str, Any]) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_byte_level_folder_decodes_as_its_own_library_does(tmp_path: Path) -> None:
    backend = trained_byte_level()
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.special_token_ids == {0, 1, 2}
    for text in ["the cat", "日本 <think>é</s>", "👩‍👩‍👧 สวัสดี"]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert ids[0] == 0, "the file's own rule adds bos"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>" + text
        for skip in (True, False):
            ours = tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours == backend.decode(ids, skip_special_tokens=skip)
    assert tokenizer.token_bytes(backend.get_vocab()["日本"]) == "日本".encode()


def test_truncation_and_padding_left_in_a_file_do_not_touch_prompts(tmp_path: Path) -> None:
    backend = trained_byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    ids = Tokenizer.from_folder(write(tmp_path, backend)).encode("the cat sat on the mat")
    assert 3 < len(ids) < 50


@pytest.mark.parametrize(
    "text_ids", [[260], [260, 261, 262], [1, 260, 261], [261, 260], [259, 259]]
)
def test_sentencepiece_folders_decode_as_their_library_does(
    tmp_path: Path, text_ids: list[int]
) -> None:
    backend = sentencepiece_like(llama_decoder())
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    assert tokenizer.decode(text_ids) == backend.decode(text_ids)


def test_sentencepiece_bytes_and_spaces(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, sentencepiece_like(llama_decoder())))
    assert tokenizer.strips_leading_space
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.token_bytes(260) == b" the"
    assert tokenizer.decode([260, 260]) == "the the"
    assert tokenizer.decode([3 + byte for byte in "한".encode()]) == "한"
    assert tokenizer.decode([1, 260], skip_special_tokens=False) == "<s> the"


@pytest.mark.parametrize(("scheme", "expected"), [("always", "the the"), ("never", " the the")])
def test_metaspace_strips_the_space_that_it_adds(
    tmp_path: Path, scheme: Any, expected: str
) -> None:
    backend = sentencepiece_like(decoders.Metaspace(prepend_scheme=scheme))
    tokenizer = Tokenizer.from_folder(write(tmp_path, backend))
    assert tokenizer.decode([260, 260]) == expected == backend.decode([260, 260])
    assert tokenizer.token_bytes(3) == b"<0x00>", "without ByteFallback it is only text"


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 2, "stop": 0},
            ],
        },
        {"type": "Replace", "pattern": {"Regex": "a"}, "content": " "},
    ],
)
def test_a_decoder_that_is_no_concatenation_is_refused(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(ModelError, match=r"decoder.*not supported"):
        rule_of_decoder(decoder)


def test_the_refusal_names_the_decoder() -> None:
    with pytest.raises(ModelError, match="WordPiece"):
        rule_of_decoder({"type": "WordPiece"})


def test_old_metaspace_spelling() -> None:
    assert rule_of_decoder({"type": "Metaspace", "add_prefix_space": True}).strips_leading_space
    rule = rule_of_decoder({"type": "Metaspace", "add_prefix_space": False})
    assert not rule.strips_leading_space
    assert rule.token_bytes("▁a") == b" a"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 1}}, (1,)),
        ({"config": {"eos_token_id": [2, 1]}}, (2, 1)),
        ({"config": {"eos_token_id": 2}, "generation_config": {"eos_token_id": [1]}}, (1,)),
        ({"config": {"eos_token_id": 2}, "generation_config": {}}, (2,)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (1,)),
        (
            {"tokenizer_config": {"eos_token": {"content": "</s>"}}, "config": {"eos_token_id": 2}},
            (2, 1),
        ),
        ({"config": {"eos_token_id": [10**6, True, None, "x", 1, 1]}}, (1,)),
    ],
)
def test_ends_declared_by_a_folder(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    tokenizer = Tokenizer.from_folder(write(tmp_path, trained_byte_level(), **files))
    assert tokenizer.eos_token_ids == expected


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("one", "one"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], "r"),
    ],
)
def test_templates_in_tokenizer_config(tmp_path: Path, stored: Any, expected: str) -> None:
    folder = write(tmp_path, trained_byte_level(), tokenizer_config={"chat_template": stored})
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == expected


def test_a_template_file_wins_and_gets_the_special_tokens(tmp_path: Path) -> None:
    config = {"chat_template": "config", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    stored = {"chat_template": "{{ bos_token }}json{{ eos_token }}"}
    folder = write(tmp_path, trained_byte_level(), tokenizer_config=config, chat_template=stored)
    messages = [{"role": "user", "content": "x"}]
    assert Tokenizer.from_folder(folder).apply_chat_template(messages) == "<s>json</s>"
    (folder / "chat_template.jinja").write_text("{{ bos_token }}the cat", encoding="utf-8")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode_chat(messages) == tokenizer.encode("the cat"), "bos once"


def test_a_folder_without_a_tokenizer_or_with_a_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*--tokenizer DIR"):
        Tokenizer.from_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    panics = json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    for content in ("{", "[]", "{}", '{"decoder": 3}', panics):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ModelError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)
    write(tmp_path, trained_byte_level())
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json"):
        Tokenizer.from_folder(tmp_path)
