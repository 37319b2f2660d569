"""Which bytes each token stands for: the one table that all text out is made from.

Knows nothing of requests or files; tells the decoders whose text is a plain concatenation of
token bytes from those whose text is not, and refuses the latter by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from interlace.engine.errors import ModelError

METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REMEDY = "Use a tokenizer.json with a ByteLevel, Metaspace or Replace/ByteFallback/Fuse decoder."


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each of the 256 bytes, as character -> byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one with a character outside the alphabet is plain UTF-8."""
    try:
        return bytes([BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()


def byte_token_bytes(token: str) -> bytes | None:
    """The byte that a token spelt `<0xHH>` stands for; None for any other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else None


@dataclasses.dataclass(frozen=True, slots=True)
class ByteRule:
    """How a Hugging Face decoder turns one token into bytes."""

    byte_level: bool = False
    space: str | None = None
    """The character that stands for a space (sentencepiece family)."""
    byte_fallback: bool = False
    """Tokens spelt `<0xHH>` are single bytes."""
    strips_leading_space: bool = False
    """One space at the very start of a text is an artefact of encoding and is not shown."""

    def token_bytes(self, token: str) -> bytes:
        """Bytes of `token`."""
        if self.byte_level:
            return byte_level_bytes(token)
        if self.byte_fallback and (byte := byte_token_bytes(token)) is not None:
            return byte
        return (token if self.space is None else token.replace(self.space, " ")).encode()


def rule_of_decoder(decoder: Mapping[str, Any] | None) -> ByteRule:
    """The rule of the `decoder` entry of a tokenizer.json.

    Raises: `ModelError`, naming the decoder, if its text is not a concatenation of token bytes.
    """
    parts = _flatten(decoder)
    names = [str(part.get("type")) for part in parts]
    if names == ["ByteLevel"]:
        return ByteRule(byte_level=True)
    if names == ["Metaspace"]:
        return _metaspace_rule(parts[0])
    known = ["Replace", "ByteFallback", "Fuse", "Strip"]
    in_order = names == [name for name in known if name in names]
    # A Strip before the tokens are fused would eat a space of every token.
    if "Replace" in names and in_order and ("Strip" not in names or "Fuse" in names):
        return _sentencepiece_rule({str(part["type"]): part for part in parts})
    shown = " + ".join(names) or "none"
    raise ModelError(f"the tokenizer's decoder ({shown}) is not supported. {_REMEDY}")


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder.get("decoders", ()) for part in _flatten(inner)]
    return [decoder]


def _metaspace_rule(part: Mapping[str, Any]) -> ByteRule:
    # Files written before `prepend_scheme` existed have the flag `add_prefix_space`.
    old_flag = "always" if part.get("add_prefix_space", True) else "never"
    scheme = part.get("prepend_scheme", old_flag)
    return ByteRule(
        space=str(part.get("replacement", METASPACE)), strips_leading_space=scheme != "never"
    )


def _sentencepiece_rule(parts: Mapping[str, Mapping[str, Any]]) -> ByteRule:
    replace, strip = parts["Replace"], parts.get("Strip")
    if replace.get("pattern") != {"String": METASPACE} or replace.get("content") != " ":
        raise ModelError(
            f"the tokenizer's decoder replaces {replace.get('pattern')} by "
            f"{replace.get('content')!r}, which is not supported. {_REMEDY}"
        )
    starts = None if strip is None else (strip.get("content"), strip.get("start"))
    ends = 0 if strip is None else strip.get("stop", 0)
    if starts not in (None, (" ", 0), (" ", 1)) or ends != 0:
        raise ModelError(
            f"the tokenizer's decoder strips more than one leading space ({dict(strip or {})}), "
            f"which is not supported. {_REMEDY}"
        )
    return ByteRule(
        space=METASPACE,
        byte_fallback="ByteFallback" in parts,
        strips_leading_space=starts == (" ", 1),
    )


def byte_table(rule: ByteRule, tokens: Iterable[tuple[int, str]]) -> Sequence[bytes]:
    """Token id -> bytes; of two tokens with one id the later counts, and gaps are b""."""
    known = dict(tokens)
    table = [b""] * (max(known, default=-1) + 1)
    for token_id, token in known.items():
        table[token_id] = rule.token_bytes(token)
    return tuple(table)
