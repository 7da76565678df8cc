"""The client SDK: text from a Headrace service, as it is generated.

    from headrace.client import Client

    with Client("127.0.0.1:50051") as client:
        for text in client.generate("The river rose", model="demo", max_tokens=64).text():
            print(text, end="", flush=True)

`AsyncClient` has the same surface for asyncio. A stream iterates over events (`Accepted`, `Delta`, `Notice`,
`Terminal`), over `text()`, or is `read()` to its end as an `Answer`. What was read is acknowledged, so that nothing is
generated far ahead of a reader; with on_disconnect="continue" a stream survives a lost connection, and `resume()` goes
on with it from another process. What fails is a `HeadraceError`; `headrace.client.errors` draws the tree. This
package re-exports its names because it is the public face; nothing else does.
"""

from headrace.client.aio import AsyncClient
from headrace.client.aio_stream import AsyncStream
from headrace.client.blocking import Client
from headrace.client.blocking_stream import Stream
from headrace.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Detached,
    HeadraceError,
    Incomplete,
    Interrupted,
    InvalidRequest,
    KeyReused,
    NotAllowed,
    NotFound,
    OriginLost,
    Overloaded,
    ProtocolError,
    QuotaExceeded,
    QuotaViolation,
    RequestError,
    SequenceGap,
    ServiceError,
    SlowConsumer,
    TakenOver,
    Throttled,
    TryLater,
    Unavailable,
)
from headrace.client.events import (
    Accepted,
    Alternative,
    Answer,
    AttemptCause,
    AttemptRecord,
    Delta,
    Event,
    Exactness,
    FinishReason,
    Notice,
    NoticeKind,
    RequestInfo,
    RequestState,
    ResumePoint,
    StopMatch,
    Terminal,
    Timing,
    TokenLogprob,
    Usage,
)
from headrace.client.request import GenerateOptions, Message
from headrace.control.client_retry import RetryPolicy
from headrace.control.client_throttle import ThrottlePolicy
from headrace.control.errors import Reason, Violation
from headrace.control.event_log import Retention
from headrace.control.priority import Priority
from headrace.control.resources import Effort

__all__ = [
    "Accepted",
    "Alternative",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "AttemptCause",
    "AttemptRecord",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Detached",
    "Effort",
    "Event",
    "Exactness",
    "FinishReason",
    "GenerateOptions",
    "HeadraceError",
    "Incomplete",
    "Interrupted",
    "InvalidRequest",
    "KeyReused",
    "Message",
    "NotAllowed",
    "NotFound",
    "Notice",
    "NoticeKind",
    "OriginLost",
    "Overloaded",
    "Priority",
    "ProtocolError",
    "QuotaExceeded",
    "QuotaViolation",
    "Reason",
    "RequestError",
    "RequestInfo",
    "RequestState",
    "ResumePoint",
    "Retention",
    "RetryPolicy",
    "SequenceGap",
    "ServiceError",
    "SlowConsumer",
    "StopMatch",
    "Stream",
    "TakenOver",
    "Terminal",
    "ThrottlePolicy",
    "Throttled",
    "Timing",
    "TokenLogprob",
    "TryLater",
    "Unavailable",
    "Usage",
    "Violation",
]
