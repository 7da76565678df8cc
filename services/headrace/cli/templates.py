"""Does a chat template render? Tried with the engine's own sandbox, before anybody is served with it."""

from __future__ import annotations

import threading

from headrace.engine.chat import ChatTemplate
from headrace.engine.request import Message, RefusalError

CHARACTERS_MAX = 1_000_000
RENDER_S = 5.0
_TURNS = (
    [Message("user", "Hello.")],
    [Message("user", "Hello."), Message("assistant", "Hello to you."), Message("user", "Go on.")],
)


def template_problem(source: str, *, timeout_s: float = RENDER_S) -> str:
    """Why a chat template cannot serve, "" if it can.

    Args:
        source: Jinja.
        timeout_s: a template may loop for hours without writing anything; this long is enough for any that is meant.

    Raises:
        ImportError: Jinja is not installed here.
    """
    import jinja2  # noqa: F401  the engine's own import of it would be taken for the template's fault

    said: list[str] = []
    # A thread cannot be stopped; a daemon does not keep the command from ending.
    thread = threading.Thread(target=lambda: said.append(_render(source)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return said[0] if said else f"the chat template does not come to an end within {timeout_s:g} s"


def _render(source: str) -> str:
    try:
        template = ChatTemplate(source, begin_text="<s>", end_text="</s>", characters_max=CHARACTERS_MAX)
        for messages in _TURNS:
            if not template.render(messages):
                return "the chat template renders a conversation to nothing"
    except RefusalError as error:
        return f"the chat template cannot render a plain conversation: {error}"
    except ValueError as error:
        return f"the chat template cannot be used: {error}"
    except Exception as error:
        return f"the chat template cannot be used: {type(error).__name__}"
    return ""
