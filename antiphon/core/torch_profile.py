"""The profile of a worker's process, by torch's profiler; imports torch when it begins."""

import threading
from pathlib import Path
from typing import Any

from antiphon.core.workers import Worker

_profiled = threading.Lock()  # held while this process is profiled


class TorchProfile:
    """All operations of all threads of this process, from now on; with `memory` also the allocations on its GPU."""

    def __init__(self, memory: bool) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        self._torch: Any = torch
        self._memory = memory and torch.cuda.is_available() and torch.cuda.is_initialized()
        if self._memory:
            torch.cuda.memory._record_memory_history()
        self._profile = torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        self._profile.start()

    def write(self, folder: Path, name: str) -> None:
        """End the profile; write `name`.json.gz, a Chrome trace, into a folder, and with memory `name`.memory.pickle."""
        self._profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{name}.json.gz"))
        if self._memory:
            self._torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
            self._torch.cuda.memory._record_memory_history(enabled=None)


class ProfiledWorker(Worker):
    """A worker whose process can be profiled. Of several in one process, the first to begin has the profile of all."""

    _profile: TorchProfile | None = None

    def start_profile(self, memory: bool) -> None:
        """Begin to profile this process."""
        if _profiled.acquire(blocking=False):
            self._profile = TorchProfile(memory)

    def write_profile(self, folder: Path, name: str) -> None:
        """Write the profile that has begun, if one has, into files with this name."""
        if self._profile is not None:
            self._profile.write(folder, name)
            self._profile = None  # which holds all that it recorded
            _profiled.release()
