"""The client's side of the zygote and its workers: starts them, talks to them, and ends them."""

import contextlib
import json
import marshal
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from antiphon.core.errors import UnsupportedError
from antiphon.sandbox.base import Level
from antiphon.sandbox.isolation import cgroups, levels, users
from antiphon.sandbox.isolation.memory_files import memory_file
from antiphon.sandbox.isolation.protocol import LARGEST_MESSAGE, PACKAGES

START_SECONDS = 60.0  # allows for a loaded machine and for packages that are slow to import
STOP_SECONDS = 5.0  # for the zygote to end by itself
_ENVIRONMENT = {"HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class LostError(Exception):
    """A worker or the zygote is gone, or did not answer."""


class ZygoteClient:
    """A zygote process, as seen by the process that owns the sandbox."""

    def __init__(self, level: Level, packages: Mapping[str, str], modules: Mapping[str, CodeType]) -> None:
        """Start the process.

        Args:
            level: Isolation of the programs.
            packages: Files of installed packages that programs may import, as name -> path.
            modules: Code objects by the module name under which programs find them imported.

        Raises:
            UnsupportedError: The sandbox cannot start at this level.
        """
        self._scratch = "" if level >= Level.ISOLATED else tempfile.mkdtemp(prefix="antiphon-sandbox-")
        if self._scratch:
            os.chmod(self._scratch, 0o711)  # programs with users of their own reach their directories below it
        self._group: Path | None = None
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.settimeout(START_SECONDS)
        with theirs, memory_file(marshal.dumps(dict(modules))) as code:
            self.process = subprocess.Popen(
                levels.python_command("antiphon.sandbox.isolation.zygote", f"main({theirs.fileno()}, {code.fileno()})"),
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno(), code.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is handled by the client
            )
        try:
            self.connection.send(json.dumps(self._setup(level, packages)).encode())
            answer = receive_answer(self.connection, "the zygote")
        except (LostError, OSError) as error:
            self.close()
            message = f"the sandbox does not start at level {level}: {error}"
            raise UnsupportedError(message, value=level) from error
        self._group = Path(answer["group"]) if answer["group"] else None

    def _setup(self, level: Level, packages: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of a `ZygoteSetup`."""
        isolated = level >= Level.ISOLATED
        inside = {f"{PACKAGES}/{name}" if isolated else path: path for name, path in packages.items()}
        parents = sorted({str(Path(path).parent) for path in packages.values()})
        return {
            "level": level,
            "user_namespace": levels.probe().user_namespace,
            "seccomp": levels.probe().seccomp,
            "client_pid": os.getpid(),
            "sources": levels.python_sources() | inside,
            "imports": [name for name in packages if (Path(packages[name]) / "__init__.py").exists()],
            "paths": [PACKAGES] if isolated and packages else parents,
            "scratch": self._scratch,
        }

    def start_worker(self) -> "WorkerClient":
        """Have the zygote fork a worker, which runs its programs as a user of its own."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(START_SECONDS)
        with theirs:
            try:
                claim, uid = users.claim_user()
            except OSError as error:
                raise LostError(str(error)) from None
            try:
                socket.send_fds(self.connection, [str(uid).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                claim.close()
                raise LostError(f"the zygote is gone: {error}") from error
        try:
            return WorkerClient(ours, claim, receive_answer(ours, "a worker")["pid"])
        except LostError:
            ours.close()
            claim.close()
            raise

    def close(self) -> None:
        """End the zygote. Its workers see that their sockets are closed, and end too."""
        self.connection.close()
        try:
            self.process.wait(STOP_SECONDS)  # it waits for the workers
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self._group:
            cgroups.remove_group(self._group)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


class WorkerClient:
    """A worker process, as seen by the process that owns the sandbox."""

    def __init__(self, control: socket.socket, claim: socket.socket, pid: int) -> None:
        self.control = control
        self._claim = claim
        self.pid = pid
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it is gone; the first message will fail
            self._handle = os.pidfd_open(pid)

    def close(self) -> None:
        """Close the socket, upon which the worker kills what it runs and ends."""
        self.control.close()
        self._claim.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def kill(self) -> None:
        """Kill the worker."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self.close()


def receive_answer(connection: socket.socket, sender: str) -> dict[str, Any]:
    """Return the next message.

    Raises:
        LostError: No message comes, or it reports a problem.
    """
    try:
        message = connection.recv(LARGEST_MESSAGE)
    except OSError as error:
        raise LostError(f"{sender} does not answer: {error}") from error
    if not message:
        raise LostError(f"{sender} ended")
    answer: dict[str, Any] = json.loads(message)
    if "problem" in answer and len(answer) == 1:
        raise LostError(f"{sender}: {answer['problem']}")
    return answer
