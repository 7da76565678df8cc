"""The engine's configuration file: read once, checked whole, one sentence for the first wrong setting."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

ENVIRONMENT_VARIABLE = "HEADRACE_ENGINE_CONFIG"

# llama.cpp's own limit on sequence ids in one context (LLAMA_MAX_SEQ); half of them may be retained prefixes.
_SLOTS_MAX_LLAMACPP = 128
_SLOTS_MAX = 4096
_OVER_COMMIT_MAX = 8
STEP_ENGINES = ("llamacpp", "synthetic")
"""Engines that the loop drives step by step."""
MANAGED_ENGINES = ("tensorrt_llm", "vllm", "sglang")
"""Engines that schedule by themselves; they need GPUs, and none of them is on by default."""
ENGINES = (*STEP_ENGINES, *MANAGED_ENGINES)
_RUN_AHEAD_MANAGED = 1024
_ABORTS = ("", "on", "after_first_token", "off")
_METHODS = ("ngram", "draft_model", "eagle3")
NGRAM_MAX = 4


class ConfigError(ValueError):
    """A setting is wrong; the message is one sentence that names it."""


@dataclass(frozen=True, slots=True)
class Speculative:
    """Speculative decoding: who drafts how many tokens for each step.

    `method` is ngram, which looks up to `ngram_max` tokens up in what was said before, draft_model or eagle3, whose
    files are in the folder `draft_path`.
    """

    method: str
    draft_tokens: int
    draft_path: str = ""
    ngram_max: int = NGRAM_MAX

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ConfigError(f"speculative.method must be one of {', '.join(_METHODS)}, not {self.method!r}.")
        for name in ("draft_tokens", "ngram_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"speculative.{name} must be an integer of at least 1, not {value!r}.")
        if not isinstance(self.draft_path, str) or (self.method != "ngram") != bool(self.draft_path):
            raise ConfigError("speculative.draft_path must name the folder of a draft_model or an eagle3 only.")

    @classmethod
    def parse(cls, document: object) -> Speculative:
        """A decoded document as a value; raises `ConfigError`."""
        if not isinstance(document, Mapping):
            raise ConfigError("speculative must be an object or null.")
        unknown = sorted(set(document) - {field.name for field in fields(cls)})
        missing = sorted({"method", "draft_tokens"} - set(document))
        if unknown or missing:
            raise ConfigError(
                f"speculative must have method and draft_tokens, and no {', '.join(unknown)}."
                if unknown
                else f"speculative must have {' and '.join(missing)}."
            )
        return cls(**dict(document))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine was told. Rates are tokens per second of one sequence, 0 is as fast as it can.

    `threads` 0 lets the engine choose. `kv_cells` 0 means `slots` full contexts. `run_ahead_tokens` 0: a sequence
    without credit pauses; above, it runs on for so many tokens. `kv_over_commit` above 1: a sequence reserves that part
    of the KV cells that it may need, and the newest are preempted when they run short. `adapter_path` names a LoRA
    adapter that is always on, with `adapter_scale` (1: as it was trained, 0: without effect).

    From `gpus` on it is for the managed engines, whose `model_path` and `adapter_path` are folders. `gpus` are the
    devices that the engine may see, as CUDA_VISIBLE_DEVICES wants them; "": all. `abort` says when a request may be
    ended early: on, after_first_token or off; "" is what is held for safe there. `speculative` is the engine's own
    document for speculative decoding. `guided_backend` is what guides decoding, by the engine's name for it, or off; ""
    is what is chosen there. `eager` leaves compilation and CUDA graphs out: it starts sooner and runs slower.
    """

    engine: str
    revision: str = ""
    incarnation: str = ""
    model_path: str = ""
    model_digest: str = ""
    context_tokens: int = 2048
    slots: int = 16
    kv_cells: int = 0
    max_waiting: int = 256
    threads: int = 0
    prefill_chunk: int = 128
    preempt_after_ms: int = 200
    run_ahead_tokens: int = 0
    chat_template: str | None = None
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    kv_over_commit: float = 1.0
    adapter_path: str = ""
    adapter_scale: float = 1.0
    gpus: str = ""
    tensor_parallel: int = 1
    dtype: str = "auto"
    gpu_memory_fraction: float = 0.9
    kv_events: bool = False
    abort: str = ""
    speculative: Speculative | None = None
    eager: bool = False
    guided_backend: str = ""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"engine must be one of {', '.join(ENGINES)}, not {self.engine!r}.")
        for name in (
            "revision",
            "incarnation",
            "model_path",
            "model_digest",
            "adapter_path",
            "gpus",
            "dtype",
            "guided_backend",
        ):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name} must be a string.")
        self._check_managed()
        if self.engine == "llamacpp" and not self.model_path:
            raise ConfigError("model_path must name the model's GGUF file.")
        if self.adapter_path and self.engine == "synthetic":
            raise ConfigError("adapter_path must be empty: the synthetic engine has no weights to adapt.")
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise ConfigError("chat_template must be a Jinja text or null.")
        slots_max = _SLOTS_MAX_LLAMACPP if self.engine == "llamacpp" else _SLOTS_MAX
        self._integer("context_tokens", 2, 2**24)
        self._integer("slots", 1, slots_max)
        self._integer("kv_cells", 0, 2**31 - 1)
        self._integer("max_waiting", 0, 2**20)
        self._integer("threads", 0, 1024)
        self._integer("prefill_chunk", 1, 2**16)
        self._integer("preempt_after_ms", 0, 2**31 - 1)
        self._integer("run_ahead_tokens", 0, 2**24)
        self._rate("prefill_tokens_per_s")
        self._rate("decode_tokens_per_s")
        self._rate("adapter_scale", "of times")
        self._rate("kv_over_commit", "of times")
        if not 1 <= self.kv_over_commit <= _OVER_COMMIT_MAX:
            raise ConfigError(f"kv_over_commit must be between 1 and {_OVER_COMMIT_MAX}, not {self.kv_over_commit!r}.")
        if self.kv_cells == 0:
            object.__setattr__(self, "kv_cells", self.slots * self.context_tokens)
        if self.kv_cells < self.context_tokens:
            raise ConfigError(
                f"kv_cells must be at least context_tokens ({self.context_tokens}), or a request of full length"
                " could never be admitted."
            )

    def _check_managed(self) -> None:
        if self.abort not in _ABORTS:
            raise ConfigError(f"abort must be on, after_first_token or off, not {self.abort!r}.")
        for name in ("kv_events", "eager"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false.")
        self._integer("tensor_parallel", 1, 1024)
        self._rate("gpu_memory_fraction", "between 0 and 1")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise ConfigError(f"gpu_memory_fraction must be above 0 and at most 1, not {self.gpu_memory_fraction!r}.")
        if self.engine not in MANAGED_ENGINES:
            return
        if not self.model_path:
            raise ConfigError("model_path must name the model's folder.")
        if self.adapter_path and self.adapter_scale != 1:
            raise ConfigError(
                f"adapter_scale must be 1 on {self.engine}: the adapter's own configuration says how much."
            )
        if self.run_ahead_tokens == 0:  # none of them can pause one sequence
            object.__setattr__(self, "run_ahead_tokens", _RUN_AHEAD_MANAGED)

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} must be an integer between {low} and {high}, not {value!r}.")

    def _rate(self, name: str, unit: str = "of tokens per second") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number {unit}, not {value!r}.")
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be 0 or a positive number {unit}, not {value!r}.")


def parse_config(document: object) -> EngineConfig:
    """A decoded configuration document as a value; raises `ConfigError`."""
    if not isinstance(document, Mapping):
        raise ConfigError("The engine configuration must be a JSON object.")
    known = {field.name for field in fields(EngineConfig)}
    for name in document:
        if name not in known:
            raise ConfigError(f"{name} is not a setting of the engine.")
    if "engine" not in document:
        raise ConfigError(f"engine must be given: one of {', '.join(ENGINES)}.")
    settings: dict[str, Any] = dict(document)
    if settings.get("speculative") is not None:
        settings["speculative"] = Speculative.parse(settings["speculative"])
    return EngineConfig(**settings)


def load_config(environ: Mapping[str, str]) -> EngineConfig:
    """The configuration that `HEADRACE_ENGINE_CONFIG` names; raises `ConfigError`."""
    path = environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} must name the engine's configuration file.")
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} names {path}, which cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE} names {path}, which is not JSON.") from error
    return parse_config(document)
