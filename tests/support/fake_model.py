"""A model for the fakes of GPU engines: a folder as Hugging Face has it, and tokens that follow from those before.

Nothing is computed and no weights exist. The next token follows from the last few and, unless greedy, the seed, so an
answer that is taken up again goes on as it would have. `[[say=TEXT]]` and `[[end=N]]` in a prompt steer it, as the
synthetic engine is steered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

END = 256
_WORDS = (
    " the of and to in is that it for was on are as with they be at one have this from or had by hot but some what"
    " there we can out other were all your when up use word how said an each she which do their time if will way"
    " about many then them would write like so these her long make thing see him two has look more day could go"
    " água über вода река νερό 水 川 물 पानी ماء"
)
_HALF = "🌊".encode()[:2]
_SECOND = [one.encode()[2:] for one in ("🌊", "💧", "🚰", "⛲", "🏞", "🐟", "🛶") if one.encode()[:2] == _HALF]
TABLE = [*(bytes([one]) for one in range(256)), b"", *(f" {one}".encode() for one in _WORDS.split())]
_FIRST_WORD = END + 1
FIRST_HALF = len(TABLE)
TABLE += [_HALF, *_SECOND]
VOCABULARY = len(TABLE)
_DIRECTIVE = re.compile(rb"\[\[(?:end=(\d{1,9})|say=(.*?))\]\]", re.DOTALL)
_LONGEST = sorted(range(_FIRST_WORD, VOCABULARY), key=lambda one: -len(TABLE[one]))
_SPLIT = re.compile(b"|".join(re.escape(TABLE[one]) for one in _LONGEST) + b"|.", re.DOTALL)
_ID = {TABLE[one]: one for one in (*range(256), *range(_FIRST_WORD, VOCABULARY))}
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def tokenize(text: str) -> list[int]:
    """What the folder's tokenizer does, without it."""
    return [_ID[piece] for piece in _SPLIT.findall(text.encode())]


def write_folder(folder: Path, context_tokens: int = 4096) -> Path:
    """tokenizer.json and its neighbours; there are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = _alphabet()
    pieces = ["<|end|>" if one == END else "".join(alphabet[byte] for byte in TABLE[one]) for one in range(VOCABULARY)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": END, "content": "<|end|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**end, "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in pieces], "byte_fallback": False},
    }
    config = {"architectures": ["FakeForCausalLM"], "vocab_size": VOCABULARY, "max_position_embeddings": context_tokens}
    documents: dict[str, dict[str, Any]] = {
        "tokenizer.json": tokenizer,
        "config.json": {**config, "model_type": "llama", "eos_token_id": END},
        "generation_config.json": {"eos_token_id": [END], "temperature": 0.6, "top_p": 0.9},
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": _TEMPLATE},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


@dataclass
class Answer:
    """The tokens that follow a prompt, without end; `seed` None is greedy."""

    prompt: Sequence[int]
    seed: int | None = None
    _script: list[int] = field(default_factory=list)
    _end_after: int = -1

    def __post_init__(self) -> None:
        text = b"".join(TABLE[one] for one in self.prompt)
        directives = list(_DIRECTIVE.finditer(text))
        if directives:
            end, say = directives[-1].groups()
            said = len(tokenize(text[directives[-1].end() :].decode(errors="surrogateescape"))) if end else 0
            self._script = [*tokenize(say.decode(errors="replace")), END] if say is not None else []
            self._end_after = int(end) - said if end else -1

    def __iter__(self) -> Iterator[int]:
        tail = list(self.prompt[-8:])
        done = self._spoken()
        produced = 0
        while True:
            if self._script and done < len(self._script):
                token = self._script[done]
                done += 1
            elif self._end_after >= 0 and produced >= self._end_after:
                token = END
            else:
                token = self._next(tail)
            produced += 1
            tail = [*tail[-7:], token]
            yield token

    def _spoken(self) -> int:
        """How much of the script the prompt ends with: it is an answer that is taken up again."""
        for count in range(min(len(self._script), len(self.prompt)), 0, -1):
            if list(self.prompt[-count:]) == self._script[:count]:
                return count
        return 0

    def _next(self, tail: Sequence[int]) -> int:
        state = f"{self.seed}:{','.join(map(str, tail))}".encode()
        drawn = int.from_bytes(blake2b(state, digest_size=8).digest(), "little")
        if tail and tail[-1] == FIRST_HALF:
            return FIRST_HALF + 1 + drawn % len(_SECOND)
        if drawn % 16 == 0:
            return FIRST_HALF
        return _FIRST_WORD + drawn % (FIRST_HALF - _FIRST_WORD)


def logprobs(token: int, top: int) -> list[tuple[int, float]]:
    """The drawn token first, then others."""
    others = [((token + 1 + rank) % FIRST_HALF, -2.0 - rank) for rank in range(max(0, top - 1))]
    return [(token, -0.25), *others]


def _alphabet() -> list[str]:
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [one for one in range(256) if one not in plain]
    return [chr(one) if one in plain else chr(256 + moved.index(one)) for one in range(256)]
