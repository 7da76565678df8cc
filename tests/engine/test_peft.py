"""A LoRA adapter's folder for the engines that load a Hugging Face folder: its rank, and what fails the load."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.test_adapters import Served, _own_environment  # noqa: F401
from headrace.engine.config import MANAGED_ENGINES, ConfigError
from headrace.engine.peft import check_fit, rank_of
from support import fake_model, tiny_llama


def adapter(folder: Path, config: str | None) -> str:
    folder.mkdir()
    if config is not None:
        (folder / "adapter_config.json").write_text(config)
    return str(folder)


@pytest.mark.parametrize(
    ("config", "rank"),
    [('{"r": 8}', 8), ('{"r": 8, "rank_pattern": {"down_proj": 64}}', 64), ('{"r": 8, "rank_pattern": null}', 8)],
)
def test_the_largest_rank_counts(tmp_path: Path, config: str, rank: int) -> None:
    assert rank_of(adapter(tmp_path / "lora", config)) == rank


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "no adapter_config.json"),
        ("not JSON", "no adapter_config.json"),
        ("[8]", "no rank"),
        ("{}", "no rank"),
        ('{"r": 0}', "no rank"),
        ('{"r": true}', "no rank"),
        ('{"r": "8"}', "no rank"),
        ('{"r": 8, "rank_pattern": {"down_proj": null}}', "no rank"),
        ('{"r": 8, "rank_pattern": [8]}', "no rank"),
    ],
)
def test_a_folder_that_says_no_rank_is_one_sentence(tmp_path: Path, config: str | None, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rank_of(adapter(tmp_path / "lora", config))


@pytest.mark.parametrize(
    ("config", "is_misfit", "says"),
    [
        ('{"r": 8}', True, "which is no LoRA adapter of this model for vLLM"),
        ('{"r": 1024}', False, "of rank 1024; vLLM takes 512 at most"),
    ],
)
def test_one_that_does_not_fit_fails_vllm_s_load_and_not_the_first_request(
    tmp_path: Path, config: str, is_misfit: bool, says: str
) -> None:
    folder = adapter(tmp_path / "lora", config)
    if is_misfit:
        (tmp_path / "lora" / "misfit").touch()
    with pytest.raises(ConfigError, match=says):
        Served("vllm", fake_model.write_folder(tmp_path / "model"), adapter_path=folder)


AT = f"base_model.model.model.layers.{tiny_llama.LAYERS - 1}.mlp.down_proj"


def write(folder: Path, tensors: dict[str, tuple[int, int]]) -> str:
    folder.mkdir()
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    (folder / "adapter_model.safetensors").write_bytes(tiny_llama.safetensors(arrays))
    return str(folder)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({f"{AT}.lora_A.weight": (8, 64), f"{AT}.lora_B.weight": (128, 8)}, ""),
        ({f"{AT}.lora_A.weight": (8, 32), f"{AT}.lora_B.weight": (128, 8)}, r"down_proj is 32 wide \(in\).*is 64"),
        ({f"{AT}.lora_A.weight": (8, 64), f"{AT}.lora_B.weight": (96, 8)}, r"down_proj is 96 wide \(out\).*is 128"),
        ({f"{AT}.lora_A.weight": (8, 96)}, "96 wide"),
        ({"elsewhere.down_proj.lora_A.weight": (8, 32)}, ""),
        ({f"{AT}.other": (8, 32)}, ""),
    ],
)
def test_matrices_are_as_wide_as_the_weights_that_they_change(
    tmp_path: Path, tensors: dict[str, tuple[int, int]], says: str
) -> None:
    model, folder = tiny_llama.checkpoint(tmp_path / "model"), write(tmp_path / "lora", tensors)
    if not says:
        check_fit(folder, str(model))
        return
    with pytest.raises(ConfigError, match=says):
        check_fit(folder, str(model))


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 8, b"\x02" + bytes(7) + b"{]", b"\x02" + bytes(7) + b"[]"]
)
def test_what_is_no_safetensors_file_is_left_to_the_engine(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    check_fit(str(folder), str(tmp_path))
    (folder / "adapter_model.safetensors").write_bytes(content)
    check_fit(str(folder), str(tiny_llama.checkpoint(tmp_path / "model")))


@pytest.mark.parametrize("kind", MANAGED_ENGINES)
def test_every_engine_refuses_one_of_another_shape(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "lora", {f"{AT}.lora_A.weight": (8, 32)})
    (tmp_path / "lora" / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(ConfigError, match="not of this model"):
        Served(kind, tiny_llama.checkpoint(tmp_path / "model"), adapter_path=folder)
