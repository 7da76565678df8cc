"""Messages to text through the model's own Jinja template: sandboxed, and bounded in what it may write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from headrace.engine.request import CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST, Message, RefusalError


class ChatTemplate:
    """A compiled template. Raises `ValueError` when it is no Jinja template."""

    def __init__(self, source: str, *, begin_text: str, end_text: str, characters_max: int) -> None:
        # Imported here: the Scheduler shares this package, and has no Jinja.
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
        environment.globals["raise_exception"] = _reject
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"The chat template is not valid Jinja: {error}.") from error
        # What a template can do wrong with messages that it did not expect.
        self._errors: tuple[type[Exception], ...] = (
            jinja2.TemplateError,
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        )
        self._names: dict[str, Any] = {"bos_token": begin_text, "eos_token": end_text}
        self._characters_max = characters_max

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next turn; raises `RefusalError`."""
        documents = [{"role": message.role, "content": message.content} for message in messages]
        parts = []
        size = 0
        try:
            for part in self._template.generate(messages=documents, add_generation_prompt=True, **self._names):
                parts.append(part)
                size += len(part)
                if size > self._characters_max:
                    raise RefusalError(
                        CONTEXT_LENGTH_EXCEEDED, "The conversation is far longer than the context.", "messages"
                    )
        except RefusalError:
            raise
        except self._errors:
            # The template's own words may quote the conversation, and logs must not: say only whose fault it is.
            raise RefusalError(INVALID_REQUEST, "The chat template cannot render these messages.", "messages") from None
        return "".join(parts)


def _reject(message: object) -> NoReturn:
    """`raise_exception` of chat templates: the conversation does not have the shape that the model wants."""
    sentence = f"The chat template rejects these messages: {str(message)[:200].rstrip(' .')}."
    raise RefusalError(INVALID_REQUEST, sentence, "messages")
