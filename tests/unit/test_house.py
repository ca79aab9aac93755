"""Rules that no linter has; `tools/house.py` measures sizes and wording."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "antiphon"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TEXTS = sorted(
    path
    for folder in ("antiphon", "tests", "recipes", "benchmarks", "docs", "tools")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".yaml", ".toml", ".sh"}
) + [path for name in ("Makefile", "pyproject.toml", "README.md", ".ci/run") if (path := ROOT / name).exists()]

MAY_READ_THE_ENVIRONMENT = (PACKAGE / "core" / "config.py", *(PACKAGE / "cli").rglob("*.py"))


def relative(path):
    return str(path.relative_to(ROOT))


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def modules_imported_at_once(path):
    """Modules that importing `path` imports whatever happens: not those in functions, nor those for type checkers."""
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def test_the_environment_is_read_in_one_place():
    reads = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        if path not in MAY_READ_THE_ENVIRONMENT
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and (getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None))
        in {"environ", "getenv", "putenv", "environb"}
    ]
    assert reads == []


def test_packages_are_light_to_import():
    allowed = set(sys.stdlib_module_names) | {"antiphon", "numpy", "pydantic"}
    heavy = {
        relative(path): found
        for path in PACKAGE.rglob("__init__.py")
        if (found := set(modules_imported_at_once(path)) - allowed)
    }
    assert heavy == {}


def imported(script, *names):
    """Which of these modules a script comes to import."""
    script = f"import importlib, sys\n{script}\nprint(*({set(names)} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_every_package_leaves_torch_out():
    packages = [".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")]
    script = f"for name in {packages}: importlib.import_module(name)"
    assert imported(script, "torch", "transformers", "ray", "datasets") == []


def test_a_controller_waits_for_no_torch():
    assert imported("import antiphon.run.commands", "torch", "ray", "datasets") == []


def test_importing_modules_changes_no_package():
    """A name that a package defines is never replaced by a module of the same name, in whatever order they are imported."""
    script = """
import importlib, pkgutil, antiphon
from antiphon.core.errors import UnsupportedError
names = [found.name for found in pkgutil.walk_packages(antiphon.__path__, "antiphon.") if found.ispkg]
packages = {name: importlib.import_module(name) for name in names}
before = {name: dict(vars(package)) for name, package in packages.items()}
for name, package in packages.items():
    for found in pkgutil.iter_modules(package.__path__, name + "."):
        try:
            importlib.import_module(found.name)
        except (ImportError, UnsupportedError):
            pass  # an optional backend is not installed
for name, package in packages.items():
    changed = [key for key, value in before[name].items() if vars(package)[key] is not value]
    assert not changed, (name, changed)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", TEXTS, ids=relative)
def test_no_path_of_one_machine_is_named(path):
    # Written so that this file does not find itself.
    roots = "|".join(("home", "root", "Users", "work", "mnt", "workspace", "data"))
    found = re.findall(rf"(?<![\w.<>*/\]}}~-])/(?:{roots})/[\w.-]+", path.read_text(encoding="utf-8"))
    assert found == []


def test_every_module_says_what_it_is():
    silent = [relative(path) for path in SOURCES if path.stat().st_size and not ast.get_docstring(tree(path))]
    assert silent == []


def test_constraints_pin_every_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *extras["dev"]} - {"antiphon[trackers]"}
    wanted |= {each for name in ("tensorboard", "wandb", "mlflow", "trackio", "swanlab") for each in extras[name]}
    pinned = {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    names = {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", item)[0]).lower() for item in wanted}
    assert names - pinned == set()
