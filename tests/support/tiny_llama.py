"""A Llama of 300 KB for tests: real layers, random numbers, and a last one that makes it say what is known beforehand.

Its vocabulary is the 256 bytes and three control tokens. The layers' results are multiplied by zero before they are
added, so the next token depends on the newest alone, by a margin that no rounding of any engine can turn: `following`
is its successor. All bytes of `CYCLE` follow each other, a character of four bytes among them; behind a line's end it
ends. The same numbers are written as a checkpoint of Hugging Face's (`checkpoint`) and as GGUF (`model_gguf`).
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from support.gguf import gguf, lora

UNKNOWN, BEGIN, END = 0, 1, 2
CONTROLS = ("<unk>", "<s>", "</s>")
FIRST_BYTE = len(CONTROLS)
VOCABULARY = FIRST_BYTE + 256
WIDTH, INNER, HEADS, LAYERS, CONTEXT = 128, 64, 4, 2, 2048
RARE = "𐎠"
CYCLE = ("abcdefghijklm" + RARE + "nopqrstuvwxyz 0123456789.,;ABCDEFGHIJKLM").encode()
_MARGIN = 7.0
"""Between the likeliest logit and the others: probability 0.8 at temperature 1."""

Arrays = dict[str, npt.NDArray[np.float32]]


def token_of(byte: int) -> int:
    return FIRST_BYTE + byte


def following(token: int) -> int:
    """The likeliest next token."""
    if token == token_of(0x0A):
        return END
    byte = token - FIRST_BYTE
    at = CYCLE.find(byte) if byte >= 0 else -1
    return token_of(CYCLE[(at + 1 if at >= 0 else token) % len(CYCLE)])


def numbers(seed: int = 5) -> Arrays:
    """All weights, under the names of Hugging Face's checkpoints."""
    dice = np.random.default_rng(seed)

    def some(*shape: int) -> npt.NDArray[np.float32]:
        return dice.normal(0, 0.05, shape).astype(np.float32)

    embedding = dice.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    embedding /= np.sqrt((embedding**2).mean(axis=1, keepdims=True))
    head = np.zeros((VOCABULARY, WIDTH), np.float32)
    for token in range(VOCABULARY):
        head[following(token)] += embedding[token] * (_MARGIN / WIDTH)
    arrays: Arrays = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj"):
            arrays[f"{at}.self_attn.{name}.weight"] = some(WIDTH, WIDTH)
        arrays[f"{at}.self_attn.o_proj.weight"] = np.zeros((WIDTH, WIDTH), np.float32)
        arrays[f"{at}.mlp.gate_proj.weight"] = some(INNER, WIDTH)
        arrays[f"{at}.mlp.up_proj.weight"] = some(INNER, WIDTH)
        arrays[f"{at}.mlp.down_proj.weight"] = np.zeros((WIDTH, INNER), np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{at}.{name}.weight"] = np.ones(WIDTH, np.float32)
    return arrays


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}


def model_gguf() -> bytes:
    """For llama.cpp."""
    tensors = {}
    for name, array in numbers().items():
        translated = name
        for theirs, ours in _GGUF_NAMES.items():
            translated = translated.replace(theirs, ours)
        tensors[translated] = array
    words = [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256))]
    return gguf(
        {
            "general.architecture": "llama",
            "general.type": "model",
            "general.file_type": 0,
            "llama.vocab_size": VOCABULARY,
            "llama.block_count": LAYERS,
            "llama.context_length": CONTEXT,
            "llama.embedding_length": WIDTH,
            "llama.feed_forward_length": INNER,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": HEADS,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.dimension_count": WIDTH // HEADS,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": words,
            "tokenizer.ggml.scores": [0.0] * VOCABULARY,
            "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256],
            "tokenizer.ggml.bos_token_id": BEGIN,
            "tokenizer.ggml.eos_token_id": END,
            "tokenizer.ggml.unknown_token_id": UNKNOWN,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.chat_template": TEMPLATE,
        },
        tensors,
    )


TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }} {% endfor %}"


def checkpoint(folder: Path) -> Path:
    """For TensorRT-LLM, vLLM and SGLang."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors(numbers()))
    documents: dict[str, object] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": BEGIN,
            "eos_token_id": END,
            "torch_dtype": "float32",
        },
        "generation_config.json": {"bos_token_id": BEGIN, "eos_token_id": END},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": CONTROLS[BEGIN],
            "eos_token": CONTROLS[END],
            "unk_token": CONTROLS[UNKNOWN],
            "model_max_length": CONTEXT,
            "chat_template": TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return folder


LORA_RANK = 20
"""Above what vLLM makes room for by default."""


def lora_numbers(seed: int = 9) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A (rank x in) and B (out x rank) for the last layer's down projection, which is zero without them."""
    dice = np.random.default_rng(seed)
    a = dice.normal(0, 4.0, (LORA_RANK, INNER)).astype(np.float32)
    b = dice.normal(0, 4.0, (WIDTH, LORA_RANK)).astype(np.float32)
    return a, b


def lora_gguf() -> bytes:
    """An adapter for llama.cpp, applied at scale 1."""
    return lora("llama", {f"blk.{LAYERS - 1}.ffn_down.weight": lora_numbers()}, alpha=float(LORA_RANK))


def lora_folder(folder: Path) -> Path:
    """The same numbers as PEFT keeps them."""
    folder.mkdir(parents=True, exist_ok=True)
    a, b = lora_numbers()
    at = f"base_model.model.model.layers.{LAYERS - 1}.mlp.down_proj"
    (folder / "adapter_model.safetensors").write_bytes(
        safetensors({f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b})
    )
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": LORA_RANK,
        "lora_alpha": LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["down_proj"],
        "layers_to_transform": [LAYERS - 1],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def safetensors(arrays: Arrays) -> bytes:
    """Eight bytes of length, a JSON header, the numbers."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + data


def _tokenizer() -> dict[str, object]:
    """Byte-level BPE without a merge."""
    letters = _byte_letters()
    vocabulary = {word: index for index, word in enumerate(CONTROLS)}
    vocabulary |= {letters[byte]: token_of(byte) for byte in range(256)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": word, **flags} for index, word in enumerate(CONTROLS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BEGIN], "tokens": ["<s>"]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _byte_letters() -> dict[int, str]:
    """A printable letter for each byte, as all byte-level tokenizers write them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    return {**letters, **{byte: chr(256 + index) for index, byte in enumerate(others)}}
