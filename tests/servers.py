"""Inference servers that the tests start and Antiphon does not."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

FLAGS = "--dtype float32 --enforce-eager --block-size 32 --no-enable-chunked-prefill --logprobs-mode processed_logprobs"
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}


def vllm(python: str, model: Path, log: Path, *flags: str) -> "InferenceServer":
    """A `vllm serve` on this machine's CPU, as a user would start it to be trained with."""
    # Not by its command: that looks for the version of a package `vllm`, and this may be `vllm-cpu`.
    command = [python or sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    return InferenceServer([*command, "--max-num-seqs", "4", *FLAGS.split(), *flags], log)


def sglang(model: Path, log: Path, *flags: str) -> "InferenceServer":
    """What stands in for SGLang's, on this machine's CPU."""
    return InferenceServer([sys.executable, str(Path(__file__).with_name("sglang_server.py")), str(model), *flags], log)


@contextmanager
def served(app):
    """Serve an ASGI application in a thread; yields its address."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


class InferenceServer:
    """The process that a command starts, which is told to listen on a port of 127.0.0.1."""

    def __init__(self, command: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"
        self._command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self._log = log
        self.start()

    def start(self) -> None:
        """Return once it answers."""
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(self._command, env=environment, start_new_session=True, **told)
        with self._log.open("wb", buffering=0) as log:
            for line in self._process.stdout:
                log.write(line)
                if b"startup complete" in line:
                    break
            else:
                raise RuntimeError(self._log.read_text()[-3000:])
        while not self._listens() and self.lives:  # uvicorn says that it has started before it does
            time.sleep(0.01)
        self._reader = threading.Thread(target=self._process.stdout.read)  # what nobody reads would stop it
        self._reader.start()

    def _listens(self) -> bool:
        try:
            socket.create_connection(self._address, timeout=1).close()
        except OSError:
            return False
        return True

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        if self.lives:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()
