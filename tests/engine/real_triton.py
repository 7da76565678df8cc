"""A real tritonserver for one test: the wheel's server in a copy, our model repository, one loopback port."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue

import grpc
from headrace.engine import contract
from tritonclient.grpc import service_pb2, service_pb2_grpc

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repo"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class TritonServer:
    """`with TritonServer(workspace, config) as server:`; `config` is the engine's configuration."""

    def __init__(self, workspace, config):
        self.workspace = Path(workspace)
        self.port = free_port()
        self.log = self.workspace / "triton.log"
        self._config = config

    def __enter__(self):
        package = Path(importlib.util.find_spec("pytriton").origin).parent
        server = self.workspace / "tritonserver"
        shutil.copytree(
            package / "tritonserver", server, ignore=shutil.ignore_patterns("python_backend_stubs")
        )
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = package / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
        shutil.copy(stub, server / "backends" / "python")
        config_file = self.workspace / "engine.json"
        config_file.write_text(json.dumps(self._config))
        environment = {
            **os.environ,
            "HEADRACE_ENGINE_CONFIG": str(config_file),
            "LD_LIBRARY_PATH": str(package.parent / "nvidia_pytriton.libs"),
            "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ.get('PATH', '')}",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [
            str(server / "bin" / "tritonserver"),
            f"--model-repository={REPOSITORY}",
            f"--backend-directory={server / 'backends'}",
            f"--cache-directory={server / 'caches'}",
            "--model-control-mode=explicit",
            "--load-model=llm",
            "--allow-http=0",
            "--allow-metrics=0",
            "--grpc-address=127.0.0.1",
            f"--grpc-port={self.port}",
            "--exit-timeout-secs=5",
            f"--backend-config=python,shm-region-prefix-name=headrace-test-{os.getpid()}-{self.port}",
            "--backend-config=python,shm-default-byte-size=4194304",
        ]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self._wait_until_ready()
        return self

    def _wait_until_ready(self):
        channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        deadline = time.monotonic() + 60
        while True:
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = self.log.read_text(errors="replace")
                self.__exit__(None, None, None)
                raise RuntimeError(f"tritonserver did not start:\n{text[-4000:]}")
            with contextlib.suppress(grpc.RpcError):
                if stub.ModelReady(service_pb2.ModelReadyRequest(name="llm"), timeout=1).ready:
                    break
            time.sleep(0.1)
        channel.close()

    @property
    def pid(self):
        return self._process.pid

    def __exit__(self, *exc):
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for leftover in Path("/dev/shm").glob(f"headrace-test-{os.getpid()}-{self.port}*"):
            leftover.unlink()


class Client:
    """One ModelStreamInfer stream; responses are sorted by the id of their request."""

    def __init__(self, port):
        self._channel = grpc.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1)]
        )
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._requests = Queue()
        self._answers = {}
        self._lock = threading.Lock()
        self._call = stub.ModelStreamInfer(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._next = 0

    def _read(self):
        with contextlib.suppress(grpc.RpcError):
            for response in self._call:
                assert not response.error_message, response.error_message
                self._queue(response.infer_response.id).put(response.infer_response)

    def _queue(self, name):
        with self._lock:
            return self._answers.setdefault(name, Queue())

    def send(self, op, document=None, tokens=None):
        self._next += 1
        request = service_pb2.ModelInferRequest(model_name="llm", id=str(self._next))
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, datatype, shape, raw in contract.encode_op(op, document, tokens):
            tensor = request.inputs.add()
            tensor.name, tensor.datatype = name, datatype
            tensor.shape.extend(shape)
            request.raw_input_contents.append(raw)
        self._requests.put(request)
        return str(self._next)

    def receive(self, name, timeout=10):
        return contract.decode_response(self._queue(name).get(timeout=timeout))

    def ask(self, op, document=None, tokens=None):
        return self.receive(self.send(op, document, tokens))

    def is_quiet(self, name, seconds):
        try:
            self._queue(name).get(timeout=seconds)
        except Empty:
            return True
        return False

    def close(self):
        self._call.cancel()
        self._requests.put(None)
        self._reader.join(5)
        self._channel.close()
