"""Channels and servers between our own services: the options that were measured to matter.

- A frozen peer is only noticed with `grpc.http2.ping_timeout_ms`; keepalive alone took 66 s instead of 8.
- The receiver sets the window: without BDP probing and with a small look-ahead a reader that stops holds back
  its sender after kilobytes instead of megabytes.
- Reconnects back off to at most a second, not two minutes.
"""

from __future__ import annotations

import grpc

MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""Largest message between our services, bytes."""

_Options = list[tuple[str, int | str]]

KEEPALIVE: _Options = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS: _Options = [
    *KEEPALIVE,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
]

BOUNDED_WINDOW: _Options = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16_384),
]
"""For whoever reads. Of a stream of 2,000 messages of 75 bytes a second, a reader that had stopped took 308 before its
sender was held up (102 with a look-ahead of 4,096); with gRPC's defaults it took all 21,125 of 10.5 s."""

SERVER_OPTIONS: _Options = [
    *KEEPALIVE,
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),
]


def internal_channel(target: str) -> grpc.aio.Channel:
    """Open a channel to one of our own services at host:port."""
    return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
