"""The two programs of a judged solution, made of the files that they consist of.

A program finds the modules that it needs of ours already imported, so that the sandbox holds no file of ours.
"""

from pathlib import Path
from types import CodeType

FOLDER = Path(__file__).parent
PACKAGE = __name__.rpartition(".")[0]
JUDGE = ("frames", "session", "harness")  # each after those that it needs; the last one is the program
SOLUTION = ("frames", "solution")

_PROGRAM = """
import sys, types
for name, text in {texts}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec", dont_inherit=True), vars(module))
module.main()
"""


def modules() -> dict[str, CodeType]:
    """All modules, compiled for the Python that runs here."""
    names = dict.fromkeys([*JUDGE, *SOLUTION])
    return {
        f"{PACKAGE}.{name}": compile(text, name, "exec", dont_inherit=True, optimize=2)
        for name, text in _texts(tuple(names)).items()
    }


def programs(*, imported: bool) -> tuple[str, str]:
    """The judge and the program of a solution; `imported`: where they run, `modules` are imported."""
    judge, solution = (_whole(names) for names in (JUDGE, SOLUTION))
    if imported:
        judge, solution = (
            f"import sys\nsys.modules[{PACKAGE + '.' + names[-1]!r}].main()" for names in (JUDGE, SOLUTION)
        )
    return judge, solution


def _whole(names: tuple[str, ...]) -> str:
    return _PROGRAM.format(texts={f"{PACKAGE}.{name}": text for name, text in _texts(names).items()})


def _texts(names: tuple[str, ...]) -> dict[str, str]:
    return {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in names}
