"""Assigns GPUs to worker processes of graders."""

from collections.abc import Sequence


class GpuAssigner:
    """Assigns one GPU to each worker process, so that models on "cuda" spread over all GPUs.

    A process with a model on "cuda" uses the first GPU that it sees. If all processes saw all GPUs, all models would be on
    the same one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Create an assigner of GPUs with these names in CUDA_VISIBLE_DEVICES; there may be none."""
        self._processes = dict.fromkeys(names, 0)  # number by GPU

    def acquire(self) -> str:
        """Return the GPU that the fewest processes see; an empty string if there is none."""
        gpu = min(self._processes, key=self._processes.__getitem__, default="")
        if gpu:
            self._processes[gpu] += 1
        return gpu

    def release(self, gpu: str) -> None:
        """Count one process less on a GPU; an empty string stands for none."""
        if gpu:
            self._processes[gpu] -= 1
