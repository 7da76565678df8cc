"""The engine inside Triton's Python backend: one loop, one event stream, one contract (docs/engine-contract.md)."""
