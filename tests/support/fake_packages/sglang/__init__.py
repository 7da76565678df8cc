"""`import sglang` in a process that has this folder on its path finds the fake."""

from support import fake_sglang

fake_sglang.install()
