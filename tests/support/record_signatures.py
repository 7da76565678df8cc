"""Records what an engine's symbols take, read from its source without importing it.

    python tests/support/record_signatures.py vllm 0.32.0 FOLDER > tests/engine/recorded/vllm.json

FOLDER is an unpacked wheel. Only names, kinds and defaults are kept, no code. TensorRT-LLM's record is not made by
this: its wheel was not at hand, so it was written down from single files of its repository, each named there.
"""

from __future__ import annotations

import ast
import datetime
import json
import sys
from pathlib import Path
from typing import Any

SYMBOLS: dict[str, list[tuple[str, str]]] = {
    "vllm": [
        ("vllm/engine/arg_utils.py", "AsyncEngineArgs"),
        ("vllm/v1/engine/async_llm.py", "AsyncLLM.from_engine_args"),
        ("vllm/v1/engine/async_llm.py", "AsyncLLM.generate"),
        ("vllm/v1/engine/async_llm.py", "AsyncLLM.abort"),
        ("vllm/v1/engine/async_llm.py", "AsyncLLM.add_lora"),
        ("vllm/v1/engine/async_llm.py", "AsyncLLM.check_health"),
        ("vllm/v1/engine/async_llm.py", "AsyncLLM.shutdown"),
        ("vllm/sampling_params.py", "SamplingParams"),
        ("vllm/sampling_params.py", "StructuredOutputsParams"),
        ("vllm/outputs.py", "CompletionOutput"),
        ("vllm/outputs.py", "RequestOutput.__init__"),
        ("vllm/lora/request.py", "LoRARequest"),
        ("vllm/v1/metrics/loggers.py", "StatLoggerBase.record"),
        ("vllm/config/kv_events.py", "KVEventsConfig"),
        ("vllm/distributed/kv_events.py", "BlockStored"),
        ("vllm/distributed/kv_events.py", "BlockRemoved"),
        ("vllm/platforms/interface.py", "Platform.is_cpu"),
    ],
    "sglang": [
        ("sglang/srt/arg_groups/field_order.py", "ServerArgs"),
        ("sglang/srt/entrypoints/engine.py", "Engine.__init__"),
        ("sglang/srt/entrypoints/engine.py", "Engine.async_generate"),
        ("sglang/srt/entrypoints/engine.py", "Engine.shutdown"),
        ("sglang/srt/managers/tokenizer_manager.py", "TokenizerManager.abort_request"),
        ("sglang/srt/sampling/sampling_params.py", "SamplingParams"),
        ("sglang/srt/disaggregation/kv_events.py", "KVEventsConfig"),
        ("sglang/srt/disaggregation/kv_events.py", "BlockStored"),
        ("sglang/srt/disaggregation/kv_events.py", "BlockRemoved"),
    ],
}


def main() -> None:
    """Write the record of one engine to stdout."""
    engine, version, folder = sys.argv[1:]
    symbols = {}
    for file, name in SYMBOLS[engine]:
        tree = ast.parse((Path(folder) / file).read_text(encoding="utf-8"))
        symbols[name] = {"file": file, "parameters": _parameters(tree, name)}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    json.dump({"engine": engine, "version": version, "recorded": today, "symbols": symbols}, sys.stdout, indent=1)


def _parameters(tree: ast.Module, name: str) -> list[dict[str, Any]]:
    if name == "ServerArgs":  # its fields come from many modules; one list has all of their names
        lists = [node.value for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value]
        longest = max((one for one in lists if isinstance(one, (ast.List, ast.Tuple))), key=lambda one: len(one.elts))
        return [_one(ast.literal_eval(item), "keyword", "…") for item in longest.elts]
    first, _, method = name.partition(".")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if method:
        found = [node for node in classes[first].body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        return _of_function(next(node for node in found if node.name == method))
    fields: dict[str, dict[str, Any]] = {}
    for one in _bases(classes, first):
        for node in classes[one].body:
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and "ClassVar" not in ast.unparse(node.annotation)
                and not (node.value and "init=False" in ast.unparse(node.value))
            ):
                default = ast.unparse(node.value) if node.value else None
                fields[node.target.id] = _one(node.target.id, "keyword", default)
    return list(fields.values())


def _bases(classes: dict[str, ast.ClassDef], name: str) -> list[str]:
    bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
    return [*(each for base in bases for each in _bases(classes, base)), name]


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[dict[str, Any]]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(one) for one in arguments.defaults]
    found = [_one(one.arg, "positional", default) for one, default in zip(positional, defaults, strict=True)]
    found += [_one("*", "rest", None)] if arguments.vararg else []
    for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(_one(one.arg, "keyword", None if value is None else ast.unparse(value)))
    found += [_one("**", "rest", None)] if arguments.kwarg else []
    return [one for one in found if one["name"] not in ("self", "cls")]


def _one(name: str, kind: str, default: str | None) -> dict[str, Any]:
    return {"name": name, "kind": kind, "default": default}


if __name__ == "__main__":
    main()
