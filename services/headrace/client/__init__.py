"""The client SDK: text from a Headrace service, as it is generated.

    from headrace.client import Client

    with Client("127.0.0.1:50051") as client:
        for text in client.generate("The river rose", model="demo", max_tokens=64).text():
            print(text, end="", flush=True)

`AsyncClient` has the same surface for asyncio. A stream iterates over events (`Accepted`, `Delta`, `Notice`,
`Terminal`), over `text()`, or is `read()` to its end as an `Answer`. What fails is a `HeadraceError`;
`headrace.client.errors` draws the tree. This package re-exports its names because it is the public face; nothing
else does.
"""

from headrace.client.aio import AsyncClient, AsyncStream
from headrace.client.blocking import Client, Stream
from headrace.client.errors import (
    Cancelled,
    DeadlineExceeded,
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
    StopMatch,
    Terminal,
    Timing,
    TokenLogprob,
    Usage,
)
from headrace.client.request import GenerateOptions, Message
from headrace.control.client_retry import RetryPolicy
from headrace.control.errors import Reason, Violation
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
    "RetryPolicy",
    "SequenceGap",
    "ServiceError",
    "SlowConsumer",
    "StopMatch",
    "Stream",
    "Terminal",
    "Timing",
    "TokenLogprob",
    "TryLater",
    "Unavailable",
    "Usage",
    "Violation",
]
