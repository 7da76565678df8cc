import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from headrace.api.registry.v1 import resources_pb2 as _resources_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RoutingSnapshot(_message.Message):
    __slots__ = ("incarnation", "version", "digest", "publish_time", "soft_age", "hard_age", "artifacts", "revisions", "aliases", "replicas", "revocations", "tenants")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    SOFT_AGE_FIELD_NUMBER: _ClassVar[int]
    HARD_AGE_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    version: int
    digest: str
    publish_time: _timestamp_pb2.Timestamp
    soft_age: _duration_pb2.Duration
    hard_age: _duration_pb2.Duration
    artifacts: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Artifact]
    revisions: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Revision]
    aliases: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Alias]
    replicas: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Replica]
    revocations: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Revocation]
    tenants: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Tenant]
    def __init__(self, incarnation: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., publish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., soft_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hard_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., artifacts: _Optional[_Iterable[_Union[_resources_pb2.Artifact, _Mapping]]] = ..., revisions: _Optional[_Iterable[_Union[_resources_pb2.Revision, _Mapping]]] = ..., aliases: _Optional[_Iterable[_Union[_resources_pb2.Alias, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[_resources_pb2.Replica, _Mapping]]] = ..., revocations: _Optional[_Iterable[_Union[_resources_pb2.Revocation, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[_resources_pb2.Tenant, _Mapping]]] = ...) -> None: ...

class RoutingRoot(_message.Message):
    __slots__ = ("incarnation", "version", "digest", "publish_time", "soft_age", "hard_age", "shards", "revocations")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    SOFT_AGE_FIELD_NUMBER: _ClassVar[int]
    HARD_AGE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    version: int
    digest: str
    publish_time: _timestamp_pb2.Timestamp
    soft_age: _duration_pb2.Duration
    hard_age: _duration_pb2.Duration
    shards: _containers.RepeatedCompositeFieldContainer[ShardRef]
    revocations: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Revocation]
    def __init__(self, incarnation: _Optional[str] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ..., publish_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., soft_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., hard_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., shards: _Optional[_Iterable[_Union[ShardRef, _Mapping]]] = ..., revocations: _Optional[_Iterable[_Union[_resources_pb2.Revocation, _Mapping]]] = ...) -> None: ...

class ShardRef(_message.Message):
    __slots__ = ("name", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("name", "artifacts", "revisions", "aliases", "replicas", "tenants")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    artifacts: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Artifact]
    revisions: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Revision]
    aliases: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Alias]
    replicas: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Replica]
    tenants: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Tenant]
    def __init__(self, name: _Optional[str] = ..., artifacts: _Optional[_Iterable[_Union[_resources_pb2.Artifact, _Mapping]]] = ..., revisions: _Optional[_Iterable[_Union[_resources_pb2.Revision, _Mapping]]] = ..., aliases: _Optional[_Iterable[_Union[_resources_pb2.Alias, _Mapping]]] = ..., replicas: _Optional[_Iterable[_Union[_resources_pb2.Replica, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[_resources_pb2.Tenant, _Mapping]]] = ...) -> None: ...
