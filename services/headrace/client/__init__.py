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
    NotFound,
    Overloaded,
    ProtocolError,
    RequestError,
    SequenceGap,
    ServiceError,
    SlowConsumer,
    TakenOver,
    TryLater,
    Unavailable,
)
from headrace.client.events import (
    Accepted,
    Alternative,
    Answer,
    Delta,
    Event,
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
from headrace.control.errors import Reason, Violation
from headrace.control.event_log import Retention
from headrace.control.resources import Effort

__all__ = [
    "Accepted",
    "Alternative",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "Detached",
    "Effort",
    "Event",
    "FinishReason",
    "GenerateOptions",
    "HeadraceError",
    "Incomplete",
    "Interrupted",
    "InvalidRequest",
    "Message",
    "NotFound",
    "Notice",
    "NoticeKind",
    "Overloaded",
    "ProtocolError",
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
    "Timing",
    "TokenLogprob",
    "TryLater",
    "Unavailable",
    "Usage",
    "Violation",
]
