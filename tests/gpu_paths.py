"""Which expressions of the package know about GPUs, and which of them a process evaluates as on one.

A *path* is an expression of one of two kinds:

* a comparison or attribute that tells a GPU from a CPU, such as `device.type == "cuda"`; reached when it comes out as on a GPU
* a call that works otherwise on GPUs: of `torch.cuda`, of autocast, or with `non_blocking` or `pin_memory`; reached when it is
  about a GPU

With `GPU_PATHS=FILE` in the environment, processes with the fake GPU append the paths that they reach to the file.
"""

import ast
import builtins
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOG = "GPU_PATHS"
PACKAGE = Path(__file__).resolve().parents[1] / "antiphon"
ATTRIBUTES = {"is_cuda": True, "is_cpu": False}
SETTINGS = {"non_blocking", "pin_memory"}
MODULES = ("torch.cuda.", "torch.backends.cuda.")
DECIDES, CALLS = "__gpu_path_decides__", "__gpu_path_calls__"


def _on_gpu(node: ast.AST) -> bool | None:
    """Return what an expression that tells a GPU from a CPU comes out as on a GPU; None for others."""
    match node:
        case ast.Compare(
            ops=[ast.Eq() | ast.NotEq() as operator], comparators=[ast.Constant(value="cuda" | "cpu" as kind)]
        ):
            return (kind == "cuda") == isinstance(operator, ast.Eq)
        case ast.Attribute(attr=name):
            return ATTRIBUTES.get(name)
        case ast.Call() if ast.unparse(node.func) == "torch.cuda.is_available":
            return True
    return None


def _works_otherwise(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    special = name.startswith((*MODULES, "torch.autocast")) or name.endswith((".pin_memory", "init_device_mesh"))
    return special or any(each.arg in SETTINGS for each in node.keywords)


def _key(module: str, node: ast.AST) -> str:
    return f"{module}: {ast.unparse(node)}"


def package_paths() -> Iterator[str]:
    """Yield the paths of the package. What foretells speeds and memory knows about GPUs, and does nothing on them."""
    for file in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        if not module.startswith("antiphon.simulate."):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if _on_gpu(node) is not None or _works_otherwise(node):
                    yield _key(module, node)


class _Watch(ast.NodeTransformer):
    """Puts each path of a module into a call that says when it is reached."""

    def __init__(self, module: str) -> None:
        self._module = module

    def visit(self, node: ast.AST) -> Any:
        on_gpu, otherwise, key = _on_gpu(node), _works_otherwise(node), _key(self._module, node)
        node = self.generic_visit(node)
        if on_gpu is not None:
            arguments: list[Any] = [ast.Constant(key), ast.Constant(on_gpu), node]
            return ast.copy_location(ast.Call(ast.Name(DECIDES, ast.Load()), arguments, []), node)
        if otherwise:
            call: Any = node
            arguments = [ast.Constant(key), call.func, *call.args]
            return ast.copy_location(ast.Call(ast.Name(CALLS, ast.Load()), arguments, call.keywords), node)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = _Watch(fullname).visit(ast.parse(self.get_data(path), path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] != PACKAGE.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def _is_about_gpu(value: Any) -> bool:
    return str(getattr(value, "device", value)).startswith("cuda")


def watch() -> None:
    """Let each module of the package that is imported from here on say which paths it reaches."""
    reached: set[str] = set()
    file = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(key: str) -> None:
        if key not in reached:
            reached.add(key)
            os.write(file, f"{key}\n".encode())

    def decides(key: str, on_gpu: bool, value: Any) -> Any:
        if bool(value) == on_gpu:
            say(key)
        return value

    def calls(key: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        about = [result, getattr(function, "__self__", None), *args, *kwargs.values()]
        named = key.partition(": ")[2].startswith(MODULES) or key.endswith(".pin_memory()")
        if named or kwargs.get("pin_memory") or any(map(_is_about_gpu, about)):
            say(key)
        return result

    setattr(builtins, DECIDES, decides)
    setattr(builtins, CALLS, calls)
    sys.meta_path.insert(0, _Finder())
