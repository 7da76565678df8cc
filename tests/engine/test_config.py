import json

import pytest

from headrace.engine.config import ENVIRONMENT_VARIABLE, ConfigError, load_config, parse_config


def test_a_configuration_is_read(tmp_path):
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"engine": "synthetic", "slots": 2, "context_tokens": 64}))
    config = load_config({ENVIRONMENT_VARIABLE: str(path)})
    assert (config.slots, config.kv_cells, config.prefill_chunk) == (2, 128, 128)
    assert (config.preempt_after_ms, config.run_ahead_tokens) == (200, 0)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"engine": "onnx"}, "engine"),
        ({"engine": "llamacpp"}, "model_path"),
        ({"slots": 0}, "slots"),
        ({"slots": True}, "slots"),
        ({"kv_cells": 10}, "kv_cells"),
        ({"preempt_after_ms": -1}, "preempt_after_ms"),
        ({"preempt_after_ms": 0.5}, "preempt_after_ms"),
        ({"run_ahead_tokens": -1}, "run_ahead_tokens"),
        ({"run_ahead_tokens": None}, "run_ahead_tokens"),
        ({"context_tokens": "8"}, "context_tokens"),
        ({"decode_tokens_per_s": -1}, "decode_tokens_per_s"),
        ({"prefill_tokens_per_s": float("nan")}, "prefill_tokens_per_s"),
        ({"chat_template": 5}, "chat_template"),
        ({"revision": 5}, "revision"),
        ({"kv_over_commit": 0.9}, "kv_over_commit"),
        ({"kv_over_commit": 9}, "kv_over_commit"),
        ({"kv_over_commit": "2"}, "kv_over_commit"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_a_wrong_setting_is_named_in_one_sentence(change, name):
    with pytest.raises(ConfigError) as caught:
        parse_config({"engine": "synthetic", "context_tokens": 64, **change})
    assert str(caught.value).startswith(name)
    assert str(caught.value).endswith(".")


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    with pytest.raises(ConfigError, match=ENVIRONMENT_VARIABLE):
        load_config({})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config({ENVIRONMENT_VARIABLE: str(tmp_path / "absent")})
    (tmp_path / "bad").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_config({ENVIRONMENT_VARIABLE: str(tmp_path / "bad")})
    with pytest.raises(ConfigError, match="engine must be given"):
        parse_config({})
