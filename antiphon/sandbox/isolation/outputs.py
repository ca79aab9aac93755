"""Reads what a program writes while it runs, and turns its worker's report into a `Result`."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from antiphon.sandbox.base import Level, Limits, Result, Status, Usage
from antiphon.sandbox.isolation.zygote_client import LostError, WorkerClient, receive_answer

GRACE_SECONDS = 30.0  # beyond a program's own time; after that its worker counts as lost
_ENDED_BY_ITSELF = (Status.OK, Status.ERROR, Status.MEMORY)


@dataclass(slots=True)
class OutputPipes:
    """The pipes that take a program's standard output and standard error."""

    read_ends: list[int] = field(default_factory=list)
    write_ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(2):
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            self.read_ends.append(reader)
            self.write_ends.append(writer)

    def close_write_ends(self) -> None:
        """Close the program's ends here, so that reading can reach the end of the stream."""
        while self.write_ends:
            os.close(self.write_ends.pop())

    def close(self) -> None:
        """Close all ends."""
        self.close_write_ends()
        while self.read_ends:
            os.close(self.read_ends.pop())

    def collect(self, worker: WorkerClient, limits: Limits) -> tuple[dict[str, Any], bytes, bytes]:
        """Read both streams until the worker reports the end of the program.

        A program that writes more than `limits.output` bytes to one stream is stopped.

        Returns:
            The worker's report, standard output and standard error.
        """
        kept = {descriptor: bytearray() for descriptor in self.read_ends}
        poll, control = select.poll(), worker.control.fileno()
        for descriptor in (*kept, control):
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + limits.seconds + GRACE_SECONDS
        while True:
            ready = [descriptor for descriptor, _ in poll.poll(max(0.0, deadline - time.monotonic()) * 1000)]
            if not ready:
                raise LostError("the worker does not answer")
            too_long = False
            for descriptor in ready:
                if descriptor != control and not _read_available(descriptor, kept[descriptor], limits.output):
                    poll.unregister(descriptor)
                    too_long = too_long or len(kept[descriptor]) > limits.output
            if control in ready:
                report = receive_answer(worker.control, "the worker")
                for descriptor, content in kept.items():
                    while _read_available(descriptor, content, limits.output):
                        pass
                stdout, stderr = map(bytes, kept.values())
                return report, stdout, stderr
            if too_long:
                with contextlib.suppress(OSError):
                    worker.control.send(b"stop")


def _read_available(descriptor: int, kept: bytearray, limit: int) -> bool:
    """Append what can be read now to `kept`; return False at the end of the stream or beyond the limit."""
    if len(kept) > limit:
        return False
    try:
        content = os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return False
    kept += content
    return bool(content) and len(kept) <= limit


def make_result(report: Mapping[str, Any], stdout: bytes, stderr: bytes, limits: Limits, level: Level) -> Result:
    """Return the result of a program from its worker's report and its output."""
    if report["problem"]:
        return Result(
            status=Status.REFUSED, level=level, detail=f"the program could not be started: {report['problem']}"
        )
    out, err = (text[: limits.output].decode("utf-8", "replace") for text in (stdout, stderr))
    too_long = max(len(stdout), len(stderr)) > limits.output
    status, detail = _classify_end(report, limits, too_long, err)
    return Result(
        status=status,
        level=level,
        exit_code=report["code"] if status in _ENDED_BY_ITSELF and report["code"] >= 0 else None,
        stdout=out,
        stderr=err,
        usage=Usage(seconds=report["seconds"], cpu_seconds=report["cpu_seconds"], peak_memory=report["peak_memory"]),
        detail=detail,
    )


def _classify_end(report: Mapping[str, Any], limits: Limits, too_long: bool, stderr: str) -> tuple[Status, str]:
    """Return the status and detail of a program's end, from what the kernel reported."""
    code = report["code"]
    if too_long:
        return Status.OUTPUT_LIMIT, f"more than {limits.output} bytes"
    if report["cause"] == "deadline":
        return Status.TIMEOUT, f"after {limits.seconds:g} s"
    if report["cause"] == "stopped":
        return Status.REFUSED, "stopped"
    if code == 0:
        return Status.OK, ""
    if report["memory_kills"]:
        return Status.MEMORY, f"more than {limits.memory} bytes in all its processes"
    if code > 0:
        out_of_memory = code == 1 and stderr.rstrip().rpartition("\n")[2].partition(":")[0] == "MemoryError"
        return (Status.MEMORY, "MemoryError") if out_of_memory else (Status.ERROR, f"exit code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
    if -code == signal.SIGXCPU or (-code == signal.SIGKILL and report["cpu_seconds"] >= limits.cpu_seconds):
        return Status.TIMEOUT, f"after {limits.cpu_seconds:g} s of processor time"
    return Status.KILLED, f"signal {name}"
