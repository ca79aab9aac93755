"""The ranks of a learner and how they are laid out, and the collectives that gradients pass through.

    pipeline    layers, stage after stage
    replicate   copies of all that is sharded, each with packs of its own
    shard       parameters, gradients and optimiser state (FSDP), each rank with packs of its own
    context     the tokens of a pack; parameters and so on are sharded among these ranks, too
    expert      the innermost part of `mesh.shard`: the same, but that experts are divided as they are
    tensor      attention heads, feed-forward columns, the vocabulary

Axes further down have the ranks that are closer to each other. Ranks that differ in their place on `replicate`, `shard` or
`expert` compute other packs; those that do not compute the same packs together.
"""

import fcntl
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from antiphon.core.config import set_environment
from antiphon.learning.mesh_config import MeshConfig
from antiphon.weights.listeners import ListeningSockets
from antiphon.weights.rendezvous import RunStore

T = TypeVar("T")

AXES = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
TIMEOUT = timedelta(minutes=30)  # of one collective
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # asks Linux for the address of an interface


class Mesh:
    """This rank of a mesh. All ranks enter at the same time."""

    def __init__(self, config: MeshConfig, rank: int, store: Any, device: torch.device) -> None:
        self.config = config
        self.rank = rank
        self.device = device
        self._store = store  # torch keeps only what is below it
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        sizes = {axis: getattr(config, axis) for axis in AXES} | {"shard": config.shard // config.expert}
        listeners = ListeningSockets()
        with listeners.track():  # gloo's: NCCL opens its own when it is first used
            distributed.init_process_group(backend, store=store, rank=rank, world_size=config.world, timeout=TIMEOUT)
            self.axes = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=AXES)
            self.axes["shard", "context", "expert"]._flatten("sharded")
            self.axes["shard", "context"]._flatten("around")  # which have the same experts
        listeners.refuse_connections()
        self.data = config.data_rank(rank)

    @property
    def host(self) -> str:
        """The address of this machine at which the other ranks reach it."""
        own: str = self._store.own_host()
        return own

    def group(self, axis: str) -> Any:
        """Return the group of this rank and those that differ from it on one axis alone."""
        return self.axes[axis].get_group()

    def coordinate(self, axis: str) -> int:
        """Return the coordinate of this rank on an axis."""
        return int(self.axes[axis].get_local_rank())

    def all_gather(self, own: T, axis: str = "") -> list[T]:
        """Return the objects of all ranks, or of those that differ from this one on one axis alone."""
        group = self.group(axis) if axis else None
        told: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(told, own, group=group)
        return told

    def all_reduce(self, values: Sequence[float]) -> list[float]:
        """Return sums of values over all ranks."""
        sums = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found


def connect_store(address: str) -> Any:
    """Connect to the store at an address of `open_store`; collectives use the network interface that reaches it."""
    store = RunStore(address, TIMEOUT)
    if name := _interface(store.own_host()):
        set_environment(GLOO_SOCKET_IFNAME=name, NCCL_SOCKET_IFNAME=name)
    return store


def _interface(here: str) -> str:
    """Return the name of the interface with an address of this machine; empty where the system does not tell."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            with suppress(OSError):  # it has no address of this kind
                told = fcntl.ioctl(any_socket, SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(told[20:24]) == here:
                    return name
    return ""


# --- collectives with a backward ---------------------------------------------------------------------------------------


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_reduce_sum(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        return all_reduce_sum(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0].chunk(ctx.group.size())[ctx.group.rank()], None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, leave: Sequence[int], come: Sequence[int]) -> torch.Tensor:
        ctx.back = group, come, leave
        result = x.new_empty(sum(come), *x.shape[1:])
        distributed.all_to_all_single(result, x.contiguous(), list(come), list(leave), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Exchanged.apply(gradients[0], *ctx.back), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Gathered.apply(gradients[0], ctx.group), None


def all_reduce_sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum over a group, without gradient."""
    x = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(x, group=group)
    return x


def copy_to_group(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Pass a tensor that all ranks of a group have to where each computes a part; its gradient is the sum over ranks."""
    found: torch.Tensor = _Copied.apply(x, group)
    return found


def reduce_from_group(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum the parts that the ranks of a group computed; each part's gradient is that of the sum."""
    found: torch.Tensor = _Summed.apply(x, group)
    return found


def split_to_group(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's share of the rows [n, …] of a tensor that all ranks of a group have; the gradient is that of all."""
    found: torch.Tensor = _Split.apply(x, group)
    return found


def gather_from_group(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Concatenate the rows [n, …] of the ranks of a group; each rank gets the gradient of its own rows."""
    found: torch.Tensor = _Gathered.apply(x, group)
    return found


def all_to_all_rows(x: torch.Tensor, group: Any, leave: Sequence[int], come: Sequence[int]) -> torch.Tensor:
    """Exchange rows with the ranks of a group.

    Args:
        x: Rows, ordered by the rank they go to.
        group: The ranks.
        leave: Number of rows for each rank.
        come: Number of rows from each rank.
    """
    found: torch.Tensor = _Exchanged.apply(x, group, leave, come)
    return found
