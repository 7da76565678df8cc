"""What a caller asks for, as a message. A value of the wrong type or sign is refused here, by the field's name."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, TypeVar

from headrace.adapters.route_codec import EFFORTS
from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.errors import Facts, InvalidRequest
from headrace.control.errors import Violation
from headrace.control.priority import Priority
from headrace.control.resources import Effort, Sampling

RoleName = Literal["system", "user", "assistant"]
EffortName = Literal["none", "low", "medium", "high"]
NamedRequest = TypeVar("NamedRequest", pb.GetRequestRequest, pb.CancelRequestRequest)
OnDisconnectName = Literal["cancel", "continue"]
PriorityName = Literal["sheddable", "batch", "standard", "critical"]
RecoveryName = Literal["interrupt", "continue"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; {"role": ..., "content": ...} does as well."""

    role: RoleName
    content: str


class GenerateOptions(TypedDict, total=False):
    """Options of generate(). Meanings and ranges are those of headrace.api.inference.v1; unset or None: the default."""

    messages: Sequence[Message | Mapping[str, str]] | None
    """A conversation, instead of a prompt."""
    token_ids: Sequence[int] | None
    """A tokenized prompt, instead of a text."""
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool
    top_logprobs: int | None
    json_schema: str | Mapping[str, Any] | None
    """The answer is one JSON value that is valid by this schema. Of this and the next four, at most one is given."""
    json_object: bool
    """The answer is one JSON object."""
    regex: str | None
    """The answer is a text that this matches as a whole."""
    choice: Sequence[str] | None
    """The answer is one of these."""
    grammar: str | None
    """The answer is a text of this grammar, in the engine's own dialect."""
    reasoning_effort: Effort | EffortName | None
    on_disconnect: OnDisconnectName | None
    """What becomes of the request when its call ends early. "continue": it runs on, and a stream whose connection is
    lost is resumed by itself; leave it with `detach()`, or end it as any other. Default: "cancel"."""
    priority: Priority | PriorityName | None
    """How much others may be served before it under load. Default: the tenant's."""
    idempotency_key: str | None
    """Unique for this request. Sent again with the same key and content it is never run twice: the call gets what the
    first one gets, or got. Like on_disconnect="continue" the request runs on when its call breaks off."""
    recovery: RecoveryName | None
    """What becomes of it when its worker is lost after output. "continue": another one goes on behind it, and a notice
    says so. Default: "interrupt"."""
    affinity_key: str | None
    """Requests with the same value like to run where the others ran."""
    window_tokens: int | None
    """Tokens that may be generated ahead of what was read."""
    interactive: bool | None
    """Whether what was read is acknowledged; default: the client's."""
    timeout_s: float | None
    """Seconds from the first read to the end; default: the client's."""


_PLAIN = frozenset({"max_tokens", "top_logprobs", "window_tokens", "idempotency_key", "affinity_key"})
_SAMPLING = frozenset(Sampling.__slots__)
_ROLES: Mapping[str, Any] = {name.removeprefix("ROLE_").lower(): number for name, number in pb.Role.items() if number}
_CHOICES: Mapping[str, Mapping[str, Any]] = {
    field: {name.removeprefix(prefix).lower(): number for name, number in values.items() if number}
    for field, prefix, values in (
        ("on_disconnect", "ON_DISCONNECT_", pb.OnDisconnect),
        ("priority", "PRIORITY_", pb.Priority),
        ("recovery", "RECOVERY_", pb.Recovery),
    )
}
_GUIDES = frozenset({"json_schema", "json_object", "regex", "choice", "grammar"})
_OPTIONS = frozenset(GenerateOptions.__annotations__)


def build_resume(request: str, after_sequence: int) -> pb.ResumeGenerateRequest:
    """Build the message that goes on with a request.

    Raises:
        InvalidRequest: a value cannot be sent; names the field.
    """
    message = pb.ResumeGenerateRequest()
    _set(message, "request", request)
    _set(message, "after_sequence", after_sequence)
    return message


def build_name(message: NamedRequest, request: str) -> NamedRequest:
    """Name a request in a message about it.

    Raises:
        InvalidRequest: it cannot be sent.
    """
    _set(message, "request", request)
    return message


