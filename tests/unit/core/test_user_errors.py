"""Errors of a user's code in one line, with the place that they come from."""

import functools
import importlib
import sys
import textwrap

import pytest

from antiphon.core.errors import ConfigError
from antiphon.core.registry import import_path
from antiphon.core.user_errors import describe_error
from tests.raising import raises_with

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
