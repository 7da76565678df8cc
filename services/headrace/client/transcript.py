"""What has arrived of one answer, and the contract of its stream: no gap, and nothing after the end."""

from __future__ import annotations

from headrace.api.inference.v1 import inference_service_pb2 as pb
from headrace.client.calls import Unreadable
from headrace.client.decoding import event_from_proto
from headrace.client.errors import Facts, ProtocolError, SequenceGap
from headrace.client.events import Accepted, Answer, Delta, Event, Terminal, TokenLogprob
from headrace.control.errors import RULES, Reason


class Transcript:
    """Events in order, over all calls that read the same request.

    Args:
        request: its name, if it is known already.
        after_sequence: the last event that was read elsewhere.
    """

    def __init__(self, request: str = "", after_sequence: int = 0) -> None:
        self.request = request
        self.sequence = after_sequence
        """Of the latest event."""
        self.accepted: Accepted | None = None
        self.terminal: Terminal | None = None
        self.has_output = False
        self._is_accepted = after_sequence > 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def take(self, message: pb.GenerateEvent | Unreadable) -> Event | None:
        """Take one message; see Session.take. On the hot path.

        Raises:
            ProtocolError: the message breaks the stream's contract; SequenceGap if by its number.
        """
        if isinstance(message, Unreadable):
            raise ProtocolError("The service sent an event that cannot be read.")
        if message.sequence != self.sequence + 1:
            raise _gap(self.sequence + 1, message.sequence)
        if self.terminal is not None:
            raise ProtocolError("The service sent an event after the terminal one.")
        self.sequence += 1
        event = event_from_proto(message)
        if isinstance(event, Delta):
            if not self._is_accepted:
                raise ProtocolError("The service sent output before it accepted the request.")
            self.has_output = True
            self._texts.append(event.text)
            self._token_ids.extend(event.token_ids)
            if event.logprobs:
                self._logprobs.extend(event.logprobs)
        elif isinstance(event, Terminal):
            self.terminal = event
            return None
        elif isinstance(event, Accepted):
            self.accepted = event
            self._is_accepted = True
            self.request = event.request
        return event

    @property
    def is_accepted(self) -> bool:
        """Whether a worker has had the request."""
        return self._is_accepted

    def answer(self) -> Answer:
        """All of it so far."""
        accepted, terminal = self.accepted, self.terminal
        return Answer(
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            finish_reason=terminal.finish_reason if terminal else None,
            stop=terminal.stop if terminal else None,
            usage=terminal.usage if terminal else None,
            timing=terminal.timing if terminal else None,
            request=self.request,
            revision=accepted.revision if accepted else "",
            replica=accepted.replica if accepted else "",
            attempts=terminal.attempts if terminal else (accepted.attempt if accepted else 0),
            effective_effort=accepted.effective_effort if accepted else None,
        )


def _gap(expected: int, got: int) -> SequenceGap:
    facts = Facts(
        code=RULES[Reason.SEQUENCE_GAP].code,
        reason=Reason.SEQUENCE_GAP,
        metadata={"expectedSequence": str(expected), "gotSequence": str(got)},
    )
    return SequenceGap(f"Event {got} arrived where event {expected} was expected; the stream cannot be trusted.", facts)
