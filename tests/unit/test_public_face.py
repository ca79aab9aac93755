"""The package's public names: all can be imported, and importing the package alone stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

import antiphon

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", antiphon.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(antiphon, name).__name__.startswith(name)
    assert name in dir(antiphon)


def test_listed_names_are_those_that_are_exported():
    assert sorted(antiphon._EXPORTS) == antiphon.__all__


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="trian"):
        _ = antiphon.trian


@pytest.mark.parametrize("statement", ["import antiphon", "from antiphon import ConfigError, load_config"])
def test_importing_the_package_imports_no_torch(statement):
    script = f"import sys\n{statement}\nprint({{'torch', 'ray', 'datasets', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


def test_importing_the_package_imports_no_numpy():
    script = "import sys, antiphon\nprint({'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


def test_load_config_finds_modules_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = ROOT / "recipes" / "tiny_arithmetic" / "config.yaml"
    path = tmp_path / "run.yaml"
    path.write_text(recipe.read_text())
    config = antiphon.load_config(path, ["steps=3"])
    assert isinstance(config, antiphon.RunConfig) and config.steps == 3
    assert str(tmp_path) in sys.path
