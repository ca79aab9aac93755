"""The devices of this machine, and how a process is bound to some of them."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.cluster.base import Gpu, Node, Place
from antiphon.core.config import set_visible_gpus, visible_gpus

_DRIVER = Path("/proc/driver/nvidia")


def this_machine() -> Node:
    """Return the cores and GPUs that this process may use."""
    return Node(cores=usable_cores(), gpus=_gpus())


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on: all of the machine where it cannot be bound to some."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def has_gpu_driver() -> bool:
    """Return True if an NVIDIA driver is loaded. Without one, torch, which takes seconds to import, need not be asked."""
    return _DRIVER.is_dir()


def is_cpu(device: str) -> bool:
    """Return True if `device`, a device of torch or `auto`, is the CPU on this machine."""
    return device == "cpu" or (device == "auto" and not has_gpu_driver())


def gpus_have_bfloat16() -> bool:
    """Return True if this machine has a GPU that computes in bfloat16."""
    import torch

    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def cpu_multiply_rate(dtype: str) -> float:
    """Return the operations a second that one thread of this CPU reaches in matrix products of `dtype`, such as bfloat16.

    The product is small: a CPU that has no instructions for the dtype may be a hundred times slower, and is still done in a
    moment.
    """
    import torch

    matrix, seconds, threads = torch.ones(256, 256, dtype=getattr(torch, dtype)), [], torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other where other processes use the cores
    for _ in range(4):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(threads)
    return 2 * 256**3 / min(seconds)


def _gpus() -> tuple[Gpu, ...]:
    if not has_gpu_driver():
        return ()
    import torch

    names = visible_gpus()
    return tuple(
        Gpu(id=names[number] if names else str(number), kind=gpu_class(torch.cuda.get_device_name(number)))
        for number in range(torch.cuda.device_count())
    )


def gpu_class(name: str) -> str:
    """Return the class of a GPU from its name, such as h800 for "NVIDIA H800 PCIe"."""
    match = re.search(r"[a-z]*\d+[a-z]*", name.lower())
    return match.group() if match else ""


def bind_process(cores: Sequence[int], gpus: Sequence[str]) -> None:
    """Bind this process and its future threads to cores, where the system can, and GPUs. If `gpus` is empty, it sees none."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    set_visible_gpus(gpus)


def with_visible_gpus(place: Place, gpus: Sequence[str]) -> Place:
    """Return a place with the names that its GPUs have in this process.

    Ray may assign other GPUs than the ones requested when it reserves them.

    Args:
        place: The place as it was requested.
        gpus: The names of all GPUs that this process was given, as requested.
    """
    names = dict(zip(gpus, visible_gpus() or (), strict=False))
    return replace(place, gpus=tuple(names[gpu] for gpu in place.gpus))
