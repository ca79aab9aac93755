"""A project's files and the modules of the standard library."""

import numbers
import sys

import pytest

from antiphon.core.config import add_import_folder
from antiphon.core.errors import ConfigError
from antiphon.core.import_order import find_end_of_library
from antiphon.core.registry import import_path
from tests.raising import raises_with


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_project_comes_between_library_and_packages(folder):
    add_import_folder(folder / "config.yaml")
    place = sys.path.index(str(folder))
    packages = [index for index, entry in enumerate(sys.path) if entry.endswith("site-packages")]
    assert place == find_end_of_library(sys.path) and place < min(packages)
    assert sys.path.index(numbers.__file__.rpartition("/")[0]) < place


def test_an_installed_module_is_replaced_by_a_projects(folder):
    (folder / "pip.py").write_text("def thing(): return 'of the project'\n")
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "pip"}
    add_import_folder(folder / "config.yaml")
    try:
        assert import_path("pip:thing")() == "of the project"
    finally:
        sys.modules.pop("pip", None)
        sys.modules.update(before)


@pytest.mark.parametrize("file", ["numbers.py", "queue/__init__.py"])
def test_a_module_that_the_library_hides_is_refused(folder, file):
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("def reward(prompt, transcript): return 0.0\n")
    add_import_folder(folder / "config.yaml")
    name = file.partition("/")[0].removesuffix(".py")
    with raises_with(ConfigError, key="tasks.0.reward", value=f"{name}:reward", match=str(folder / file)):
        import_path(f"{name}:reward", "reward", "tasks.0.reward")
    assert import_path("fractions:Fraction").__name__ == "Fraction"
