"""Copies the declarations of a user's own advantage and loss into the configuration of the run.

Reading a configuration imports no code that it names, so these declarations are read when the run starts.
"""

from antiphon.algorithms.declarations import declaration_of
from antiphon.algorithms.registry import ADVANTAGES, LOSSES
from antiphon.core.errors import ConfigError, ValidatorError
from antiphon.core.types import STREAMS
from antiphon.run.config import RunConfig
from antiphon.run.config_checks.algorithms import check_advantage, check_critics


def add_declared_needs(config: RunConfig) -> RunConfig:
    """Return the configuration with the streams that the user's functions need in `algorithm.streams`.

    Raises:
        ConfigError: A function cannot be imported, or the run lacks something that it declares.
    """
    algorithm = config.algorithm
    advantage = declaration_of(ADVANTAGES.resolve(algorithm.advantage))
    loss = declaration_of(LOSSES.resolve(algorithm.loss))
    models = ("reference", "policy", "critics")
    needs = [
        spec.name
        for spec in (*advantage.needs, *loss.needs)
        if STREAMS.get(spec.name, spec).producer in models and spec not in algorithm.required_streams
    ]
    if needs:
        streams = tuple(dict.fromkeys((*algorithm.streams, *needs)))
        config = config.model_copy(update={"algorithm": algorithm.model_copy(update={"streams": streams})})
    if problems := [*check_advantage(config, advantage), *check_critics(config)]:
        raise ConfigError.from_mistakes(ValidatorError(problems).mistakes)
    return config
