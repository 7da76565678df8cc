"""A Hugging Face folder's tokens as bytes: byte-level, marked spaces with byte fallback, and what cannot be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.config import ConfigError
from headrace.engine.hf_tokenizer import HfTokenizer
from support import fake_model

TEXT = "the water — über\n\tводы 水🌊 <b>x</b>"


def folder(path: Path, model: dict[str, Any], decoder: dict[str, Any] | None, **more: Any) -> Path:
    document = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None,
        "post_processor": None, "added_tokens": [], "decoder": decoder, "model": model, **more,
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return path


def test_byte_level_pieces_join_to_the_text_that_was_tokenized(tmp_path: Path) -> None:
    tokenizer = HfTokenizer(fake_model.write_folder(tmp_path))
    ids = tokenizer.tokenize(TEXT)
    assert b"".join(map(tokenizer.piece, ids)).decode() == TEXT
    assert [tokenizer.piece(one) for one in range(fake_model.VOCABULARY)] == fake_model.TABLE


def test_what_the_folder_says_of_the_model(tmp_path: Path) -> None:
    facts = HfTokenizer(fake_model.write_folder(tmp_path, 777)).facts("vllm", {"vllm": "1"})
    assert (facts.kind, facts.model, facts.vocabulary) == ("vllm", "FakeForCausalLM", fake_model.VOCABULARY)
    assert (facts.end_tokens, facts.context_tokens_max, facts.end_text) == ({fake_model.END}, 777, "<|end|>")
    assert facts.chat_template


def test_marked_spaces_and_byte_tokens(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "▁the": 2, "x": 3, "<0xE6>": 4, "<0xB0>": 5, "<0xB4>": 6, "▁": 7, "the": 8}
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    model = {
        "type": "BPE", "dropout": None, "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True,
        "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    added = [
        {"id": at, "content": text, "special": special, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for at, text, special in ((0, "<unk>", True), (1, "<s>", True), (9, "<b>", False))
    ]  # fmt: skip
    tokenizer = HfTokenizer(folder(tmp_path, model, decoder, added_tokens=added))
    assert [tokenizer.piece(at) for at in range(11)] == [
        b"", b"", b" the", b"x", b"\xe6", b"\xb0", b"\xb4", b" ", b"the", b"<b>", b"",
    ]  # fmt: skip
    assert b"".join(map(tokenizer.piece, (4, 5, 6))).decode() == "水"


def test_the_begin_token_is_not_doubled(tmp_path: Path) -> None:
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    begin = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    adds = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": begin,
    }  # fmt: skip
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["x", -1.0], ["<s>", -9.0], ["y", -1.0]], "byte_fallback": False}
    folder(
        tmp_path, model, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        added_tokens=[{"id": 1, "content": "<s>", **special}], post_processor=adds,
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    tokenizer = HfTokenizer(tmp_path)
    assert tokenizer.tokenize("xy") == [1, 0, 2]
    assert tokenizer.tokenize("<s>xy") == [1, 0, 2]


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}])
def test_a_decoder_that_is_not_known_is_refused_and_not_guessed(tmp_path: Path, decoder: dict[str, Any] | None) -> None:
    model = {"type": "Unigram", "unk_id": 0, "vocab": [["x", -1.0]], "byte_fallback": False}
    with pytest.raises(ConfigError, match="neither byte-level"):
        HfTokenizer(folder(tmp_path, model, decoder))


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must name a folder with tokenizer\.json"):
        HfTokenizer(tmp_path)
