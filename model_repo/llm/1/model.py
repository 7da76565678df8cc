"""Triton's side of the engine: tensors in, tensors out, and not one exception across the border.

The engine itself is `headrace.engine`, in the directory beside this file; docs/engine-contract.md is the contract.
"""

import contextlib
import locale
import os
import signal
import sys
import threading
import time
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)
# `headrace` is a namespace package: this directory adds the portion `headrace.engine` to whatever is installed. First,
# not where Triton puts it, at the end: an engine of another version that is installed beside it must not hide it.
sys.path.insert(0, _HERE)
# The stub's Python never looks at the environment's locale, so it reads files as ASCII where nobody says otherwise; GPU
# engines' libraries do not.
with contextlib.suppress(locale.Error):
    locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
# How long ggml's OpenMP workers spin at a barrier before they sleep. Libgomp's default, about a millisecond, takes the
# cores of Triton, Scheduler and Router; not to spin at all costs llama.cpp half its speed.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# ggml would start a debugger on an assertion; the process dies either way, and its supervisor starts it anew.
os.environ.setdefault("GGML_NO_BACKTRACE", "1")

import numpy as np  # noqa: E402
import triton_python_backend_utils as pb_utils  # noqa: E402

from headrace.engine.config import ConfigError, load_config  # noqa: E402
from headrace.engine.contract import encode_reply  # noqa: E402
from headrace.engine.engine import make_engine  # noqa: E402
from headrace.engine.request import ENGINE_FAILED, RefusalError  # noqa: E402
from headrace.engine.sink import StreamSink  # noqa: E402

# A loop of pure Python (the synthetic engine at full speed) must not make the sender threads wait for 5 ms.
_SWITCH_INTERVAL_S = 0.001
_PARENT_LOOK_S = 0.5


class _TritonResponder:
    """`sink.Responder` over a Triton request: one call into Triton at a time, and none after FINAL.

    tritonserver takes responses in a pool of threads, and FINAL deletes what they are sent through (its response
    factory), without a look at who uses it: a send or a question beside FINAL, or after it, can end the server.
    """

    def __init__(self, request):
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()
        self._has_ended = False

    def send(self, tensors, *, is_final):
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_final else 0
        outputs = [pb_utils.Tensor(name, array) for name, array in tensors]
        with self._lock:
            if self._has_ended:
                raise RuntimeError("the request has had its FINAL")
            self._has_ended = is_final
            if outputs:
                self._sender.send(pb_utils.InferenceResponse(outputs), flags=flags)
            else:
                self._sender.send(flags=flags)

    def is_cancelled(self):
        with self._lock:
            return self._has_ended or self._sender.is_cancelled()


class TritonPythonModel:
    """Loaded once for each `tritonserver`; see config.pbtxt for why there is one instance."""

    def initialize(self, args):
        """Reads the configuration, loads and warms the model up; a failure is one sentence and fails the load."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        threading.Thread(target=_end_with, args=(os.getppid(),), name="parent", daemon=True).start()
        try:
            config = load_config(os.environ)
            self._engine = make_engine(config)
            self._engine.start()
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests):
        """Answers each operation, or hands its stream over; always returns None (decoupled)."""
        for request in requests:
            responder = _TritonResponder(request)
            try:
                reply = self._handle(request, responder)
                if reply is not None:
                    responder.send(encode_reply(reply), is_final=True)
            except Exception as error:
                self._answer_failure(responder, error)

    def _handle(self, request, responder):
        op = _element(request, "op")
        document = _element(request, "request")
        tensor = pb_utils.get_input_tensor_by_name(request, "tokens")
        tokens = [] if tensor is None else tensor.as_numpy().astype(np.int64).ravel().tolist()

        def open_sink():
            sink = StreamSink(responder)
            sink.start()
            return sink

        return self._engine.handle(op, document, tokens, open_sink)

    def _answer_failure(self, responder, error):
        """Our own bug: the class goes to the log, a plain sentence to the client."""
        sys.stderr.write(f"headrace engine: an operation failed: {type(error).__name__}\n")
        reply = {"ok": False, "error": RefusalError(ENGINE_FAILED, "The operation failed.").document()}
        try:
            responder.send(encode_reply(reply), is_final=True)
        except Exception as second:
            sys.stderr.write(f"headrace engine: no answer could be sent: {type(second).__name__}\n")

    def finalize(self):
        """Called when the model is unloaded, after its last request has ended."""
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.stop()


def _end_with(parent):
    """Ends this process once its tritonserver is gone: killed, it would leave the stub behind with all its memory.

    And with the server's process group, if it led one, what a library has started here: an engine in a process of its
    own has memory of its own, and does not look who is left. Looked at, not asked of the kernel: its parent-death
    signal comes when the server's *thread* ends that started us.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_LOOK_S)
    if os.getpgrp() == parent:
        os.killpg(parent, signal.SIGKILL)
    os._exit(1)


def _element(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return b""
    values = tensor.as_numpy().ravel()
    return bytes(values[0]) if values.size else b""
