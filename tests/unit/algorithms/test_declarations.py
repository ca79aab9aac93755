"""What advantages and losses declare, against what they do."""

import subprocess
import sys

import pytest

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import UNDECLARED, declaration_of
from antiphon.algorithms.examples import example
from antiphon.algorithms.registry import ADVANTAGES, LOSSES, built_in_declaration, resolve_streams
from antiphon.core.errors import ConfigError
from antiphon.core.types import VALUES
from tests.raising import raises_with


def undeclared(inputs, config):
    return -inputs.logprobs, {}


def estimate(name, *rewards):
    return ADVANTAGES.resolve(name)(example(rewards, values=[0.25]), AlgorithmConfig())[0]


def has_no_baseline_alone(name):
    try:
        return not estimate(name, 1.0)[0].any()
    except ZeroDivisionError:  # the mean of no others
        return True


@pytest.mark.parametrize("name", sorted(ADVANTAGES.known))
def test_grouped_advantages_need_siblings(name):
    """... all others but `reinforce_plus_plus`, which compares with the batch, have an advantage for a sample alone."""
    better, worse = estimate(name, 1.0, 0.0)
    needs_others = has_no_baseline_alone(name) and (better != worse).any()
    assert declaration_of(ADVANTAGES.resolve(name)).grouped == (needs_others and name != "reinforce_plus_plus")


@pytest.mark.parametrize("name", sorted(ADVANTAGES.known))
def test_advantages_read_only_declared_streams(name):
    function = ADVANTAGES.resolve(name)
    if VALUES in declaration_of(function).needs:
        with pytest.raises(KeyError):
            function(example([1.0, 0.0]), AlgorithmConfig())
    else:
        function(example([1.0, 0.0]), AlgorithmConfig())


def test_a_function_without_declaration_needs_nothing():
    assert declaration_of(undeclared) is UNDECLARED
    assert built_in_declaration(LOSSES, "no.such.module:loss") is UNDECLARED


def test_reading_declarations_imports_no_torch():
    script = (
        "import sys; from antiphon.algorithms.config import AlgorithmConfig; "
        "print(len(AlgorithmConfig.model_validate('ppo').required_streams), 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["1", "False"]


def test_a_stream_of_your_own_is_a_stream_spec():
    assert resolve_streams(AlgorithmConfig(streams=("values", "antiphon.core.types:VALUES"))) == [VALUES, VALUES]
    with raises_with(ConfigError, key="algorithm.streams.1", value="json:dumps"):
        resolve_streams(AlgorithmConfig(streams=("values", "json:dumps")))
