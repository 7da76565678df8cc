"""What a model's own files say of it: GGUF metadata, a Hugging Face config, a tokenizer.

Each reader takes one file's content and returns what it says; `join` puts them together. Sans-io: the caller reads
the files, within `TEXT_BYTES_MAX`. The content may be hostile: the outcome is facts or `BadFile`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.control.gguf import ArraySize, Value
from headrace.control.resources import ModelFacts

TEXT_BYTES_MAX = 64 * 1024 * 1024
"""As much of a config or tokenizer as is read."""
_COUNT_MAX = 2**32 - 1
_TEXT_MAX = 63

_FTYPES = (
    "f32 f16 q4_0 q4_1 q4_1 q4_2 q4_3 q8_0 q5_0 q5_1 q2_k q3_k_s q3_k_m q3_k_l q4_k_s q4_k_m q5_k_s q5_k_m q6_k "
    "iq2_xxs iq2_xs q2_k_s iq3_xs iq3_xxs iq1_s iq4_nl iq3_s iq3_m iq2_s iq2_m iq4_xs iq1_m bf16 q4_0_4_4 q4_0_4_8 "
    "q4_0_8_8 tq1_0 tq2_0 mxfp4"
)
_GGUF_TYPES = dict(enumerate(_FTYPES.split()))
"""llama.cpp's `llama_ftype`, which a file has as general.file_type."""

_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "half": "f16", "float": "f32"}
_METHODS = {"bitsandbytes": "bnb", "fbgemm_fp8": "fp8"}


class BadFile(ValueError):
    """A file of a model cannot be understood; the message says why."""


def join(parts: Iterable[ModelFacts]) -> ModelFacts:
    """Put facts together; of two files that say something, the first is believed."""
    values: dict[str, Any] = {}
    for part in parts:
        for field in dataclasses.fields(ModelFacts):
            value = getattr(part, field.name)
            if value and not values.get(field.name):
                values[field.name] = value
    return ModelFacts(**values)


def from_gguf(metadata: Mapping[str, Value]) -> ModelFacts:
    """What a GGUF file's metadata says.

    Raises:
        BadFile: a number is out of range.
    """
    architecture = _text(metadata.get("general.architecture"))
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokenizer = _count("tokenizer.ggml.tokens", tokens.count if isinstance(tokens, ArraySize) else 0)

    def count(key: str) -> int:
        return _count(f"{architecture}.{key}", metadata.get(f"{architecture}.{key}"))

    file_type = metadata.get("general.file_type")
    known = isinstance(file_type, int) and not isinstance(file_type, bool)
    heads = count("attention.head_count")
    grouped = metadata.get(f"{architecture}.attention.head_count_kv")
    return ModelFacts(
        architecture=architecture,
        layers=count("block_count"),
        heads=heads,
        # Without the key there are as many; with an array they differ by layer, and nothing is said.
        kv_heads=heads if grouped is None else count("attention.head_count_kv"),
        embedding=count("embedding_length"),
        vocabulary=count("vocab_size") or tokenizer,
        context_tokens=count("context_length"),
        weight_type=_GGUF_TYPES.get(int(file_type), f"ftype_{file_type}") if known else "",  # type: ignore[arg-type]
        has_chat_template=bool(metadata.get("tokenizer.chat_template")),
        tokenizer_vocabulary=tokenizer,
    )


def is_adapter(metadata: Mapping[str, Value]) -> bool:
    """Whether a GGUF file is an adapter and no model."""
    return metadata.get("general.type") == "adapter"


def from_config(content: bytes) -> ModelFacts:
    """What config.json says; of a model with several parts, of its text part.

    Raises:
        BadFile: it is not a JSON object, or a number is out of range.
    """
    whole = _object(content)
    inner = whole.get("text_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole

    def count(*keys: str) -> int:
        return next((n for key in keys if (n := _count(key, config.get(key)))), 0)

    heads = count("num_attention_heads", "n_head")
    return ModelFacts(
        architecture=_text(config.get("model_type")),
        layers=count("num_hidden_layers", "n_layer"),
        heads=heads,
        kv_heads=count("num_key_value_heads") or heads,
        embedding=count("hidden_size", "n_embd"),
        vocabulary=count("vocab_size"),
        context_tokens=count("max_position_embeddings", "n_positions"),
        weight_type=_quantization(whole.get("quantization_config")) or _dtype(config),
    )


def from_quantization(content: bytes) -> ModelFacts:
    """What a quantization's own file (hf_quant_config.json, quantize_config.json) says.

    Raises:
        BadFile: it is not a JSON object.
    """
    document = _object(content)
    return ModelFacts(weight_type=_quantization(document.get("quantization")) or _quantization(document))


def from_tokenizer(content: bytes) -> ModelFacts:
    """What tokenizer.json says: the rows of the embedding that its tokens need.

    Raises:
        BadFile: it is not a JSON object, or an id is out of range.
    """
    document = _object(content)
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    rows = 0
    if isinstance(vocabulary, dict):
        rows = max((_count("vocab", i) + 1 for i in vocabulary.values()), default=0)
    elif isinstance(vocabulary, list):
        rows = len(vocabulary)
    added = document.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and "id" in token:
            rows = max(rows, _count("added_tokens.id", token["id"]) + 1)
    return ModelFacts(tokenizer_vocabulary=_count("vocab", rows))


def template_in(content: bytes) -> str:
    """The chat template in tokenizer_config.json or chat_template.json; "" if there is none.

    Raises:
        BadFile: it is not a JSON object.
    """
    template = _object(content).get("chat_template")
    if isinstance(template, list):
        named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default") or next(iter(named.values()), "")
    return template if isinstance(template, str) else ""


def _object(content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise BadFile("it is not valid JSON") from None
    if not isinstance(document, dict):
        raise BadFile("it is not a JSON object")
    return document


def _dtype(config: Mapping[str, Any]) -> str:
    said = _text(config.get("torch_dtype")) or _text(config.get("dtype"))
    return _DTYPES.get(said, said)


def _quantization(said: Any) -> str:
    """Name of a quantization as the ecosystem's three spellings of it say."""
    if not isinstance(said, dict):
        return ""
    algorithm = _text(said.get("quant_algo"))
    if algorithm:
        return algorithm.removeprefix("w8a8_").removesuffix("_block_scales")
    method = _text(said.get("quant_method"))
    if method == "compressed-tensors":
        return _text(said.get("format")) or method
    if not method and "bits" in said and "group_size" in said:
        return "gptq"
    return _METHODS.get(method, method)


def _count(key: str, value: object) -> int:
    """A number that the protos hold; 0 for what is no number."""
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    if not 0 <= value <= _COUNT_MAX:
        raise BadFile(f"{key[:80]} is out of range")
    return value


def _text(value: object) -> str:
    """A short word that a record holds: printable, and without the half characters that JSON can spell."""
    return "".join(c for c in value[:_TEXT_MAX].lower() if c.isprintable()) if isinstance(value, str) else ""
