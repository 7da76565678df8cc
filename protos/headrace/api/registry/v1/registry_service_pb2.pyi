from headrace.api.registry.v1 import resources_pb2 as _resources_pb2
from headrace.api.registry.v1 import routing_pb2 as _routing_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateArtifactRequest(_message.Message):
    __slots__ = ("artifact",)
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    artifact: _resources_pb2.Artifact
    def __init__(self, artifact: _Optional[_Union[_resources_pb2.Artifact, _Mapping]] = ...) -> None: ...

class CreateArtifactResponse(_message.Message):
    __slots__ = ("artifact",)
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    artifact: _resources_pb2.Artifact
    def __init__(self, artifact: _Optional[_Union[_resources_pb2.Artifact, _Mapping]] = ...) -> None: ...

class ListArtifactsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListArtifactsResponse(_message.Message):
    __slots__ = ("artifacts",)
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    artifacts: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Artifact]
    def __init__(self, artifacts: _Optional[_Iterable[_Union[_resources_pb2.Artifact, _Mapping]]] = ...) -> None: ...

class CreateRevisionRequest(_message.Message):
    __slots__ = ("model", "revision")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: _resources_pb2.Revision
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[_Union[_resources_pb2.Revision, _Mapping]] = ...) -> None: ...

class CreateRevisionResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: _resources_pb2.Revision
    def __init__(self, revision: _Optional[_Union[_resources_pb2.Revision, _Mapping]] = ...) -> None: ...

class ListRevisionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRevisionsResponse(_message.Message):
    __slots__ = ("revisions",)
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    revisions: _containers.RepeatedCompositeFieldContainer[_resources_pb2.Revision]
    def __init__(self, revisions: _Optional[_Iterable[_Union[_resources_pb2.Revision, _Mapping]]] = ...) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("alias",)
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: _resources_pb2.Alias
    def __init__(self, alias: _Optional[_Union[_resources_pb2.Alias, _Mapping]] = ...) -> None: ...

class SetAliasResponse(_message.Message):
    __slots__ = ("alias",)
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: _resources_pb2.Alias
    def __init__(self, alias: _Optional[_Union[_resources_pb2.Alias, _Mapping]] = ...) -> None: ...

class DeleteAliasRequest(_message.Message):
    __slots__ = ("name", "etag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ETAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    etag: str
    def __init__(self, name: _Optional[str] = ..., etag: _Optional[str] = ...) -> None: ...

class DeleteAliasResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSnapshotResponse(_message.Message):
    __slots__ = ("snapshot",)
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    snapshot: _routing_pb2.RoutingSnapshot
    def __init__(self, snapshot: _Optional[_Union[_routing_pb2.RoutingSnapshot, _Mapping]] = ...) -> None: ...

class ListServicesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListServicesResponse(_message.Message):
    __slots__ = ("services",)
    SERVICES_FIELD_NUMBER: _ClassVar[int]
    services: _containers.RepeatedCompositeFieldContainer[_resources_pb2.ServiceRecord]
    def __init__(self, services: _Optional[_Iterable[_Union[_resources_pb2.ServiceRecord, _Mapping]]] = ...) -> None: ...
