"""A LoRA adapter's folder, as Hugging Face's PEFT writes it: what an engine must know of it before it makes room."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headrace.engine.config import ConfigError

_HEAD_BYTES_MAX = 100 * 1024 * 1024
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Of weights that are stored as they are; what is packed has other shapes."""
_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def rank_of(folder: str) -> int:
    """The largest rank of the adapter's matrices. Raises `ConfigError` where its configuration does not say it."""
    path = Path(folder) / "adapter_config.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"adapter_path names {folder}, which has no adapter_config.json that can be read.") from None
    own = document.get("r") if isinstance(document, dict) else None
    others = document.get("rank_pattern") or {} if isinstance(document, dict) else {}
    ranks = [own, *(others.values() if isinstance(others, dict) else [None])]
    known = [rank for rank in ranks if isinstance(rank, int) and not isinstance(rank, bool) and rank > 0]
    if len(known) < len(ranks):
        raise ConfigError(f"adapter_path names {folder}, whose adapter_config.json has no rank (r) above 0.")
    return max(known)


def check_fit(folder: str, model: str) -> None:
    """Raises `ConfigError` where the adapter's matrices are not as wide as the weights that they change.

    Engines look at names, and not all of them at shapes: vLLM serves an adapter that is too small. Only the heads of
    safetensors files are read; what is not stored so, or under other names, is left to the engine.
    """
    ours = _shapes([Path(folder) / "adapter_model.safetensors"])
    weights = _shapes(sorted(Path(model).glob("*.safetensors"))) if ours else {}
    for name, (rows, columns) in ours.items():
        for end, at, width in ((_A, 1, columns), (_B, 0, rows)):
            if not name.endswith(end):
                continue
            weight = name.removeprefix(_PREFIX).removesuffix(end)
            shape = weights.get(f"{weight}.weight")
            if shape is not None and shape[at] != width:
                side = "in" if at else "out"
                raise ConfigError(
                    f"adapter_path names {folder}, which is not of this model: its {weight} is {width} wide ({side}), "
                    f"the model's is {shape[at]}."
                )


def _shapes(files: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Rows and columns of every matrix."""
    found: dict[str, tuple[int, int]] = {}
    for file in files:
        for name, tensor in _head(file).items():
            shape = tensor.get("shape") if isinstance(tensor, dict) else None
            if isinstance(shape, list) and len(shape) == 2 and tensor.get("dtype") in _FLOATS:
                found[name] = (shape[0], shape[1])
    return found


def _head(file: Path) -> dict[str, Any]:
    """What a safetensors file says of its tensors; nothing where it is none."""
    try:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            document = json.loads(opened.read(size)) if size <= _HEAD_BYTES_MAX else None
    except (OSError, ValueError, struct.error):
        return {}
    return document if isinstance(document, dict) else {}
