"""From an operation's bytes to the loop's inbox: reads, checks against the model, tokenizes, and gives the receipt.

Runs in Triton's thread, so that prompts are tokenized while the loop decodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.engine.backend import Backend
from headrace.engine.chat import ChatTemplate
from headrace.engine.continuation import Known, replay
from headrace.engine.contract import OPS
from headrace.engine.operations import Cancel, Enumerate, Grant, OpenStream, Operation, Submit
from headrace.engine.owner import Sink
from headrace.engine.request import (
    CHAT_TEMPLATE_MISSING,
    CONTEXT_LENGTH_EXCEEDED,
    ENGINE_FAILED,
    INVALID_REQUEST,
    OVERLOADED,
    Guided,
    RefusalError,
    Rejected,
    Request,
    Sampling,
    invalid,
    parse_cancel,
    parse_credit,
    parse_generate,
    parse_request,
)
from headrace.engine.sequence import Prepared

OWNER_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class Published:
    """What the loop last said of itself: for `ping` and `stats`, which must not wait for it."""

    at_ns: int
    stats: dict[str, Any]
    failure: str | None


class Intake:
    """`submit` puts an operation into the loop's inbox and says whether there was room; `clock` is monotonic ns.

    `check` refuses what this engine cannot do though the contract allows it.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        context_tokens: int,
        template: ChatTemplate | None,
        submit: Callable[[Operation], bool],
        published: Callable[[], Published],
        draw_seed: Callable[[], int],
        clock: Callable[[], int],
        check: Callable[[Sampling, int | None], None] = lambda _sampling, _top: None,
    ) -> None:
        self._check = check
        self._backend = backend
        self._facts = backend.facts
        self._context_tokens = context_tokens
        self._template = template
        self._submit = submit
        self._published = published
        self._draw_seed = draw_seed
        self._clock = clock
        self._stream: Sink | None = None

    def handle(
        self, op: bytes, request: bytes, tokens: Sequence[int], open_sink: Callable[[], Sink]
    ) -> dict[str, Any] | None:
        """One operation's receipt; None when it is a stream, which answers for itself."""
        try:
            name = op.decode(errors="replace")
            if name not in OPS:
                raise RefusalError(INVALID_REQUEST, f"The engine has no operation {name[:32]!r}.", "op")
            document = _document(request)
            published = self._published()
            if name in ("ping", "stats"):
                return self._answer(name, published)
            if published.failure is not None:
                raise _failed(published.failure)
            if name in ("events", "run"):
                self._open(name, document, tokens, open_sink)
                return None
            self._put(self._operation(name, document, tokens))
            return {"ok": True}
        except RefusalError as error:
            return {"ok": False, "error": error.document()}

    def _answer(self, name: str, published: Published) -> dict[str, Any]:
        if published.failure is not None:
            raise _failed(published.failure)
        if name == "stats":
            return {"ok": True, "stats": published.stats}
        return {"ok": True, "loop_age_ms": max(0, self._clock() - published.at_ns) // 1_000_000}

    def _open(self, name: str, document: dict[str, Any], tokens: Sequence[int], open_sink: Callable[[], Sink]) -> None:
        """Everything is checked before the sink exists: from then on, it answers."""
        if name == "events":
            owner = document.get("owner", "")
            if not isinstance(owner, str) or len(owner) > OWNER_CHARACTERS_MAX:
                raise invalid("owner", f"must be a string of at most {OWNER_CHARACTERS_MAX} characters")
            goes_on = document.get("goes_on", False)
            if not isinstance(goes_on, bool):
                raise invalid("goes_on", "must be true or false")
            sink = open_sink()
            operation: Operation = OpenStream(sink, goes_on)
        else:
            prepared = self._prepare(parse_request(document, tokens), self._clock())
            sink = open_sink()
            operation = Submit((prepared,), sink)
        if not self._submit(operation):
            sink.close(None)
        elif name == "events":
            self._stream = sink

    def _operation(self, name: str, document: dict[str, Any], tokens: Sequence[int]) -> Operation:
        if name == "credit":
            return Grant(tuple(parse_credit(document)))
        if name == "cancel":
            seqs, reason = parse_cancel(document)
            return Cancel(tuple(seqs), reason)
        if name == "list":
            return Enumerate()
        if self._stream is None or self._stream.is_lost:
            raise RefusalError(INVALID_REQUEST, "There is no event stream to tell the outcome on.", "op")
        received = self._clock()
        entries = [self._entry(request, received) for request in parse_generate(document, tokens)]
        return Submit(tuple(entries))

    def _put(self, operation: Operation) -> None:
        if not self._submit(operation):
            raise RefusalError(OVERLOADED, "The engine's inbox is full.")

    def _entry(self, request: Request | Rejected, received_ns: int) -> Prepared | Rejected:
        if isinstance(request, Rejected):
            return request
        try:
            return self._prepare(request, received_ns)
        except RefusalError as error:
            return Rejected(request.seq, error)

    def _prepare(self, request: Request, received_ns: int) -> Prepared:
        self._check(request.sampling, request.top_logprobs)
        prompt = self._prompt(request)
        for token in request.stop_token_ids:
            if token >= self._facts.vocabulary:
                raise invalid("stop_token_ids", f"holds {token}, the vocabulary has {self._facts.vocabulary} tokens")
        limit = self._context_tokens
        if len(prompt) >= limit:
            raise _too_long("prompt", f"The prompt has {len(prompt)} tokens", limit, len(prompt) + 1)
        max_tokens = request.max_tokens or min(limit - len(prompt), request.max_tokens_cap or limit)
        if len(prompt) + max_tokens > limit:
            sentence = f"The prompt's {len(prompt)} tokens and max_tokens {max_tokens} do not fit"
            raise _too_long("max_tokens", sentence, limit, len(prompt) + max_tokens)
        known = self._known(request, len(prompt), max_tokens)
        guide = None if request.guided is None else self._guide(request.guided)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._draw_seed())
        return Prepared(
            seq=request.seq,
            prompt=prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.ignore_eos,
            top_logprobs=request.top_logprobs,
            credit=request.credit,
            received_ns=received_ns,
            deadline_ns=_time_ns(request.deadline_ms, received_ns),
            queue_until_ns=_time_ns(request.queue_ms, received_ns),
            execution_ns=_time_ns(request.execution_ms, 0),
            cache_salt=request.cache_salt,
            known=known,
            guide=guide,
            priority=request.priority,
        )

    def _guide(self, guided: Guided) -> Any:
        """Compiled here so that the loop does not stand still for it."""
        kinds = self._facts.guided
        if guided.kind not in kinds:
            can = f"does {', '.join(sorted(kinds))}" if kinds else "does no guided decoding"
            raise invalid(f"guided.{guided.kind}", f"is not what this engine does: it {can}")
        return self._backend.compile(guided)

    def _known(self, request: Request, prompt: int, max_tokens: int) -> Known | None:
        """The continuation, replayed here so that the loop does not stand still for it."""
        continuation = request.continuation
        if continuation is None:
            return None
        tokens, vocabulary, limit = continuation.tokens, self._facts.vocabulary, self._context_tokens
        if prompt + len(tokens) > limit:
            sentence = f"The prompt's {prompt} tokens and the {len(tokens)} that were generated do not fit"
            raise _too_long("continuation.tokens", sentence, limit, prompt + len(tokens))
        if len(tokens) > max_tokens:
            raise invalid("continuation.tokens", f"are {len(tokens)}, more than max_tokens {max_tokens}")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise invalid("continuation.tokens", f"must be ids from 0 to {vocabulary - 1}")
        return replay(
            continuation,
            self._backend.piece,
            stop_strings=request.stop,
            stop_token_ids=request.stop_token_ids,
            end_tokens=() if request.ignore_eos else self._facts.end_tokens,
        )

    def _prompt(self, request: Request) -> list[int]:
        if request.prompt_tokens is not None:
            prompt = list(request.prompt_tokens)
            if prompt and not 0 <= min(prompt) <= max(prompt) < self._facts.vocabulary:
                raise invalid("tokens", f"must be ids from 0 to {self._facts.vocabulary - 1}")
        elif request.messages is not None:
            if self._template is None:
                sentence = "The model has no chat template: send `prompt`, or register it with one."
                raise RefusalError(CHAT_TEMPLATE_MISSING, sentence, "messages")
            prompt = self._backend.tokenize(self._template.render(request.messages))
        else:
            prompt = self._backend.tokenize(request.prompt or "")
        if not prompt:
            raise invalid("prompt", "has no tokens")
        return prompt


def _document(request: bytes) -> dict[str, Any]:
    try:
        document = json.loads(request or b"{}")
    except (ValueError, RecursionError):
        raise RefusalError(INVALID_REQUEST, "request is not JSON.", "request") from None
    if not isinstance(document, dict):
        raise RefusalError(INVALID_REQUEST, "request is not a JSON object.", "request")
    return document


def _time_ns(milliseconds: int | None, since_ns: int) -> int:
    """At least 1: 0 means that there is none."""
    return 0 if milliseconds is None else max(1, since_ns + milliseconds * 1_000_000)


def _failed(error_id: str) -> RefusalError:
    return RefusalError(ENGINE_FAILED, "The engine failed.", metadata={"errorId": error_id})


def _too_long(field: str, sentence: str, limit: int, requested: int) -> RefusalError:
    return RefusalError(
        CONTEXT_LENGTH_EXCEEDED,
        f"{sentence}, the context has {limit}.",
        field,
        {"limitTokens": limit, "requestedTokens": requested},
    )
