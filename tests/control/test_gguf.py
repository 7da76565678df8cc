"""GGUF heads and the files beside them: what they say is read, and whatever they hold, nothing else happens."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.control import gguf as reader
from headrace.control import model_facts
from headrace.control.gguf import ArraySize, BadGguf, read_metadata
from headrace.control.model_facts import BadFile
from headrace.control.resources import ModelFacts
from support.gguf import SMALL, gguf, text


def test_keys_and_values_are_read_and_arrays_counted() -> None:
    found = read_metadata(gguf({**SMALL, "flag": True, "rate": 0.5}) + b"tensors")
    assert found["general.architecture"] == "llama"
    assert found["llama.block_count"] == 6
    assert found["flag"] is True
    assert found["rate"] == 0.5
    assert found["tokenizer.ggml.tokens"] == ArraySize(3)
    assert found["tokenizer.ggml.scores"] == ArraySize(3)


def test_facts_of_a_gguf() -> None:
    assert model_facts.from_gguf(read_metadata(gguf())) == ModelFacts(
        architecture="llama", layers=6, heads=8, kv_heads=2, embedding=64, vocabulary=3, context_tokens=2048,
        weight_type="q4_k_m", tokenizer_vocabulary=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"llama.vocab_size": 5}, "vocabulary", 5),
        ({"tokenizer.chat_template": "{{ x }}"}, "has_chat_template", True),
        ({"general.file_type": 32}, "weight_type", "bf16"),
        ({"general.file_type": 77}, "weight_type", "ftype_77"),
        ({"llama.attention.head_count_kv": [1.0, 2.0]}, "kv_heads", 0),
        ({"llama.block_count": "six"}, "layers", 0),
    ],
    ids=str,
)
def test_single_facts(change: dict[str, object], field: str, expected: object) -> None:
    assert getattr(model_facts.from_gguf(read_metadata(gguf({**SMALL, **change}))), field) == expected


def test_without_kv_heads_there_are_as_many_as_heads() -> None:
    keys = {k: v for k, v in SMALL.items() if not k.endswith("head_count_kv")}
    assert model_facts.from_gguf(read_metadata(gguf(keys))).kv_heads == 8


HEAD = b"GGUF" + struct.pack("<I", 3)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "middle"),
        (b"PK\x03\x04" + bytes(64), "begin with GGUF"),
        (gguf(version=1), "version 1"),
        (struct.pack(">4sI", b"GGUF", 3) + bytes(64), "version 50331648"),
        (gguf()[:-5], "middle"),
        (HEAD + struct.pack("<QQ", 0, 2**63), "keys"),
        (HEAD + struct.pack("<QQQ", 0, 1, 2**62), "a key has"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<I", 99), "unknown type 99"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IQ", 8, 2**63), "middle"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 10, 2**64 - 1), "middle"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**64 - 1), "strings"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, 2**63), "middle"),
        (HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1), "elements of type 9"),
        (HEAD + struct.pack("<QQ", 0, 2) + (text("k") + struct.pack("<II", 4, 1)) * 2, "twice"),
        (HEAD + struct.pack("<QQQ", 0, 1, 2) + b"\xff\xfe" + bytes(9), "UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_said(content: bytes, says: str) -> None:
    with pytest.raises(BadGguf, match=says):
        read_metadata(content)


def test_an_incomplete_head_gives_what_it_has() -> None:
    assert read_metadata(gguf()[:80], whole=False)["general.architecture"] == "llama"
    with pytest.raises(BadGguf):
        read_metadata(b"NOPE" + bytes(99), whole=False)


def test_a_string_above_the_limit_is_left_out() -> None:
    assert read_metadata(gguf({"long": "x" * 2_000_000, "next": 1})) == {"next": 1}


def test_the_worst_head_takes_little_time() -> None:
    worst = HEAD + struct.pack("<QQ", 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 3_900_000) + bytes(8 * 3_900_000)
    begin = time.process_time()
    assert read_metadata(worst) == {"k": ArraySize(3_900_000)}
    assert time.process_time() - begin < 10


@given(data=st.binary(max_size=400), cut=st.integers(0, 400), at=st.integers(0, 400), whole=st.booleans())
@example(data=b"\xff" * 8, cut=400, at=16, whole=True)
def test_no_bytes_do_anything_else(data: bytes, cut: int, at: int, whole: bool) -> None:
    good = gguf()
    for content in (data, HEAD + data, good[:cut], good[:at] + data + good[at + len(data) :]):
        with contextlib.suppress(BadGguf, BadFile):
            model_facts.from_gguf(read_metadata(content, whole=whole))


CONFIG = {
    "model_type": "Qwen2",
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_size": 896,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
}


def test_facts_of_a_config() -> None:
    facts = ModelFacts("qwen2", 24, 14, 2, 896, 151936, 32768, "bf16")
    assert model_facts.from_config(json.dumps(CONFIG).encode()) == facts
    inner = {"model_type": "vision", "text_config": CONFIG, "torch_dtype": "float32"}
    assert model_facts.from_config(json.dumps(inner).encode()) == facts


@pytest.mark.parametrize(
    ("said", "weight_type"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"quant_method": "bitsandbytes"}, "bnb"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        (None, "bf16"),
        ("nonsense", "bf16"),
    ],
    ids=str,
)
def test_quantizations_of_a_config(said: object, weight_type: str) -> None:
    facts = model_facts.from_config(json.dumps({**CONFIG, "quantization_config": said}).encode())
    assert facts.weight_type == weight_type


def test_quantizations_own_files() -> None:
    nvidia = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    assert model_facts.from_quantization(json.dumps(nvidia).encode()).weight_type == "fp8"
    assert model_facts.from_quantization(b'{"bits": 4, "group_size": 128}').weight_type == "gptq"


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ({"model": {"vocab": {"a": 0, "b": 9}}}, 10),
        ({"model": {"vocab": [["a", 0.0], ["b", 0.0]]}, "added_tokens": [{"id": 6}, {"id": 2}, 5]}, 7),
        ({}, 0),
    ],
    ids=str,
)
def test_rows_that_a_tokenizer_needs(document: dict[str, object], rows: int) -> None:
    assert model_facts.from_tokenizer(json.dumps(document).encode()).tokenizer_vocabulary == rows


def test_templates_in_json() -> None:
    assert model_facts.template_in(b'{"chat_template": "x"}') == "x"
    several = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert model_facts.template_in(json.dumps({"chat_template": several}).encode()) == "d"
    assert model_facts.template_in(b"{}") == ""


def test_the_first_to_say_something_is_believed() -> None:
    first, second = ModelFacts(layers=3), ModelFacts(layers=4, heads=5)
    assert model_facts.join([first, second]) == ModelFacts(layers=3, heads=5)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([*CONFIG, "model", "vocab", "added_tokens", "id", "text_config", "quantization_config",
                             "quant_method", "quant_algo", "format", "quantization", "chat_template", "name"]),
            inner, max_size=4,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize(
    "read",
    [model_facts.from_config, model_facts.from_tokenizer, model_facts.from_quantization, model_facts.template_in],
)
@given(document=JSON, junk=st.binary(max_size=20))
def test_no_document_does_anything_else(read: Callable[[bytes], Any], document: Any, junk: bytes) -> None:
    for content in (json.dumps(document).encode(), junk, b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"):
        with contextlib.suppress(BadFile):
            read(content)


def test_words_fit_the_record() -> None:
    assert model_facts.from_config(b'{"model_type": "a\\ud800\\nB"}').architecture == "ab"
    assert model_facts.from_config(b'{"model_type": "%s"}' % (b"x" * 999)).architecture == "x" * 63


def test_counts_fit_the_record() -> None:
    with pytest.raises(BadFile, match="vocab_size is out of range"):
        model_facts.from_config(b'{"vocab_size": 4294967296}')
    assert reader.HEAD_BYTES_MAX >= 10_000_000
