"""Parsers of test logs: the status of each test, by its name, as the harness of SWE-bench reads it.

The names of tests in SWE-bench's rows were made by the harness's parsers, so these give the same names, odd ones included. The
parsers of other repositories and languages are taken from the package `swebench`, where it is installed.
"""

import importlib
import re
from collections.abc import Callable

from antiphon.core.errors import ConfigError
from antiphon.core.optional_packages import import_optional

PASSED, FAILED, ERROR, SKIPPED, XFAIL = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"
STATUSES = (FAILED, PASSED, SKIPPED, ERROR, XFAIL)

Statuses = dict[str, str]
"""Name of a test -> one of `STATUSES`."""
Parser = Callable[[str], Statuses]

_PREFIX = "parse_log_"  # of the names in SWE-bench's rows
_COLOURS = re.compile(r"\[\d+m")
_CONTROLS = dict.fromkeys(range(1, 32))
_SKIPPED_COUNT = re.compile(r"\[\d+\]")
_INTERRUPTED = re.compile(
    r"^(.*?) \.\.\. (?:Testing against Django installed in [\s\S]*? silenced\)\.|Internal Server Error: /.*/"
    r"|System check identified no issues \(0 silenced\))\nok$",
    re.MULTILINE,
)


def parse_pytest(log: str) -> Statuses:
    """Parse the short summary of `pytest -rA`: a status and a name a line."""
    return _summary(log, lambda words: words[0])


def parse_pytest_options(log: str) -> Statuses:
    """Parse it as `parse_pytest`; of a parameter that is an absolute path, only the last part counts."""

    def shortened(words: list[str]) -> str:
        match = re.search(r"(.*?)\[(.*)\]", words[0])
        if not match:
            return words[0]
        name, option = match.groups()
        if option.startswith("/") and not option.startswith("//") and "*" not in option:
            option = "/" + option.rpartition("/")[2]
        return f"{name}[{option}]"

    return _summary(log, shortened)


def _summary(log: str, name_of: Callable[[list[str]], str]) -> Statuses:
    found = {}
    for line in log.split("\n"):
        status, *words = line.split() or [""]
        if status in STATUSES and words and not _counts_skipped(status, words[0]):
            found[name_of(words)] = status
    return found


def _counts_skipped(status: str, word: str) -> bool:
    """Return True for the summary `SKIPPED [3] file.py:7: reason`, which names no test."""
    return status == SKIPPED and _SKIPPED_COUNT.fullmatch(word) is not None


def parse_pytest_v2(log: str) -> Statuses:
    """Parse pytest's summary with whole names, spaces included; also lines of older versions, which end with the status."""
    found = {}
    for line in log.split("\n"):
        line = _COLOURS.sub("", line).translate(_CONTROLS)
        if line.startswith(FAILED):
            line = line.partition(" - ")[0]
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith(STATUSES):
            if words[0] in STATUSES and not _counts_skipped(words[0], words[1]):
                found[" ".join(words[1:])] = words[0]
        elif words[-1] in STATUSES and line.endswith(STATUSES):
            found[" ".join(words[:-1])] = words[-1]
    return found


def parse_django(log: str) -> Statuses:
    """Parse the log of Django's test runner, whose results may be interrupted by other output."""
    found, latest = {}, None
    version = "--version is equivalent to version"  # a test whose name fills several lines
    for line in map(str.strip, log.split("\n")):
        if version in line:
            found[version] = PASSED
        if " ... " in line:
            latest = line.partition(" ... ")[0]
        if match := re.fullmatch(r"(.*?)(?: \.\.\. ok| \.\.\.  ?OK)", line):
            name = match[1]
            if name.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                name = name.partition("...")[2].strip()
            found[name] = PASSED
        if " ... skipped" in line:
            found[line.partition(" ... skipped")[0]] = SKIPPED
        if match := re.match(r"(?:FAIL|ERROR):\S*\s+(\S+)", line):
            found[match[1]] = FAILED if line.startswith("FAIL") else ERROR
        if match := re.search(r" \.\.\. (FAIL|ERROR)$", line):
            found[line.partition(match[0])[0]] = FAILED if match[1] == "FAIL" else ERROR
        if line.startswith("ok") and latest is not None:
            found[latest] = PASSED
    return found | {match[1]: PASSED for match in _INTERRUPTED.finditer(log)}


def parse_unittest(log: str) -> Statuses:
    """Parse the log of `python -m unittest -v`: `name (class) ... ok`."""
    words = {
        "ok": PASSED,
        "FAIL": FAILED,
        "ERROR": ERROR,
        "expected failure": XFAIL,
        "unexpected success": FAILED,
    }
    found = {}
    for line in map(str.strip, log.split("\n")):
        name, separator, result = line.rpartition(" ... ")
        if separator and name and (status := SKIPPED if result.startswith("skipped") else words.get(result)):
            found[name] = status
    return found


PARSERS: dict[str, Parser] = {
    "pytest": parse_pytest,
    "pytest_options": parse_pytest_options,
    "pytest_v2": parse_pytest_v2,
    "django": parse_django,
    "unittest": parse_unittest,
    **dict.fromkeys(("astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"), parse_pytest),
    **dict.fromkeys(("pydicom", "pylint", "requests"), parse_pytest_options),
    **dict.fromkeys(("astropy", "scikit", "sphinx"), parse_pytest_v2),
}
"""Parsers by the names in SWE-bench's rows, without `parse_log_`."""

BY_REPOSITORY = {
    "astropy/astropy": "astropy",
    "django/django": "django",
    "matplotlib/matplotlib": "matplotlib",
    "mwaskom/seaborn": "seaborn",
    "psf/requests": "requests",
    "pydicom/pydicom": "pydicom",
    "pylint-dev/pylint": "pylint",
    "scikit-learn/scikit-learn": "scikit",
    "sphinx-doc/sphinx": "sphinx",
    "sympy/sympy": "sympy",
}
"""Names of the parsers of SWE-bench's repositories; those of all others are read by `pytest`."""


def get_parser(name: str) -> Parser:
    """Return the parser of this name, with or without `parse_log_` in front.

    Raises:
        ConfigError: There is none here, and `swebench` is not installed or has none.
    """
    short = name.removeprefix(_PREFIX)
    if short in PARSERS:
        return PARSERS[short]
    package = "swebench.harness.log_parsers"
    import_optional(package, f"the log parser {name!r}", "swebench")
    for module in map(importlib.import_module, (package, f"{package}.python")):
        if parse := vars(module).get(f"{_PREFIX}{short}"):
            return lambda log: dict(parse(log, None))
    message = f"there is no log parser {name!r}, neither here nor in swebench; here are {', '.join(PARSERS)}"
    raise ConfigError(message, key="log_parser", value=name, valid=tuple(PARSERS))
