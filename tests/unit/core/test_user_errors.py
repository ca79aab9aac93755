"""Errors of a user's code in one line, with the place that they come from."""

import asyncio
import functools
import importlib
import os
import sys
import textwrap

import pytest

from antiphon.algorithms.declarations import declaration_of, loss
from antiphon.core.errors import ConfigError, UserCodeError, WorkerDiedError
from antiphon.core.registry import bind_options, import_path
from antiphon.core.types import StreamSpec
from antiphon.core.user_errors import describe_error, name_user_errors
from tests.raising import raises_with

SPEC = StreamSpec("mine")


def relative(file):
    return os.path.relpath(file)


MODULE = """
    import functools
    import json


    def parse(text):
        return json.loads(text)


    def outer(text):
        return parse(text)


    def fine(*arguments):
        return "text"


    @functools.wraps(fine)
    def wrapped(*arguments):
        return fine(*arguments)


    class Reward:
        def __init__(self):
            pass

        def __call__(self, *arguments):
            return "text"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "user_code_under_test.py").write_text(textwrap.dedent(MODULE).lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("user_code_under_test")
    sys.modules.pop("user_code_under_test", None)


def error_of(call, *arguments):
    try:
        call(*arguments)
    except (ValueError, RuntimeError) as error:
        return error
    raise AssertionError("it raised nothing")


def test_the_innermost_line_of_the_user_is_named(module, tmp_path, monkeypatch):
    error = error_of(module.outer, "{")
    assert describe_error(error).endswith(f" ({tmp_path / 'user_code_under_test.py'}:6)")
    monkeypatch.chdir(tmp_path)
    text = describe_error(error)
    assert text.startswith("JSONDecodeError: ") and text.endswith(" (user_code_under_test.py:6)") and "\n" not in text


@pytest.mark.parametrize(
    ("called", "line"),
    [
        (lambda module: module.fine, 13),
        (lambda module: functools.partial(module.fine, 1), 13),
        (lambda module: module.wrapped, 13),
        (lambda module: module.Reward(), 26),
        (lambda module: module.Reward, 26),
        (lambda module: module.Reward().__call__, 26),
    ],
)
def test_a_wrong_value_is_placed_at_the_definition(module, called, line):
    assert describe_error(TypeError("no score"), called(module)).endswith(f"user_code_under_test.py:{line})")


def test_an_error_of_ours_names_no_place():
    assert describe_error(ValueError()) == "ValueError"
    assert describe_error(ValueError("two\nlines"), import_path) == "ValueError: two"
    assert describe_error(ValueError("built in"), int) == "ValueError: built in"


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("\nimport no_such_module\n", 2),
        ("\n\ndef reward(:\n", 3),
        ("def f():\n    raise RuntimeError('at import')\n\nf()\n", 2),
    ],
)
def test_a_module_that_cannot_be_imported_is_placed(tmp_path, monkeypatch, source, line):
    (tmp_path / "broken_under_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    path = "broken_under_test:reward"
    with raises_with(ConfigError, key="tasks.0.reward", value=path, match=rf"broken_under_test.py:{line}\)"):
        import_path(path, "reward", "tasks.0.reward")


@loss(needs=[SPEC])
def scaled(inputs, config, *, beta=1.0):
    return 1 / (beta - beta)


class Callable_:
    """An instance is called, which declares as its class does."""

    def __call__(self, inputs, config, *, beta=1.0):
        return beta


loss(needs=[SPEC])(Callable_)


@pytest.mark.parametrize("function", [scaled, functools.partial(scaled, beta=2.0), Callable_()])
def test_named_functions_declare_and_take_options_as_before(function):
    named = name_user_errors(function, "algorithm.loss", "mine:scaled")
    assert declaration_of(named).needs == (SPEC,)
    assert declaration_of(bind_options(named, {"beta": 3.0}, "algorithm.loss_options")).needs == (SPEC,)
    with pytest.raises(ConfigError, match=r"takes no option 'alpha'") as caught:
        bind_options(named, {"alpha": 3.0}, "algorithm.loss_options")
    assert "name_user_errors" not in str(caught.value)


def test_named_errors_have_setting_and_place():
    named = name_user_errors(scaled, "algorithm.loss", "mine:scaled")
    with pytest.raises(UserCodeError) as caught:
        named(None, None)
    line = scaled.__code__.co_firstlineno + 2
    assert (caught.value.key, caught.value.value) == ("algorithm.loss", "mine:scaled")
    assert str(caught.value).endswith(f"ZeroDivisionError: float division by zero ({relative(__file__)}:{line})")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (WorkerDiedError("gone"), WorkerDiedError),
        (KeyError("x"), UserCodeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_errors_in_a_task_group_are_those_inside(error, expected):
    async def stage(step):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async def fail():
        raise error

    async def run():
        await name_user_errors(stage, "learner.stages.1", "mine:stage")(None)

    with pytest.raises(expected) as caught:
        asyncio.run(run())
    if expected is UserCodeError:
        assert "KeyError: 'x' (" in str(caught.value)
