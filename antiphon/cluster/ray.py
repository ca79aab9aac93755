"""Workers as Ray actors. The only module that imports ray.

The controller is the driver. Each worker runs in a thread of an actor's process: `post` puts a message into its inbox, and
`pull` waits for its messages. One `pull` is always pending. An event therefore arrives as soon as it is sent, and the death of
the actor fails that `pull` at once, so neither polling nor heartbeats are needed.
"""

import asyncio
import os
import pickle
import queue
import signal
import socket
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from antiphon.cluster.base import Gpu, Node, Place
from antiphon.cluster.calls import GRACE, Handle, Inbox, serve
from antiphon.cluster.config import ClusterConfig
from antiphon.cluster.devices import bind_process, gpu_class, this_machine
from antiphon.core.config import add_environment, set_environment, set_visible_gpus
from antiphon.core.errors import ConfigError, UnsupportedError, WorkerDiedError
from antiphon.core.objects import pack_objects, receive_objects
from antiphon.core.optional_packages import how_to_install
from antiphon.core.processes.own_process import open_log, redirect_output
from antiphon.core.registry import import_path
from antiphon.core.workers import Worker

_ACCELERATOR = "accelerator_type:"  # prefix of a GPU class among a node's resources
PULL = "pull"  # concurrency group of `WorkerActor.pull`, which must not block `WorkerActor.post`

CONNECT_SECONDS = 5.0  # for a Ray cluster to answer
RESERVE_SECONDS = 10.0  # for Ray to reserve a run's devices
RESERVATION_SECONDS = 60.0  # for the actor that reserves a GPU to start, or restart on a node that came back
NODE_SHARE = 0.001  # of a node's own resource; a bundle that asks for it is placed on that node
LOOPBACK = "127.0.0.1"


