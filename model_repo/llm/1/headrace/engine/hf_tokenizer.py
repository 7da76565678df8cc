"""A Hugging Face model folder: its tokenizer, and each token's bytes.

Engines detokenize in ways of their own, so none of them does it for us: text is joined from the bytes of the tokens, by
`text.py`, as for llama.cpp. The bytes come from `tokenizer.json`; where its decoder is of a kind that is not known
here, loading fails with a sentence instead of a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.engine.backend import ModelFacts
from headrace.engine.config import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class HfTokenizer:
    """`folder` holds tokenizer.json, and config.json, generation_config.json, tokenizer_config.json where there are.

    Raises `ConfigError`.
    """

    def __init__(self, folder: Path) -> None:
        document = _read(folder / "tokenizer.json", required=True)
        try:
            from tokenizers import Tokenizer  # not at the top: only such a worker has the library
        except ImportError:
            raise ConfigError("This engine needs the package tokenizers, which is not installed.") from None
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:
            raise ConfigError(f"{folder / 'tokenizer.json'} is not a tokenizer that can be loaded.") from None
        self._settings = _read(folder / "tokenizer_config.json")
        self._model = _read(folder / "config.json")
        self._generation = _read(folder / "generation_config.json")
        self._pieces = _pieces(document)
        self.begin_text = _content(self._settings.get("bos_token"))
        self.end_text = _content(self._settings.get("eos_token"))
        template = folder / "chat_template.jinja"
        own = self._settings.get("chat_template")
        self.chat_template = (
            template.read_text(encoding="utf-8") if template.is_file() else own if isinstance(own, str) else None
        )

    @property
    def vocabulary(self) -> int:
        """Ids that a prompt may have: the embedding's rows where the model says how many, else the tokenizer's."""
        size = self._text_model.get("vocab_size")
        return size if isinstance(size, int) and size > 0 else max(self._pieces, default=-1) + 1

    @property
    def end_tokens(self) -> frozenset[int]:
        """Every id that one of the files calls the end of a sequence."""
        found = {
            token
            for source in (self._model, self._text_model, self._generation)
            for token in _ids(source.get("eos_token_id"))
        }
        token = self._tokenizer.token_to_id(self.end_text) if self.end_text else None
        return frozenset(found if token is None else {*found, token})

    @property
    def context_tokens_max(self) -> int:
        """What the model was trained for; 0: not said."""
        longest = self._text_model.get("max_position_embeddings")
        return longest if isinstance(longest, int) and longest > 0 else 0

    @property
    def _text_model(self) -> Mapping[str, Any]:
        inner = self._model.get("text_config")
        return inner if isinstance(inner, dict) else self._model

    def facts(self, kind: str, versions: Mapping[str, str], guided: frozenset[str] = frozenset()) -> ModelFacts:
        """What is known of the model without having loaded it."""
        names = self._model.get("architectures")
        return ModelFacts(
            kind=kind,
            model=str(names[0]) if isinstance(names, list) and names else str(self._model.get("model_type", "unknown")),
            vocabulary=self.vocabulary,
            end_tokens=self.end_tokens,
            context_tokens_max=self.context_tokens_max,
            chat_template=self.chat_template,
            begin_text=self.begin_text,
            end_text=self.end_text,
            guided=guided,
            versions=versions,
        )

    def tokenize(self, text: str) -> list[int]:
        """Text as tokens; control tokens may be written out, and a template may have written the first one."""
        has_begin = bool(self.begin_text) and text.startswith(self.begin_text)
        return list(self._tokenizer.encode(text, add_special_tokens=not has_begin).ids)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; none for control tokens and for ids that the tokenizer does not have."""
        return self._pieces.get(token, b"")


def _pieces(document: Mapping[str, Any]) -> dict[int, bytes]:
    added = {item["id"]: item for item in document.get("added_tokens") or []}
    vocabulary = document.get("model", {}).get("vocab")
    if isinstance(vocabulary, dict):
        known = {index: text for text, index in vocabulary.items()}
    elif isinstance(vocabulary, list):  # Unigram: [text, score]
        known = {index: item[0] for index, item in enumerate(vocabulary)}
    else:
        raise ConfigError("tokenizer.json has no vocabulary.")
    decoders = {item.get("type") for item in _decoders(document.get("decoder"))}
    if "ByteLevel" in decoders:
        table = _byte_level()
        pieces = {index: _from_byte_level(text, table) for index, text in known.items()}
    elif "ByteFallback" in decoders or decoders & {"Metaspace", "Replace"}:
        space = _space(document.get("decoder"))
        pieces = {index: _from_marked(text, space) for index, text in known.items()}
    else:
        raise ConfigError("tokenizer.json has a decoder that is neither byte-level nor one that marks spaces.")
    for index, item in added.items():
        pieces[index] = b"" if item.get("special") else str(item.get("content", "")).encode()
    return pieces


def _decoders(decoder: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(decoder, dict):
        yield decoder
        for inner in decoder.get("decoders") or ():
            yield from _decoders(inner)


def _space(decoder: object) -> str:
    """The character that stands for a space."""
    for item in _decoders(decoder):
        pattern = item.get("pattern")
        if item.get("type") == "Replace" and item.get("content") == " " and isinstance(pattern, dict):
            return str(pattern.get("String", "▁"))
        if item.get("type") == "Metaspace":
            return str(item.get("replacement", "▁"))
    return "▁"


def _from_marked(text: str, space: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace(space, " ").encode()


def _from_byte_level(text: str, table: Mapping[str, int]) -> bytes:
    """A token that was added with characters outside the alphabet stands for itself."""
    if all(character in table for character in text):
        return bytes([table[character] for character in text])
    return text.encode()


def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others are moved behind U+0100 in their order."""
    table = {}
    moved = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[chr(byte)] = byte
        else:
            table[chr(256 + moved)] = byte
            moved += 1
    return table


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [one for one in values if isinstance(one, int) and not isinstance(one, bool) and one >= 0]


def _content(token: object) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError(f"model_path must name a folder with {path.name}, {path.parent} has none.")
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{path} is not readable JSON.") from None
    return document if isinstance(document, dict) else {}
