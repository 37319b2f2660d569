"""A tokenizer from a folder in Hugging Face layout, old and new spellings.

Reads only small JSON files, tokenizer.json and the chat template. Runs on the caller's thread.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from interlace.engine.errors import ModelError
from interlace.engine.token_bytes import byte_table, rule_of_decoder
from interlace.engine.tokenizer_parts import TokenizerParts


def parts_from_folder(path: str | os.PathLike[str]) -> TokenizerParts:
    """Read the folder; see `Tokenizer.from_folder`. Raises: `ModelError`."""
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; pass --tokenizer DIR with a folder that has one."
        )
    spec = _read_json(file)
    backend = _backend(file)
    added = backend.get_added_tokens_decoder()
    rule = rule_of_decoder(spec.get("decoder"))
    tokens = [
        (token_id, token) for token, token_id in backend.get_vocab(with_added_tokens=False).items()
    ]
    tokens += [(token_id, token.content) for token_id, token in added.items()]
    config = _read_json(folder / "tokenizer_config.json")
    eos_token = _token_text(config.get("eos_token"))
    table = byte_table(rule, tokens)
    return TokenizerParts(
        backend=backend,
        table=table,
        strips_leading_space=rule.strips_leading_space,
        special_token_ids=frozenset(i for i, token in added.items() if token.special),
        eos_token_ids=_eos_token_ids(folder, backend, eos_token, len(table)),
        bos_token=_token_text(config.get("bos_token")),
        eos_token=eos_token,
        chat_template=_chat_template(folder, config),
    )


def _backend(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics on some files, which is no `Exception`
        raise ModelError(
            f"{file} cannot be read ({error}); it is damaged or newer than the installed "
            "`tokenizers`: fetch it again, or upgrade that package."
        ) from error
    # Both may be left over from training, and would cut or fill prompts unasked.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> Mapping[str, Any]:
    """The object in `file`; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); fetch it again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} does not hold a JSON object; fetch it again.")
    return content


def _token_text(token: object) -> str | None:
    """A token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _eos_token_ids(
    folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None, vocab_size: int
) -> tuple[int, ...]:
    """Ids of generation_config.json (else config.json), then the tokenizer's own eos token."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        if declared is not None:
            ids += declared if isinstance(declared, list) else [declared]
            break
    own = None if eos_token is None else backend.token_to_id(eos_token)
    ids += [] if own is None else [own]
    known = (i for i in ids if type(i) is int and 0 <= i < vocab_size)
    return tuple(dict.fromkeys(known))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template: a file of its own wins over one inside tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} cannot be read ({error}); fetch it again.") from error
    stored = _read_json(folder / "chat_template.json").get("chat_template")
    found = _named_template(config.get("chat_template") if stored is None else stored)
    return found if isinstance(found, str) else None


def _named_template(stored: object) -> object:
    """Of several named templates the one called `default`, else the first."""
    if not isinstance(stored, list):
        return stored
    by_name = {e.get("name"): e.get("template") for e in stored if isinstance(e, Mapping)}
    return by_name.get("default", next(iter(by_name.values()), None))
