"""A model file of one's own, added to a running stack: served, with a chat template, and taken out again."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.weights import default_model
from headrace.client import AsyncClient, InvalidRequest, NotFound
from headrace.control.errors import Reason
from stack.engine_stats import workers
from stack.waiting import until
from support.stack import MODEL, RunningStack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

TEMPLATE = """{% for m in messages %}{{ m.role }} says {{ m.content }}
{% endfor %}"""


async def test_a_model_is_added_answers_a_conversation_and_is_removed(stack: RunningStack, tmp_path: Path) -> None:
    template = tmp_path / "counting.jinja"
    template.write_text(TEMPLATE)
    weights = str(default_model(lambda text: None))
    added = stack.run(
        "model", "add", weights, "--name", "chatty", "--chat-template", str(template),
        "--context", "512", "--slots", "2", timeout_s=120.0,
    )  # fmt: skip
    assert added.returncode == 0, added.stderr
    async with AsyncClient(stack.router) as client:
        messages = [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]
        answer = await client.generate(messages=messages, model="chatty", max_tokens=8, temperature=0.0).read()
        assert answer.revision.startswith("models/chatty/revisions/")
        assert answer.text.startswith("user says 3"), "the template's pattern goes on"
        with pytest.raises(InvalidRequest) as refused:
            await client.generate(messages=messages, model=MODEL, max_tokens=8).read()
        assert refused.value.reason is Reason.CHAT_TEMPLATE_MISSING
        removed = stack.run("model", "remove", "chatty", timeout_s=60.0)
        assert removed.returncode == 0, removed.stderr
        with pytest.raises(NotFound):
            await client.generate("x", model="chatty", max_tokens=1).read()
    await until(lambda: "chatty" not in workers(stack))
