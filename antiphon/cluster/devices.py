"""The devices of one machine: which there are, and how a process is held to some of them."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.cluster.base import Gpu, Node, Place
from antiphon.core.config import set_visible_gpus, visible_gpus

_DRIVER = Path("/proc/driver/nvidia")


def this_machine() -> Node:
    """As far as this process may use it."""
    return Node(cores=tuple(sorted(os.sched_getaffinity(0))), gpus=_gpus())


def has_gpu_driver() -> bool:
    """Whether there may be GPUs. If not, torch need not be asked, and takes seconds to load."""
    return _DRIVER.is_dir()


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
    """Such as h800, of "NVIDIA H800 PCIe"."""
    match = re.search(r"[a-z]*\d+[a-z]*", name.lower())
    return match.group() if match else ""


def bind_process(cores: Sequence[int], gpus: Sequence[str]) -> None:
    """Hold this process, and the threads that it will start, to its place. Without GPUs it sees none."""
    if cores:
        os.sched_setaffinity(0, cores)
    set_visible_gpus(gpus)


def with_visible_gpus(place: Place, gpus: Sequence[str]) -> Place:
    """The place, with the names that its GPUs have in this process, which was given `gpus` and those alone: where they are
    reserved, Ray has the last word on which they are."""
    names = dict(zip(gpus, visible_gpus() or (), strict=False))
    return replace(place, gpus=tuple(names[gpu] for gpu in place.gpus))
