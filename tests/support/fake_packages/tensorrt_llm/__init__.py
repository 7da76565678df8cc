"""`import tensorrt_llm` in a process that has this folder on its path finds the fake."""

from support import fake_tensorrt_llm

fake_tensorrt_llm.install()
