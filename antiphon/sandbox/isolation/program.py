"""The program process: gives up its rights one by one, then becomes the untrusted program.

It runs in a confined process: it imports the standard library and modules of this directory that do the same.
"""

import fcntl
import marshal
import math
import os
import resource
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from antiphon.sandbox.base import Level, Limits
from antiphon.sandbox.isolation import kernel, seccomp, users
from antiphon.sandbox.isolation.execution import execute
from antiphon.sandbox.isolation.protocol import FIRST_LINK, WorkerSetup

OPEN_FILES = 256  # descriptors that a program may have open


@dataclass(slots=True)
class ProgramProcess:
    """A freshly forked process that is about to become a program."""

    worker: WorkerSetup
    limits: Limits
    directory: str
    descriptors: list[int]  # the payload, three standard streams, and links to another program
    rules: list[int]  # Landlock rules; empty at level 1
    problem: int  # pipe that takes the reason if the program cannot be started
    links: list[int] = field(default_factory=list)

    def run(self) -> NoReturn:
        """Confine this process and run the program in it."""
        try:
            program = self._prepare()
        except BaseException as error:  # noqa: BLE001 - named boundary: whatever it is, the program must not run
            os.write(self.problem, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(1)
        for number, descriptor in enumerate(self.links, FIRST_LINK):
            os.dup2(descriptor, number)
        kernel.close_from(FIRST_LINK + len(self.links))
        execute(program)

    def _prepare(self) -> str:
        payload, *streams = self.descriptors
        setup = self.worker.zygote
        with open(payload, "rb") as file:
            program, files = marshal.load(file)
        os.setsid()
        for number, descriptor in enumerate(streams[:FIRST_LINK]):
            os.dup2(descriptor, number)
        # Their final numbers may still belong to descriptors that are needed until the end.
        self.links = [fcntl.fcntl(each, fcntl.F_DUPFD, OPEN_FILES // 2) for each in streams[FIRST_LINK:]]
        if self.worker.group:
            self.worker.group.join()
        resource_limits = self._resource_limits()  # while /proc can be read
        if setup.level >= Level.CONFINED:
            self._confine()
        else:
            kernel.forbid_privileges()
            kernel.drop_capabilities(keep=kernel.OF_FILES if os.getuid() == 0 else ())
        if setup.level >= Level.ISOLATED:
            os.mkdir("/tmp/shm")
            os.mkdir(self.directory)
        os.chdir(self.directory)
        for name, content in files.items():
            path = Path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        kernel.set_limits(resource_limits)
        resource.setrlimit(
            resource.RLIMIT_CPU, (math.ceil(self.limits.cpu_seconds), resource.getrlimit(resource.RLIMIT_CPU)[1])
        )
        if setup.seccomp or setup.level >= Level.CONFINED:
            seccomp.install_filter(setup.filter_program())
        return str(program)

    def _confine(self) -> None:
        """Allow only the program's own files, and drop all capabilities and, if root runs the sandbox, the user."""
        setup = self.worker.zygote
        kernel.forbid_privileges()
        for rules in self.rules:
            kernel.apply_landlock(rules)
        if setup.changes_user:
            private = setup.level < Level.ISOLATED and users.have_private_parents(setup.readable)
            kernel.change_user(self.worker.uid, keep=(kernel.READ_SEARCH,) if private else ())
        else:
            kernel.drop_capabilities()

    def _resource_limits(self) -> dict[int, int]:
        """Return the limits of the program. Reads /proc, which Landlock hides."""
        limits, setup = self.limits, self.worker.zygote
        values = {
            resource.RLIMIT_AS: self.worker.base_memory + limits.memory,
            resource.RLIMIT_CPU: math.ceil(limits.cpu_seconds) + 1,
            resource.RLIMIT_FSIZE: limits.file_size,
            resource.RLIMIT_NOFILE: OPEN_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
        }
        if setup.level >= Level.ISOLATED:
            values[resource.RLIMIT_NPROC] = limits.processes + 1  # the worker counts too
        elif uid := self.worker.uid if setup.changes_user else os.getuid():
            values[resource.RLIMIT_NPROC] = limits.processes + _count_threads(uid)
        return values


def _count_threads(uid: int) -> int:
    """Return how many threads a user has on this machine."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            count += len(os.listdir(process / "task")) if process.stat().st_uid == uid else 0
        except OSError:
            continue
    return count