class RayCluster:
    """Spawns actors on this machine and on other nodes of a Ray cluster."""

    def __init__(self, config: ClusterConfig, logs: Path | None = None) -> None:
        """Connect to the Ray cluster at `config.address`, or start one. An existing connection of this process is kept.

        Each actor writes what it prints to `<logs>/<name>.log`; without `logs`, Ray prints it here.
        """
        self._ray, self._connected = _connect(config.address, show_output=logs is None)
        self._logs = logs
        self._env = config.env
        self._handles: list[RayHandle] = []
        self._given: Counter[str] = Counter()  # number of workers started on each node
        self._seen: dict[str, Node] = {}  # the other nodes as they were last, by name, in the order in which they came
        self._joined = bool(config.address)
        self._groups: list[Any] = []  # placement groups, of what is reserved
        self._held: set[tuple[str, str | int]] = (
            set()
        )  # what they have: names of nodes, and of GPUs or numbers of cores
        self._holders: dict[tuple[str, str], Any] = {}  # by names of node and GPU
        self._here = self._ray.get_runtime_context().get_node_id()

    def nodes(self) -> list[Node]:
        """Return this machine, then Ray's other nodes with the devices that Ray knows of.

        A node that has left keeps its number, and so do its devices, in case a node of its name comes back.
        """
        known = self._ray.nodes()
        here = next(node["NodeName"] for node in known if node["NodeID"] == self._here)
        there = {node["NodeName"]: _make_node(node["NodeID"], node["Resources"]) for node in known if node["Alive"]}
        for name in sorted({node["NodeName"] for node in known} - {here}):
            self._seen[name] = there.get(name) or replace(self._seen.get(name, Node()), id="", has_left=True)
        return [replace(this_machine(), id=self._here), *self._seen.values()]

    async def reserve(self, places: Collection[Place]) -> None:
        """Reserve devices in one placement group, with an actor for each GPU that knows the GPU's name.

        A Ray cluster that this process started has no other jobs, so nothing is reserved there.
        """
        if not self._joined:
            return
        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        # By name, which a node has again when it is back, and Ray's groups with it.
        held = {(nodes[place.node]["NodeName"], each): place.node for place in places for each in _device_keys(place)}
        new = sorted(held.keys() - self._held, key=str)
        gpus = [(held[name, gpu], name, gpu) for name, gpu in new if isinstance(gpu, str)]
        cores = Counter(held[name, core] for name, core in new if isinstance(core, int))
        asked = [(node, {"GPU": 1}) for node, _, _ in gpus] + [(node, {"CPU": count}) for node, count in cores.items()]
        if not asked:
            return
        bundles = [bundle | {f"node:{nodes[node]['NodeManagerAddress']}": NODE_SHARE} for node, bundle in asked]
        group = self._ray.util.placement_group(bundles)
        try:
            await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), RESERVE_SECONDS)
        except TimeoutError as error:
            self._ray.util.remove_placement_group(group)
            raise ConfigError(self._describe_shortage(asked), key="placement") from error
        self._groups.append(group)
        self._held |= {*new}
        holder = self._ray.remote(num_gpus=1, num_cpus=0, max_restarts=-1, max_task_retries=-1)(GpuReservation)
        within = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for number, (_, name, gpu) in enumerate(gpus):
            self._holders[name, gpu] = holder.options(scheduling_strategy=within(group, number)).remote()

    def _describe_shortage(self, asked: Sequence[tuple[str, Mapping[str, int]]]) -> str:
        wanted = Counter((node, kind) for node, bundle in asked for kind in Counter(bundle).elements())
        numbered = ((node["NodeID"], node["NodeName"]) for node in self._ray.nodes())  # some may have left meanwhile
        order = list(self._seen)
        numbers = {node: 1 + order.index(name) for node, name in numbered if name in order} | {self._here: 0}
        free = self._ray._private.state.available_resources_per_node()  # Ray has no public function for this
        missing = [
            f"{count} {kind}s of node{numbers[node]}, where {free.get(node, {}).get(kind, 0):g} are free"
            for (node, kind), count in wanted.items()
        ]
        return (
            f"Ray could not reserve within {RESERVE_SECONDS:g} s: {'; '.join(missing)}. Others hold the rest, or Ray was not "
            "told of it (ray start --num-gpus, --num-cpus)"
        )

    def spawn(self, name: str, factory: str, *args: Any, python: str = "", place: Place | None = None) -> "RayHandle":
        """Start an actor. Must be called on the event loop's thread. All actors run with Ray's interpreter."""
        if python:
            message = f"worker {name} needs another interpreter ({python}): use cluster.kind = local"
            raise UnsupportedError(message, key="cluster.kind", value="ray")
        log = None if self._logs is None else (self._logs / f"{name}.log").absolute()
        place = place or Place()
        holders = self._reservations_of(name, place)
        node = self._least_loaded_node() if place.anywhere else place.node or self._here
        strategies = self._ray.util.scheduling_strategies
        where = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        # No CPUs: a worker takes its threads from its own configuration and must not wait for another to end. Ray, and so `ps`,
        # names an actor after its class.
        actor = self._ray.remote(num_cpus=0, concurrency_groups={PULL: 1})(type(name, (WorkerActor,), {}))
        known = actor.options(name=f"{name}-{uuid4().hex}", scheduling_strategy=where)
        order = pickle.dumps((self._env, pack_objects(), factory, args))
        host = known.remote(sys.path, os.getcwd(), log, place, holders, order)
        handle = RayHandle(name, self._ray, host, log)
        self._handles.append(handle)
        self._given[node] += 1
        return handle

    def _reservations_of(self, name: str, place: Place) -> list[Any]:
        """Return the reservations of a place's GPUs, if any. A node that came back is found by its name."""
        if not self._holders:
            return []
        names = {node["NodeID"]: node["NodeName"] for node in self._ray.nodes()}
        try:
            return [self._holders[names[place.node], gpu] for gpu in place.gpus]
        except KeyError as error:  # GPU numbers changed because a node has left
            raise WorkerDiedError(f"worker {name} cannot run: its GPUs are not the reserved ones") from error

    def _least_loaded_node(self) -> str:
        """Return the node with the fewest started workers, this one if tied.

        Workers that died count as well: their node may be gone, which Ray takes a while to notice.
        """
        alive = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        return min(alive, key=lambda node: (self._given[node], node != self._here))

    async def close(self) -> None:
        """End all workers at the same time, release reservations, and stop Ray if it was started here."""
        try:
            await asyncio.gather(*(handle.close() for handle in self._handles))
        finally:
            for group in self._groups:
                self._ray.util.remove_placement_group(group)  # and what is in it
            if self._connected:
                self._ray.shutdown(wait_for_processes=True)


