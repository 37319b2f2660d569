"""A byte-level BPE tokenizer from the metadata of a GGUF file.

Knows nothing of the file format: it takes the lists and ids that a reader found in it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from interlace.engine.errors import ModelError
from interlace.engine.token_bytes import byte_level_bytes, byte_token_bytes
from interlace.engine.tokenizer_parts import TokenizerParts

REMEDY = "Pass --tokenizer DIR (a folder with a tokenizer.json) to use a tokenizer of your own."


class TokenType(enum.IntEnum):
    """The values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclasses.dataclass(frozen=True, slots=True)
class PreRule:
    """What one value of `tokenizer.ggml.pre` means."""

    split: str | None
    """The pattern that cuts text into words; None is digits one by one, then GPT-2's pattern."""
    end_tokens: tuple[str, ...]
    """Tokens that end an answer in this family even if the file names another one as eos."""
    nfc: bool = False
    ignore_merges: bool = False
    """A word that is a token is taken whole, before any merge is tried."""


def _split_pattern(digits: str) -> str:
    """Llama 3's pattern, which Qwen 2 shares but for how it groups `digits`."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
        r"|[^\r\n\p{L}\p{N}]?\p{L}+"
        rf"|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    )


# The end tokens are those of each family's own generation_config.json. `<|endoftext|>` is one in
# Qwen 2 only: in SmolLM2 it separates documents, and only `<|im_end|>` ends an answer.
PRE_RULES = {
    "smollm": PreRule(split=None, end_tokens=("<|im_end|>",)),
    "llama-bpe": PreRule(
        split=_split_pattern(r"\p{N}{1,3}"),
        end_tokens=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        ignore_merges=True,
    ),
    "qwen2": PreRule(
        split=_split_pattern(r"\p{N}"), end_tokens=("<|im_end|>", "<|endoftext|>"), nfc=True
    ),
}


def parts_from_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    *,
    pre: str,
    token_types: Sequence[int],
    bos_token_id: int | None,
    eos_token_id: int | None,
    add_bos: bool,
    chat_template: str | None,
) -> TokenizerParts:
    """Build the parts; see `Tokenizer.from_bpe`. Raises: `ModelError`."""
    rule = PRE_RULES.get(pre)
    if rule is None:
        known = ", ".join(PRE_RULES)
        raise ModelError(
            f"the file's pre-tokenizer {pre!r} is not supported (known: {known}). {REMEDY}"
        )
    _check_sizes(tokens, token_types)
    bos = _named_token(tokens, bos_token_id, "bos")
    eos = _named_token(tokens, eos_token_id, "eos")
    backend = _backend(tokens, merges, token_types, rule)
    if add_bos:
        if bos is None or bos_token_id is None:
            raise ModelError(f"the file asks for a bos token but names none. {REMEDY}")
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, bos_token_id)]
        )
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    return TokenizerParts(
        backend=backend,
        table=tuple(map(_bytes_of, tokens, token_types)),
        special_token_ids=frozenset(i for i, kind in enumerate(token_types) if kind in special),
        eos_token_ids=tuple(dict.fromkeys(_end_ids(tokens, token_types, rule, eos_token_id))),
        bos_token=bos,
        eos_token=eos,
        chat_template=chat_template,
    )


def _check_sizes(tokens: Sequence[str], token_types: Sequence[int]) -> None:
    if not tokens or len(tokens) != len(token_types):
        raise ModelError(
            f"the file's tokenizer is damaged: {len(tokens)} tokens with {len(token_types)} "
            f"types. {REMEDY}"
        )


def _named_token(tokens: Sequence[str], token_id: int | None, role: str) -> str | None:
    if token_id is None:
        return None
    if not 0 <= token_id < len(tokens):
        raise ModelError(
            f"the file's {role} token id {token_id} is outside its {len(tokens)} tokens. {REMEDY}"
        )
    return tokens[token_id]


def _bytes_of(token: str, kind: int) -> bytes:
    if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
        return token.encode()  # stored as they are spelt in text
    if kind == TokenType.UNUSED:
        return b""
    if kind == TokenType.BYTE and (byte := byte_token_bytes(token)) is not None:
        return byte
    return byte_level_bytes(token)


def _end_ids(
    tokens: Sequence[str], token_types: Sequence[int], rule: PreRule, eos_token_id: int | None
) -> Iterator[int]:
    if eos_token_id is not None:
        yield eos_token_id
    for token_id, kind in enumerate(token_types):
        added = kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        if added and tokens[token_id] in rule.end_tokens:
            yield token_id


def _backend(
    tokens: Sequence[str], merges: Sequence[str], token_types: Sequence[int], rule: PreRule
) -> tokenizers.Tokenizer:
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, token_types, strict=True))
        if kind != TokenType.UNUSED
    }
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab, merges=list(_pairs(merges, vocab)), ignore_merges=rule.ignore_merges
        )
    )
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(rule)
    backend.decoder = decoders.ByteLevel()
    for kind, add in (
        (TokenType.CONTROL, backend.add_special_tokens),
        (TokenType.USER_DEFINED, backend.add_tokens),
    ):
        names = [token for token, its in zip(tokens, token_types, strict=True) if its == kind]
        add(
            [
                tokenizers.AddedToken(n, special=kind == TokenType.CONTROL, normalized=False)
                for n in names
                if n
            ]
        )
    return backend


def _pairs(merges: Sequence[str], vocab: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Split and check each merge: the library panics on some bad ones."""
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(
                f"the file's tokenizer is damaged: merge {merge!r} is not made of its tokens. "
                f"{REMEDY}"
            )
        yield left, right


def _pre_tokenizer(rule: PreRule) -> pre_tokenizers.PreTokenizer:
    if rule.split is None:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(rule.split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
