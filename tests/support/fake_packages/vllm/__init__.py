"""`import vllm` in a process that has this folder on its path finds the fake."""

from support import fake_vllm

fake_vllm.install()