def build_request(model: str, prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """Build the message.

    Raises:
        InvalidRequest: a value cannot be sent; names the field. Ranges are the service's to judge.
        TypeError: not exactly one of prompt, messages and token_ids, more than one guide, or an option that does not
            exist.
    """
    if unknown := options.keys() - _OPTIONS:
        raise TypeError(f"generate() has no option {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if (prompt is not None) + ("messages" in given) + ("token_ids" in given) != 1:
        raise TypeError("generate() takes exactly one of prompt, messages and token_ids")
    request = pb.GenerateRequest()
    _set(request, "model", model)
    if prompt is not None:
        _set(request, "prompt", prompt)
    elif "messages" in given:
        request.conversation.SetInParent()
        for index, message in enumerate(given["messages"]):
            _add_message(request.conversation, index, message)
    else:
        request.tokens.SetInParent()
        _extend(request.tokens.ids, given["token_ids"], "tokens.ids")
    for name in given.keys() & _PLAIN:
        _set(request, name, given[name])
    for name in given.keys() & _SAMPLING:
        _set(request.sampling, name, given[name], prefix="sampling.")
    if "stop" in given:
        stop = given["stop"]
        _extend(request.stop.strings, [stop] if isinstance(stop, str) else stop, "stop.strings")
    if "stop_token_ids" in given:
        _extend(request.stop.token_ids, given["stop_token_ids"], "stop.token_ids")
    if given.get("ignore_eos"):
        request.stop.ignore_eos = True
    if "reasoning_effort" in given:
        request.reasoning_effort = _effort(given["reasoning_effort"])
    _set_guide(request, {name: given[name] for name in given.keys() & _GUIDES if given[name] is not False})
    for name in given.keys() & _CHOICES.keys():
        setattr(request, name, _choice(name, given[name]))
    return request


def _set_guide(request: pb.GenerateRequest, given: Mapping[str, Any]) -> None:
    if len(given) > 1:
        raise TypeError(f"generate() takes at most one of {', '.join(sorted(given))}")
    for name, value in given.items():
        guided = request.guided_decoding
        if name == "choice":
            if isinstance(value, str):
                raise _wrong("guided_decoding.choice", "must be a list of strings")
            guided.choice.SetInParent()
            _extend(guided.choice.strings, value, "guided_decoding.choice.strings")
        elif name == "json_schema" and isinstance(value, Mapping):
            try:
                guided.json_schema = json.dumps(value)
            except (TypeError, ValueError):
                raise _wrong("guided_decoding.json_schema", "holds what is not JSON") from None
        else:
            _set(guided, name, value, prefix="guided_decoding.")


def _set(message: Any, name: str, value: object, *, prefix: str = "") -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise _unsendable(prefix + name, error) from None


def _extend(target: Any, values: Iterable[object], field: str) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError) as error:
        raise _unsendable(field, error) from None


def _add_message(conversation: pb.Conversation, index: int, message: Message | Mapping[str, str]) -> None:
    field = f"conversation.messages[{index}]"
    try:
        if isinstance(message, Mapping):
            role, content = message["role"], message["content"]
        else:
            role, content = message.role, message.content
    except (KeyError, AttributeError):
        raise _wrong(field, "needs a role and a content") from None
    number = _ROLES.get(role) if isinstance(role, str) else None
    if number is None:
        raise _wrong(f"{field}.role", "must be system, user or assistant")
    _set(conversation.messages.add(role=number), "content", content, prefix=f"{field}.")


def _effort(effort: Effort | str) -> Any:
    try:
        return EFFORTS[Effort(effort)]
    except ValueError:
        raise _wrong("reasoning_effort", "must be none, low, medium or high") from None


def _choice(field: str, value: object) -> Any:
    names = _CHOICES[field]
    name = value.name.lower() if isinstance(value, Priority) else value
    number = names.get(name) if isinstance(name, str) else None
    if number is None:
        *others, last = names
        raise _wrong(field, f"must be {', '.join(others)} or {last}")
    return number


def _unsendable(field: str, error: Exception) -> InvalidRequest:
    """Say what protobuf refused to hold, without the value: its own message repeats it."""
    if isinstance(error, UnicodeError):
        return _wrong(field, "must be valid UTF-8")
    return _wrong(field, "has the wrong type" if isinstance(error, TypeError) else "is out of range")


def _wrong(field: str, description: str) -> InvalidRequest:
    violation = Violation(field, description)
    return InvalidRequest(f"{field}: {description}.", Facts(field=field, violations=(violation,)))
