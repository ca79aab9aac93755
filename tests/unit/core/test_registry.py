"""Names to objects."""

import fractions
import math
import sys

import pytest

from antiphon.core.errors import ConfigError
from antiphon.core.registry import Registry, bind_options, check_import_path, import_path
from tests.raising import raises_with

NUMBERS = Registry("number", {"fraction": "fractions:Fraction", "broken": "fractions:Frction"})


def test_a_built_in_name_resolves():
    assert NUMBERS.resolve("fraction") is fractions.Fraction


def test_an_import_path_stands_anywhere_a_name_may():
    assert NUMBERS.resolve("decimal:Decimal").__name__ == "Decimal"


def test_checking_imports_nothing():
    assert NUMBERS.check("broken") == "broken"
    assert NUMBERS.check("no.such.module:thing") == "no.such.module:thing"


def test_an_unknown_name_names_the_nearest_and_all():
    with raises_with(ConfigError, value="fractoin", valid=("broken", "fraction"), suggestions=("fraction",)):
        NUMBERS.check("fractoin")


def test_a_missing_module_is_named():
    with raises_with(ConfigError, value="no_such_module_here:thing"):
        NUMBERS.resolve("no_such_module_here:thing")


def test_a_missing_attribute_names_the_nearest():
    with raises_with(ConfigError, value="fractions:Frction", suggestions=("Fraction",)):
        NUMBERS.resolve("broken")


def test_an_error_inside_the_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "users_module.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with raises_with(ConfigError, match="a_package_that_is_not_there", value="users_module:thing"):
        import_path("users_module:thing")


def test_an_error_has_the_key_that_it_was_given():
    for name in ("fractoin", "no_such_module_here:thing", "broken"):
        with pytest.raises(ConfigError) as error:
            NUMBERS.resolve(name, "a.b")
        assert error.value.key == "a.b"


def test_what_is_to_be_called_must_be_a_function_or_a_class():
    functions = Registry("function", {"pi": "math:pi", "floor": "math:floor"}, callables=True)
    assert functions.resolve("floor") is math.floor and functions.resolve("fractions:Fraction")
    for name in ("pi", "math:e"):
        with raises_with(ConfigError, match="float", key="a.b", value=name):
            functions.resolve(name, "a.b")
    assert Registry("number", {}).resolve("math:e") == math.e


MODULES = {
    "users_module.py": "import os\n\n\nclass Engine:\n    inner = 1\n",
    "users_package/__init__.py": "raise RuntimeError('imported')\n",
    "users_package/engine.py": "def open_engine(): ...\n\n\nraise RuntimeError('imported')\n",
    "users_package/lazy.py": "def __getattr__(name): ...\n",
    "users_package/all.py": "from users_module import *\n",
    "users_package/broken.py": "def (:\n",
    "users_folder/inner/engine.py": "from users_module import Engine as Other\n",
}


@pytest.fixture
def users_modules(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("users_modules")
@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("users_modul:Engine", ()),
        (":Engine", ()),
        ("users_module:Engin", ("Engine",)),
        ("users_module:inner", ()),
        ("users_module.deeper:Engine", ()),
        ("users_package.engin:open_engine", ()),
        ("users_package.engine:open_engin", ("open_engine",)),
        ("users_folder.inner.engine:Engine", ("Other",)),
        ("fractions:Frction", ("Fraction",)),
    ],
)
def test_import_path_that_leads_nowhere_is_found(path, nearest):
    with raises_with(ConfigError, key="a.b", value=path) as caught:
        check_import_path(path, "engine", "a.b")
    assert not caught.value.suggestions or caught.value.suggestions == nearest


@pytest.mark.usefixtures("users_modules")
@pytest.mark.parametrize(
    "path",
    [
        "users_module:Engine",
        "users_package.engine:open_engine",
        "users_package.lazy:anything",
        "users_package.all:anything",
        "users_package.broken:anything",
        "users_folder.inner.engine:Other",
        "users_folder.inner:engine",
        "os.path:join",
        "math:pi",
    ],
)
def test_import_path_is_checked_without_an_import(path):
    check_import_path(path)
    assert not [name for name in sys.modules if name.startswith("users_")]


def add(first, second, *, third, fourth=4):
    return first + second + third + fourth


def test_options_are_bound_to_keyword_only_parameters():
    assert bind_options(add, {"third": 3}, "options")(1, 2) == 10
    assert bind_options(divmod, {}, "options") is divmod


@pytest.mark.parametrize(
    ("options", "key", "nearest"),
    [({"thrid": 1}, "options.thrid", ("third",)), ({"second": 1}, "options.second", ()), ({}, "options", ())],
)
def test_options_that_do_not_fit_are_refused(options, key, nearest):
    with pytest.raises(ConfigError) as error:
        bind_options(add, options, "options")
    assert (error.value.key, error.value.valid, error.value.suggestions) == (key, ("third", "fourth"), nearest)
