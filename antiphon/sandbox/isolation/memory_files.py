"""Sealed files in memory, with which one process passes data to another."""

import fcntl
import marshal
import os
from collections.abc import Mapping
from typing import Any


def payload_file(program: str, files: Mapping[str, bytes]) -> Any:
    """Return a memory file with a program and its files, for a worker."""
    return memory_file(marshal.dumps((program, dict(files))))


def memory_file(content: bytes) -> Any:
    """Return a memory file that holds `content` and can no longer be changed, positioned at its start."""
    descriptor = os.memfd_create("input", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115 - the caller closes it
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
    file.seek(0)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    )
    return file
