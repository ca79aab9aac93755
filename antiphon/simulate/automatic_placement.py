"""`placement: auto`: the division of this machine's devices that a simulation finds to be the fastest."""

from collections.abc import Callable

from antiphon.cluster.devices import this_machine
from antiphon.core.config import load
from antiphon.run.config import RunConfig
from antiphon.simulate.device_split import split_devices
from antiphon.simulate.model_facts import read_model_facts
from antiphon.simulate.probe import speeds_path
from antiphon.simulate.speed_estimate import estimate, measure_this_machine
from antiphon.simulate.speeds import Speeds


def place_automatically(config: RunConfig, report: Callable[[str], None] = print) -> RunConfig:
    """Return `config` with this machine's GPUs, or its cores if it has none, divided between the learner and the engines.

    Args:
        config: The run.
        report: Called with a line that says how they are divided, and from which speeds: those that `antiphon plan --probe`
            measured for this run, or else estimates from the size of the model.

    Raises:
        ConfigError: The devices are too few, or the run cannot be planned on them.
    """
    measured = speeds_path(config)
    if measured.is_file():
        speeds, source = load(measured, model=Speeds), f"speeds in {measured}"
    else:
        speeds = estimate(config, read_model_facts(config), measure_this_machine(config))
        source = "sizes alone; `antiphon plan --probe --devices` measures speeds"
    placed, split = split_devices(config, speeds, this_machine())
    report(f"placement: {split} (learner {placed.placement.learner}; engines {placed.placement.engine}), from {source}")
    return placed
