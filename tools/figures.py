"""Check the numbers in the documentation against committed results, and list results whose code has changed since.

    python tools/figures.py [--write] [--release]

A paragraph, list or table with measured numbers ends with a comment that names the source of each number, in order:

    It is 1.63 times as fast, at 86 % of the memory, with 8 prompts.
    <!-- figures step.json: ratio_sync 100*memory_ratio =8 -->

* `step.json` is a file of `benchmarks/results/cpu-2core`, and `<device>/step.json` one of another device. It applies until
  another file is named.
* A source is an expression of the file's figures with + - * / min max median abs. Quote names that are not identifiers.
  The printed number must equal its value, rounded to the digits that are printed.
* `<source` and `>source` mark an upper and a lower bound: the value, rounded up or down to the printed digits.
* `=8` is a number that was set, not measured. Numbers with decimals or a unit cannot be declared so.
* `[ a b: {}_before {}_after ]` repeats the sources for each name.

In all other blocks a number may not look measured: it may not have decimals, a unit or a thousands separator, nor stand in a
block that names a benchmark or a result. Exceptions are listed in `unbound_numbers.txt`: page, phrase and reason. Code, links,
comments, table headings and first columns are ignored.

`--write` replaces wrong numbers by the values of the results. `--release` fails if any result is older than its code.
"""

import argparse
import ast
import json
import math
import operator
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from _digests import digest_all, digest_modules, find_files  # noqa: E402

ALL_RESULTS = "benchmarks/results"
RESULTS = f"{ALL_RESULTS}/cpu-2core"
EXCEPTIONS = "tools/unbound_numbers.txt"
PEERS = ("trl_", "vs_generate", "continuous_batching", "bubblewrap", "math_verify", "mathruler", "vllm")
ATTACHED = r"(?:x|[mµn]?s|[GMKTk]i?B)\b"  # units that may follow without a space
NUMBER = re.compile(
    r"(?<![\w.,])(?<![A-Za-z][-/])(?:(?<![\w%])[+\-−])?"
    r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
    rf"(?={ATTACHED}|[^\w.,]|[.,](?!\d)|\Z)"
)
UNIT = re.compile(
    rf"\s?(?:%|×(?!\s*\d)|{ATTACHED}|(?:milli|micro)?seconds?\b|(?:minutes?|hours?|bytes|times|points|percent)\b"
    r"|\w*/s\b|(?:[\w-]+\s)?(?:a|per) (?:second|minute|hour)\b|-?fold\b)"
)
FENCED = r"^ *```.*?^ *```"
HIDDEN = re.compile(
    FENCED + r"|<!--.*?-->|`[^`]+`|\]\([^)]*\)|https?://\S+|arXiv \d{4}\.\d{5}", re.DOTALL | re.MULTILINE
)
LABELS = re.compile(r"^\|.*(?=\n\|[ -]*-{3})|^\|[^|\n]*\|", re.MULTILINE)  # table headings and first columns
MARK = re.compile(r"<!-- figures\b(.*?)-->", re.DOTALL)
NAMES_RESULT = re.compile(r"benchmarks/\w+\.py|\w+\.json`")
BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
CALLS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "median": lambda *of: statistics.median(of),
    "abs": abs,
}


@dataclass(frozen=True)
class Number:
    """A number in a page."""

    text: str
    start: int
    exact: bool  # has decimals or a unit, so it is neither a count nor a label

    @property
    def looks_measured(self) -> bool:
        """Return True if it has decimals, a unit or a thousands separator."""
        return self.exact or "," in self.text

    @property
    def value(self) -> float:
        """Its numeric value."""
        return float(self.text.replace(",", "").replace("−", "-"))

    @property
    def decimals(self) -> int:
        """Digits after the decimal point."""
        mantissa, _, power = self.text.partition("e")
        return len(mantissa.partition(".")[2]) - int(power or 0)

    @property
    def unit(self) -> float:
        """The value of one unit of its last digit."""
        return 10.0**-self.decimals

    def format_like(self, value: float) -> str:
        """Format another value with the same digits, sign and separators."""
        text = f"{value:{'+' if self.text[0] == '+' else ''},.{len(self.text.partition('.')[2])}f}"
        text = text if "," in self.text or abs(value) >= 1000 else text.replace(",", "")
        return text.replace("-", "−") if "−" in self.text else text


