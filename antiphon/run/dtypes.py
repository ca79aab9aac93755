"""Dtypes of learner and engines: what `auto` stands for, and those that this machine's CPU multiplies slower than float32."""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from typing import TypeVar

from antiphon.cluster.base import Place
from antiphon.cluster.devices import cpu_multiply_rate, gpus_have_bfloat16, is_cpu
from antiphon.cluster.placement import Placement
from antiphon.core.config import load
from antiphon.engines.config import SERVER_KINDS, EngineConfig, EngineKind
from antiphon.learning.config import LearnerConfig
from antiphon.record.run_dir import RunDirectory
from antiphon.run.config import RunConfig
from antiphon.run.config_checks.common import iterate_engines

AUTO = "auto"
NOTICEABLE = 1.2  # times slower or faster; less is noise
Model = TypeVar("Model", LearnerConfig, EngineKind, EngineConfig)
Rate = Callable[[str], float]  # of products of a dtype on this CPU, in operations a second
Report = Callable[[str], None]


def choose_dtype(
    model: Model,
    key: str,
    report: Report,
    places: Sequence[Place] = (),
    *,
    local: bool = True,
    rate: Rate = cpu_multiply_rate,
) -> Model:
    """Return the settings of a model with a dtype in the place of `auto`: the fastest of its device.

    A vLLM engine is left alone: there, `auto` is the dtype of the checkpoint.

    Args:
        model: Settings of a learner or of an engine.
        key: Their key, for the message.
        report: Called with a message that says what was chosen, and why.
        places: Devices that the model is given by `placement`, if any.
        local: All devices are of this machine. If not, bfloat16 is chosen for GPUs and float32 for CPUs.
        rate: Returns the operations a second of this CPU in products of a dtype.
    """
    if model.dtype != AUTO or (isinstance(model, EngineKind) and model.kind != "native"):
        return model
    on_cpu = _is_on_cpu(model.device, places)
    if not local:
        dtype, kind = ("float32", "CPUs") if on_cpu else ("bfloat16", "GPUs")
        reason = f"the {kind} of a cluster are not measured"
    elif on_cpu:
        times = rate("bfloat16") / rate("float32")
        dtype = "bfloat16" if times > NOTICEABLE else "float32"
        reason = f"bfloat16 is {times:.2g} times as fast as float32 on this CPU"
    else:
        dtype = "bfloat16" if gpus_have_bfloat16() else "float32"
        reason = f"this machine has {'a' if dtype == 'bfloat16' else 'no'} GPU that computes in bfloat16"
    report(f"{key}.dtype: auto is {dtype}: {reason}")
    return model.model_copy(update={"dtype": dtype})


def choose_engine_dtypes(
    config: EngineConfig,
    report: Report,
    places: Sequence[Place] = (),
    *,
    local: bool = True,
    rate: Rate = cpu_multiply_rate,
) -> EngineConfig:
    """Return the settings of a pool with dtypes in the places of `auto`; see `choose_dtype`."""
    first = choose_dtype(config, "engine", report, places, local=local, rate=rate)
    also = [
        choose_dtype(kind, f"engine.also.{number}", report, places, local=local, rate=rate)
        for number, kind in enumerate(config.also)
    ]
    return first.model_copy(update={"also": tuple(also)})


def choose_dtypes(config: RunConfig, placement: Placement, report: Report, rate: Rate = cpu_multiply_rate) -> RunConfig:
    """Return `config` with dtypes in the places of `auto`; see `choose_dtype`. Report dtypes that are slow here."""
    rate = cache(rate)  # measured once
    report_slow_dtypes(config, placement, report, rate)
    return _choose(config, placement, report, rate, local=config.cluster.one_machine)


def choose_dtypes_of_gpus(config: RunConfig, report: Report) -> RunConfig:
    """Return `config` with the dtypes that `auto` is on GPUs that are not here."""
    gpu = (Place(gpus=("0",)),)
    return _choose(config, Placement(places={"learner": gpu, "engine": gpu}), report, local=False)


def _choose(
    config: RunConfig, placement: Placement, report: Report, rate: Rate = cpu_multiply_rate, *, local: bool
) -> RunConfig:
    learner = choose_dtype(config.learner, "learner", report, placement.known_places("learner"), local=local, rate=rate)
    engine = choose_engine_dtypes(config.engine, report, placement.known_places("engine"), local=local, rate=rate)
    return config.model_copy(update={"learner": learner, "engine": engine})


def keep_dtypes(config: RunConfig) -> RunConfig:
    """Return the `config` of a run to resume, with the dtypes that the run began with in the places of `auto`."""
    before = load(RunDirectory.resume(config.record.directory, config.name).config, model=RunConfig)
    also = [
        _with_dtype_of(kind, old)
        for kind, old in zip_longest(config.engine.also, before.engine.also)
        if kind is not None
    ]
    engine = _with_dtype_of(config.engine, before.engine).model_copy(update={"also": tuple(also)})
    return config.model_copy(update={"learner": _with_dtype_of(config.learner, before.learner), "engine": engine})


def _with_dtype_of(model: Model, before: LearnerConfig | EngineKind | None) -> Model:
    if model.dtype != AUTO or before is None or before.kind != model.kind:
        return model
    return model.model_copy(update={"dtype": before.dtype})


def report_slow_dtypes(config: RunConfig, placement: Placement, report: Report, rate: Rate = cpu_multiply_rate) -> None:
    """Report each dtype of a learner or engine on this CPU with which the run is slower than with float32.

    A CPU without instructions for bfloat16 or float16 converts the numbers of a matrix product one by one. The rates are
    measured, since a system may hide instructions that the processor has. On a cluster nothing is reported: models may be on
    other machines.

    Args:
        config: The run's configuration.
        placement: Devices of its roles.
        report: Called with each message.
        rate: Returns the operations a second of this CPU in products of a dtype.
    """
    if not config.cluster.one_machine:
        return
    models: list[tuple[str, LearnerConfig | EngineKind]] = [("learner", config.learner), *iterate_engines(config)]
    for key, model in models:
        places = placement.known_places(key.partition(".")[0])
        if model.dtype not in ("bfloat16", "float16") or model.kind in SERVER_KINDS:
            continue
        if _is_on_cpu(model.device, places) and (ratio := rate("float32") / rate(model.dtype)) > NOTICEABLE:
            report(f"{key}.dtype: on this CPU {model.dtype} is {ratio:.1f} times slower than float32")


def _is_on_cpu(device: str, places: Sequence[Place]) -> bool:
    if device == AUTO and places:
        return not any(place.gpus for place in places)
    return is_cpu(device)