class RayHandle(Handle):
    """The controller's end of one actor."""

    def __init__(self, name: str, ray: Any, host: Any, log: Path | None) -> None:
        super().__init__(name, log)
        self._ray = ray
        self._host = host
        self._pull()

    def kill(self) -> None:
        """Kill the actor."""
        self._ray.kill(self._host)

    async def _stop(self) -> None:
        self._put(None)
        await asyncio.wait({self._death}, timeout=GRACE)
        self._ray.kill(self._host)

    def _transmit(self, content: bytes) -> None:
        self._put(content)

    def _put(self, content: bytes | None) -> None:
        self._host.post.options(num_returns=0).remote(content)  # without an answer: if the actor is dead, `pull` fails

    def _pull(self) -> None:
        pending = self._host.pull.options(concurrency_group=PULL).remote()
        asyncio.wrap_future(pending.future(), loop=self._loop).add_done_callback(self._on_pulled)

    def _on_pulled(self, pulled: "asyncio.Future[list[bytes | None]]") -> None:
        if (error := pulled.exception()) is not None:
            self._end(f"worker {self.name} died: {_last_line(error)}{self._where}")
            return
        contents = pulled.result()
        if contents[-1] is not None:
            self._pull()  # under way while these are read
        for content in contents:
            # One by one, so that an error in a callback does not lose the messages after it.
            self._loop.call_soon(self._handle_message, content)

    def _handle_message(self, content: bytes | None) -> None:
        if content is not None:
            self._receive(content)
        else:
            self._ray.kill(self._host)
            self._end(f"worker {self.name} ended{self._where}")


class WorkerActor:
    """The actor: a worker in a thread, and its queues of messages."""

    def __init__(
        self, path: list[str], folder: str, log: Path | None, place: Place, holders: list[Any], worker: bytes
    ) -> None:
        """Set up the process and start the worker's thread.

        Args:
            path: The controller's import path.
            folder: The controller's working directory.
            log: File that takes what the process prints.
            place: Devices of the worker.
            holders: Reservations of its GPUs, which know their names.
            worker: Pickle of environment variables, attached objects, and the worker's factory and arguments; read when path
                and folder are set.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which closes its workers
        os.chdir(folder)
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        if log is not None:
            with open_log(log) as file:
                redirect_output(file.fileno())
        if place.cores or place.gpus:
            bind_process(place.cores, place.gpus)
        self._inbox: Inbox = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        env, objects, *life = pickle.loads(worker)
        add_environment(env)
        receive_objects(objects)
        if holders:  # asked in the worker's thread: an actor that fails here while it asks another one never ends
            life = f"{__name__}:{build_with_reserved_gpus.__name__}", (holders, *life)
        threading.Thread(target=self._live, args=life, name="worker", daemon=True).start()

    def post(self, message: bytes | None) -> None:
        """Send the worker a message; None ends it."""
        self._inbox.put(message)

    def pull(self) -> list[bytes | None]:
        """Wait for messages of the worker and return all there are; the last is None if it has ended."""
        messages = [self._outbox.get()]
        while not self._outbox.empty():  # nobody else takes from it
            messages.append(self._outbox.get())
        return messages

    def get_reference(self, name: str) -> list[Any]:
        """Return the reference to an object of the worker, in a list because Ray would resolve a bare reference."""
        return [_OBJECTS[name]]

    def _live(self, factory: str, args: tuple[Any, ...]) -> None:
        try:
            serve(factory, args, self._inbox, self._outbox.put)
        finally:
            self._outbox.put(None)


class GpuReservation:
    """An actor that reserves one GPU."""

    def gpu(self) -> str:
        """Return the GPU's name in CUDA_VISIBLE_DEVICES."""
        import ray

        (gpu,) = ray.get_gpu_ids()
        return str(gpu)