# --- pages ---------------------------------------------------------------------------------------------------------------


def list_pages(root: Path) -> list[Path]:
    """List the pages that are checked."""
    return [root / "README.md", *sorted(root.glob("docs/**/*.md")), *sorted(root.glob("recipes/*/README.md"))]


def _blank(match: re.Match[str]) -> str:
    """Replace a match by spaces, keeping positions and line breaks."""
    return re.sub(r"\S", " ", match.group())


def find_numbers(text: str) -> list[Number]:
    """Find the numbers in the prose and the tables of a page."""
    seen = LABELS.sub(_blank, HIDDEN.sub(_blank, text))
    return [
        Number(found.group(), found.start(), "." in found.group() or bool(UNIT.match(seen, found.end())))
        for found in NUMBER.finditer(seen)
    ]


def split_blocks(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield start, end and comment of each paragraph, list or table; a comment belongs to the block before it."""
    start = 0
    code = [found.span() for found in re.finditer(FENCED, text, re.DOTALL | re.MULTILINE)]
    for found in re.finditer(r"\n(?=#)|\n\s*\n|<!-- figures\b.*?-->|\Z", text, re.DOTALL):
        if any(first <= found.start() < last for first, last in code):
            continue
        if found.group().startswith("<!--"):
            yield start, found.start(), found.group()
            start = found.end()
        elif not re.match(r"\s*<!-- figures", text[found.start() :]):
            yield start, found.end(), None
            start = found.end()


def read_exceptions(root: Path) -> list[tuple[str, str, str]]:
    """Read page, phrase and reason of each number that needs no result."""
    lines = (root / "tools" / "unbound_numbers.txt").read_text(encoding="utf-8").splitlines()
    rows = [tuple(part.strip() for part in line.split("::")) for line in lines if line.strip() and line[0] != "#"]
    if wrong := [row for row in rows if len(row) != 3 or not all(row)]:
        raise ValueError(f"{EXCEPTIONS}: expected `page :: phrase :: reason`, got {wrong[0]}")
    return [(page, phrase, reason) for page, phrase, reason in rows]


def find_phrase(text: str, phrase: str) -> list[tuple[int, int]]:
    """Find a phrase, whatever its line breaks."""
    return [found.span() for found in re.finditer(r"\s+".join(map(re.escape, phrase.split())), text)]


# --- marks ---------------------------------------------------------------------------------------------------------------


def expand_comment(mark: str) -> list[str]:
    """Split a comment into files and sources, with brackets expanded."""
    words = re.findall(r"[\[\]]|(?:'[^']*'|[^\s\[\]'])+", " ".join(MARK.sub(r"\1", mark).split()))
    found: list[str] = []
    while words:
        word = words.pop(0)
        if word != "[":
            found.append(word)
            continue
        if "]" not in words or not any(each.endswith(":") for each in words[: words.index("]")]):
            return [*found, word]  # which no number can have as its source
        inner = words[: words.index("]")]
        words = words[len(inner) + 1 :]
        head = next(i for i, each in enumerate(inner) if each.endswith(":"))
        names = " ".join(inner[: head + 1]).rstrip(":").split()
        found += [each.replace("{}", name) for name in names for each in inner[head + 1 :]]
    return found


def evaluate(expression: str, figures: Mapping[str, float]) -> float:
    """Evaluate a source.

    Raises:
        KeyError: A name is not in the figures.
        ValueError: The expression has other operations, or names no figure.
    """

    def of(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=str(name)) | ast.Name(id=name):
                return figures[name]
            case ast.Constant(value=int(value) | float(value)):
                return value
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return BINARY[type(op)](of(left), of(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -of(operand)
            case ast.Call(func=ast.Name(id=name), args=args) if name in CALLS:
                return CALLS[name](*map(of, args))
        raise ValueError(f"{expression}: + - * /, min, max, median and abs of figures")

    body = ast.parse(expression, mode="eval").body
    if not any((isinstance(node, ast.Name) and node.id not in CALLS) or _is_quoted(node) for node in ast.walk(body)):
        raise ValueError(f"{expression} names no figure")
    return of(body)


def _is_quoted(node: ast.AST) -> bool:
    """Return True for a quoted name."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def compare(number: Number, source: str, figures: Mapping[str, float]) -> tuple[bool, float]:
    """Return whether a printed number agrees with its source, and the value of the source."""
    bound, value = source[0], evaluate(source.lstrip("<>"), figures)
    off, slack = number.value - value, number.unit * 1e-6 + 1e-9
    if bound == "<":
        return -slack <= off < number.unit, value
    if bound == ">":
        return -slack <= -off < number.unit, value
    half_up = math.floor(value / number.unit + 0.5) * number.unit  # a tie may be rounded either way, by who printed it
    rounded = (round(value, number.decimals), half_up)
    return min(abs(number.value - each) for each in rounded) <= slack, value


def round_bound(value: float, bound: str, unit: float) -> float:
    """Return the smallest multiple of a unit that is not below the value of an upper bound; for lower bounds likewise."""
    match bound:
        case "<":
            return math.ceil(value / unit - 1e-6) * unit
        case ">":
            return math.floor(value / unit + 1e-6) * unit
    return value


# --- the two checks ----------------------------------------------------------------------------------------------------------


def read_results(root: Path) -> dict[str, dict[str, Any]]:
    """Read all results, by file name; those of other devices by folder and file name."""
    paths = sorted((root / ALL_RESULTS).glob("*/*.json"))
    names = {path: path.name if path.parent == root / RESULTS else f"{path.parent.name}/{path.name}" for path in paths}
    return {name: json.loads(path.read_text(encoding="utf-8")) for path, name in names.items()}


class Page:
    """A page after its check.

    Attributes:
        faults: Position and message of each error.
        unused: Exceptions that the page does not contain.
    """

    def __init__(self, text: str, phrases: list[str], results: Mapping[str, Any]) -> None:
        self.original = text
        self.faults: list[tuple[int, str]] = []
        self._changes: list[tuple[Number, str]] = []
        self.unused = [phrase for phrase in phrases if not any(find_numbers(phrase)) or not find_phrase(text, phrase)]
        free = [span for phrase in phrases for span in find_phrase(text, phrase)]
        counted = [each for each in find_numbers(text) if not any(a <= each.start < b for a, b in free)]
        for start, end, mark in split_blocks(text):
            inside = [each for each in counted if start <= each.start < end]
            if mark is not None:
                self._check_block(inside, expand_comment(mark), results, start)
            else:
                names_result = bool(NAMES_RESULT.search(text, start, end))
                loose = [each for each in inside if each.looks_measured or names_result]
                self.faults += [
                    (each.start, f"{each.text} is bound to no result and not listed in {EXCEPTIONS}") for each in loose
                ]

    def _check_block(self, inside: list[Number], words: list[str], results: Mapping[str, Any], start: int) -> None:
        figures: Mapping[str, float] | None = None
        waiting = list(inside)
        for word in words:
            if word.removesuffix(":").endswith(".json"):
                figures = results.get(word.removesuffix(":"), {}).get("figures")
                if figures is None:
                    self.faults.append((start, f"no such result: {word.removesuffix(':')}"))
                    return
            elif not waiting:
                self.faults.append((start, f"{word} in the comment has no number in the block"))
                return
            else:
                self._check_number(waiting.pop(0), word, figures or {})
        self.faults += [(each.start, f"{each.text}: the comment has no source for it") for each in waiting]

    def _check_number(self, number: Number, source: str, figures: Mapping[str, float]) -> None:
        if source.startswith("="):
            if source[1:] != number.text:
                self.faults.append((number.start, f"{number.text}: the comment says {source}"))
            elif number.exact:
                self.faults.append((number.start, f"{number.text} has decimals or a unit, so it needs a result"))
            return
        try:
            right, value = compare(number, source, figures)
        except (KeyError, ValueError, SyntaxError, ZeroDivisionError) as error:
            self.faults.append((number.start, f"{number.text}: cannot evaluate {source} ({error})"))
            return
        if not right:
            self.faults.append((number.start, f"{number.text}: {source} is {value:g}"))
            self._changes.append((number, number.format_like(round_bound(value, source[0], number.unit))))

    @property
    def text(self) -> str:
        """The page with wrong numbers replaced by the values of their sources."""
        text = self.original
        for number, new in sorted(self._changes, key=lambda change: -change[0].start):
            text = text[: number.start] + new + text[number.start + len(number.text) :]
        return text


def check_pages(root: Path, write: bool = False) -> list[str]:
    """Check all pages and settings; return one line an error."""
    results, allowed, lines = read_results(root), read_exceptions(root), []
    unused = {(page, phrase) for page, phrase, _ in allowed}
    for path in list_pages(root):
        name = str(path.relative_to(root))
        phrases = [(page, phrase) for page, phrase, _ in allowed if page in (name, "*")]
        page = Page(path.read_text(encoding="utf-8"), [phrase for _, phrase in phrases], results)
        unused -= {each for each in phrases if each[1] not in page.unused}
        lines += [f"{name}:{page.original.count(chr(10), 0, at) + 1}: {fault}" for at, fault in sorted(page.faults)]
        if write and page.text != page.original:
            path.write_text(page.text, encoding="utf-8")
    lines += [f"{EXCEPTIONS}: {page} has no number in {phrase!r}" for page, phrase in sorted(unused)]
    for name, result in results.items():
        peers = [peer for peer in PEERS if any(peer in figure for figure in result["figures"])]
        if peers and not result.get("settings"):
            lines.append(f"{name} compares with {', '.join(peers)} and has no settings")
    return lines


def find_stale(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, commit, changed modules and number of commits to these since, of each result whose code has changed."""
    now: set[str] | None = None
    history = has_history(root)
    for name, result in read_results(root).items():
        changed = []
        for module, digest in result.get("measures", {}).items():
            if not find_files(module, root) or digest_modules([module], root)[module] != digest:
                now = set(digest_all(root)) if now is None else now
                changed += [module] * (digest not in now)  # otherwise it has only moved
        if "measures" not in result:
            changed = ["(does not say what it measures)"]
        commit, short = result["commit"], result["commit"][:8]
        if history and _git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
            yield name, f"{short} (not in the history)", " ".join(changed), "?"
        elif changed:
            places = [module.replace(".", "/") for module in changed]
            paths = [path for place in places for path in (place, f"{place}.py")]
            yield (
                name,
                short,
                " ".join(changed),
                _git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *paths) or "?",
            )


def has_history(root: Path) -> bool:
    """Return True if git is there, and all commits."""
    return _git(root, "rev-parse", "--is-shallow-repository") == "false"


def _git(root: Path, *words: str) -> str | None:
    """Run git; return its output, or None if it fails."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def main() -> int:
    """Run the checks and print what they find."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace wrong numbers by the values of the results")
    parser.add_argument("--release", action="store_true", help="fail if a result is older than its code")
    options = parser.parse_args()
    faults = check_pages(ROOT, options.write)
    print(*faults, sep="\n", end="\n" if faults else "")
    if not has_history(ROOT):
        print("git or its history is missing: the commits of results were not checked")
    stale = list(find_stale(ROOT))
    if stale:
        print(f"{len(stale)} results are older than their code (result, commit, commits since, changed modules):")
        for name, commit, changed, since in stale:
            print(f"  {name:40} {commit:10} {since:>4}  {changed.replace('antiphon.', '')}")
    print(f"{len(faults)} errors in numbers and settings")
    return 1 if faults or (stale and options.release) else 0


if __name__ == "__main__":
    sys.exit(main())
