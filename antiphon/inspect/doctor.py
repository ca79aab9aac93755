"""Describe this machine: versions, hardware, and optional packages that are missing."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from antiphon import __version__
from antiphon.cluster.devices import cpu_multiply_rate
from antiphon.core.optional_packages import how_to_install, list_extras

# vLLM's dependencies are not ours, so it is in no extra.
VLLM = "not installed here: it belongs in an environment of its own, which engine.python names"


def describe_software() -> dict[str, str]:
    """Return the versions of Python, of Antiphon and of the packages it needs."""
    rows = {"python": platform.python_version(), "antiphon": __version__}
    for name in ("torch", "transformers", "datasets", "numpy"):
        rows[name] = _find_version(name) or f"missing: pip install {name}"
    return rows


def describe_hardware() -> dict[str, str]:
    """Return the CPUs, memory, shared memory and CUDA devices that this process may use, and how fast a CPU multiplies."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shared = Path("/dev/shm")
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return {
        "CPUs of this process": str(len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()),
        "memory": f"{memory / 2**30:.1f} GiB",
        "shared memory": f"{shutil.disk_usage(shared).free / 2**30:.1f} GiB free" if shared.is_dir() else "none",
        "CUDA devices": _describe_cuda(),
        "matrix products": _describe_products(),
    }


def describe_optional() -> dict[str, str]:
    """Return the versions of optional packages, or how to install them."""
    found = {name: _find_version(name) or f"not installed: {how_to_install(name)}" for name in list_extras()}
    return {**found, "vllm": _find_version("vllm") or VLLM}


def _find_version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _describe_products() -> str:
    if _find_version("torch") is None:
        return "unknown without torch"
    rates = {dtype: cpu_multiply_rate(dtype) / 1e9 for dtype in ("float32", "bfloat16")}
    return "on one CPU thread, " + ", ".join(f"{dtype} {rate:.3g}" for dtype, rate in rates.items()) + " GFLOP/s"


def _describe_cuda() -> str:
    if _find_version("torch") is None:
        return "unknown without torch"
    import torch

    if not torch.cuda.is_available():
        return "none"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
