"""gRPC at the edges: status details, bounded deserializers, servers and channels."""