def build_with_reserved_gpus(holders: list[Any], factory: str, args: tuple[Any, ...]) -> Worker:
    """Build a worker that sees the reserved GPUs."""
    import ray

    try:
        set_visible_gpus(ray.get([holder.gpu.remote() for holder in holders], timeout=RESERVATION_SECONDS))
    except ray.exceptions.GetTimeoutError as error:
        raise WorkerDiedError(
            f"Ray did not report within {RESERVATION_SECONDS:g} s which GPUs are reserved for this worker"
        ) from error
    return import_path(factory, "worker")(*args)


_OBJECTS: dict[str, Any] = {}  # references to this process's objects in Ray's store, by name


def put_object(name: str, value: Any) -> str:
    """Put `value` into the object store under `name`, replacing the previous one; return its location for other workers."""
    import ray

    _OBJECTS[name] = ray.put(value)
    return f"{ray.get_runtime_context().get_actor_name()}/{name}"


def get_object(where: str) -> Any:
    """Return another worker's object. An array that is on this node already is not copied."""
    import ray

    host, _, name = where.rpartition("/")
    (kept,) = ray.get(ray.get_actor(host).get_reference.remote(name))
    return ray.get(kept)


def _device_keys(place: Place) -> tuple[str | int, ...]:
    return *place.gpus, *place.cores


def _make_node(name: str, resources: Mapping[str, float]) -> Node:
    """Return the devices of a Ray node. Ray does not know the numbers of cores, so they count from 0."""
    kinds = [key.removeprefix(_ACCELERATOR) for key in resources if key.startswith(_ACCELERATOR)]
    kind = gpu_class(kinds[0]) if kinds else ""
    gpus = tuple(Gpu(id=str(number), kind=kind) for number in range(int(resources.get("GPU", 0))))
    return Node(id=name, cores=tuple(range(int(resources.get("CPU", 0)))), gpus=gpus)


def _connect(address: str, *, show_output: bool) -> tuple[Any, bool]:
    """Return the package `ray`, connected, and whether this call connected it."""
    if not address:
        set_environment(
            RAY_USAGE_STATS_ENABLED="0",  # no telemetry
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # keep 127.0.0.1, which Ray otherwise replaces by another address
            RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",  # do not hide GPUs from a worker that asked Ray for none
        )
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError as error:
        message = f"'ray' is not installed: {how_to_install('ray')}"
        raise ConfigError(message, key="cluster.kind", value="ray") from error
    local_options = {"num_cpus": 0, "num_gpus": 0, "include_dashboard": False, "_node_ip_address": LOOPBACK}
    found = address
    try:
        if address:
            found = address if ":" in address else _find_head(address)
            host, _, port = found.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()  # Ray itself would retry for minutes
        if ray.is_initialized():
            return ray, False
        if not address and ray.util.get_node_ip_address() != LOOPBACK:
            raise ConfigError(
                "Ray would listen to other machines, because it was imported before its environment was set: set "
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 yourself",
                key="cluster.kind",
                value="ray",
            )
        ray.init(
            address or "local", log_to_driver=show_output, logging_level="ERROR", **({} if address else local_options)
        )
    except (OSError, RuntimeError) as error:  # OSError: no connection; RuntimeError: another version of Ray
        cause = _last_line(error.__cause__ or error)
        where = f"{address or 'local'!r}" + (f", which is {found}" if found != address else "")
        message = f"cannot connect to Ray at {where}: {cause}"
        raise ConfigError(message, key="cluster.address", value=address) from error
    return ray, True


def _find_head(address: str) -> str:
    """Return host:port of `auto`: that of RAY_ADDRESS, of the last `ray start`, or of a Ray that runs here."""
    from ray._private.services import get_ray_address_from_environment

    found: str = get_ray_address_from_environment(address, None)
    return found


def _last_line(error: BaseException) -> str:
    """Return the last line of an error, where Ray states the cause."""
    return textwrap.shorten(str(error).strip().splitlines()[-1], 300)
