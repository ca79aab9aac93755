"""Profiles of the processes of a run: whoever has workers begins their profiles and has them written."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from antiphon.core.errors import WorkerDiedError
from antiphon.core.workers import WorkerHandle


class Profiled(Protocol):
    """Processes that can be profiled."""

    async def start_profile(self, memory: bool) -> None:
        """Begin to profile each process; `memory`: also record the allocations on its GPU, if it has one."""

    async def write_profile(self, folder: Path, prefix: str) -> None:
        """Write what was profiled since, a file a process; `prefix` begins the names of the files."""


@dataclass(frozen=True, slots=True)
class ProfiledHandles:
    """The workers behind handles, each a `core.torch_profile.ProfiledWorker`; those that die are left out."""

    handles: Callable[[], Iterable[WorkerHandle]]

    async def start_profile(self, memory: bool) -> None:
        """Begin to profile each worker."""
        await asyncio.gather(*(_call(handle, "start_profile", memory) for handle in self.handles()))

    async def write_profile(self, folder: Path, prefix: str) -> None:
        """Write the profile of each worker into files with its name, after the prefix."""
        calls = (_call(handle, "write_profile", folder, prefix + handle.name) for handle in self.handles())
        await asyncio.gather(*calls)


async def _call(handle: WorkerHandle, method: str, *args: Any) -> None:
    with suppress(WorkerDiedError):  # whoever owns the worker replaces it, or ends the run
        await handle.call(method, *args)
