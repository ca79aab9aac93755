"""Holds the numbers of README and docs against committed results, and tells which results are older than what they measured.

    python tools/figures.py [--write] [--release]

A paragraph, list or table with measured numbers ends with a comment that says where each number comes from, in order:

    On this machine it is 1.63 times as fast, at 86 % of the memory, with 8 prompts.
    <!-- figures step.json: ratio_sync 100*memory_ratio =8 -->

`name.json` is of `benchmarks/results/cpu-2core`, and stays until the next. An expression is of its figures ('quoted' where the
name is no identifier), with + - * / and min, max, median; `<` or `>` before it says that the text gives a bound, rounded away
from the value. `=8` is a number that was set and not measured. `[a b: {}_before {}_after ]` stands for the same of each name.
All numbers of such a block are accounted for, in order; the printed digits decide how exactly one has to agree.

Elsewhere a number that looks measured (it has decimals, a unit or thousands), or stands in a block that names a benchmark or a
result, has to be in `given.txt` beside this file: the page, a phrase with the number, and why no result has it. Code, links,
comments, and the head and first column of tables are not read.

`--write` puts the results' values into the text. `--release` fails where a result is older than what it measured.
"""

import argparse
import ast
import json
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
from _measured import digests, everywhere, files  # noqa: E402

RESULTS = "benchmarks/results/cpu-2core"
PEERS = ("trl_", "vs_generate", "continuous_batching", "bubblewrap", "math_verify", "mathruler", "vllm")
NUMBER = re.compile(r"(?<![\w.,/\-−–])[+\-−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\w|[.,]\d)")
UNIT = re.compile(
    r"\s?(%|×(?!\s*\d)|[mµn]?s\b|[GMKTk]i?B\b|(seconds?|minutes?|hours?|bytes|times|points)\b|(\w+\s)?a second)"
)
FENCED = r"^ *```.*?^ *```"
HIDDEN = re.compile(
    FENCED + r"|<!--.*?-->|`[^`]+`|\]\([^)]*\)|https?://\S+|arXiv \d{4}\.\d{5}", re.DOTALL | re.MULTILINE
)
LABELS = re.compile(
    r"^\|.*(?=\n\|[ -]*-{3})|^\|[^|\n]*\|", re.MULTILINE
)  # the head of a table, and the first cell of each row
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
    """A number of a page."""

    text: str
    start: int
    exact: bool  # it has decimals or a unit: no count, and no label

    @property
    def measured(self) -> bool:
        """It looks so."""
        return self.exact or "," in self.text

    @property
    def value(self) -> float:
        """What it says."""
        return float(self.text.replace(",", "").replace("−", "-"))

    @property
    def unit(self) -> float:
        """What its last digit is worth."""
        mantissa, _, power = self.text.partition("e")
        return 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))

    def like(self, value: float) -> str:
        """Another value in the same form."""
        text = f"{value:{'+' if self.text[0] == '+' else ''},.{len(self.text.partition('.')[2])}f}"
        text = text if "," in self.text or abs(value) >= 1000 else text.replace(",", "")
        return text.replace("-", "−") if "−" in self.text else text


# --- pages ---------------------------------------------------------------------------------------------------------------


def pages(root: Path) -> list[Path]:
    """All that make statements."""
    return [root / "README.md", *sorted(root.glob("docs/*.md")), *sorted(root.glob("recipes/*/README.md"))]


def blank(match: "re.Match[str]") -> str:
    """As many spaces, and the same line ends."""
    return re.sub(r"\S", " ", match.group())


def numbers(text: str) -> list[Number]:
    """Those of prose and tables."""
    seen = LABELS.sub(blank, HIDDEN.sub(blank, text))
    return [
        Number(found.group(), found.start(), "." in found.group() or bool(UNIT.match(seen, found.end())))
        for found in NUMBER.finditer(seen)
    ]


def blocks(text: str) -> Iterator[tuple[int, int, str | None]]:
    """Start, end and mark of each paragraph, list or table; a mark belongs to what stands before it."""
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


def given(root: Path) -> list[tuple[str, str, str]]:
    """Page, phrase and reason of what no result has."""
    lines = (root / "tools" / "given.txt").read_text(encoding="utf-8").splitlines()
    rows = [tuple(part.strip() for part in line.split("::")) for line in lines if line.strip() and line[0] != "#"]
    if wrong := [row for row in rows if len(row) != 3 or not all(row)]:
        raise ValueError(f"given.txt: page :: phrase :: reason, and not {wrong[0]}")
    return [(page, phrase, reason) for page, phrase, reason in rows]


def phrase_spans(text: str, phrase: str) -> list[tuple[int, int]]:
    """Where it stands, however lines are broken."""
    return [found.span() for found in re.finditer(r"\s+".join(map(re.escape, phrase.split())), text)]


# --- marks ---------------------------------------------------------------------------------------------------------------


def sources(mark: str) -> list[str]:
    """The words of a mark, brackets written out."""
    words = re.findall(r"[\[\]]|(?:'[^']*'|[^\s\[\]'])+", " ".join(MARK.sub(r"\1", mark).split()))
    found: list[str] = []
    while words:
        word = words.pop(0)
        if word != "[":
            found.append(word)
            continue
        inner = words[: words.index("]")]
        words = words[len(inner) + 1 :]
        head = next(i for i, each in enumerate(inner) if each.endswith(":"))
        names = " ".join(inner[: head + 1]).rstrip(":").split()
        found += [each.replace("{}", name) for name in names for each in inner[head + 1 :]]
    return found


def evaluate(expression: str, figures: Mapping[str, float]) -> float:
    """The value of an expression of figures."""

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

    return of(ast.parse(expression, mode="eval").body)


def agrees(number: Number, source: str, figures: Mapping[str, float]) -> tuple[bool, float]:
    """Whether a printed number is what its source says, and that."""
    bound, value = source[0], evaluate(source.lstrip("<>"), figures)
    off, slack = number.value - value, number.unit * 1e-6 + 1e-9
    if bound == "<":
        return -slack <= off < number.unit, value
    if bound == ">":
        return -slack <= -off < number.unit, value
    return abs(off) <= number.unit / 2 + slack, value


# --- the two checks ----------------------------------------------------------------------------------------------------------


def results_of(root: Path) -> dict[str, dict[str, Any]]:
    """All results, by file name."""
    paths = sorted((root / RESULTS).glob("*.json"))
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}


class Page:
    """One page, checked: `faults` are (position, message), `text` has the values of the results."""

    def __init__(self, text: str, phrases: list[str], results: Mapping[str, Any]) -> None:
        self.original = text
        self.faults: list[tuple[int, str]] = []
        self._changes: list[tuple[Number, str]] = []
        self.unused = [phrase for phrase in phrases if not any(numbers(phrase)) or not phrase_spans(text, phrase)]
        free = [span for phrase in phrases for span in phrase_spans(text, phrase)]
        counted = [each for each in numbers(text) if not any(a <= each.start < b for a, b in free)]
        for start, end, mark in blocks(text):
            inside = [each for each in counted if start <= each.start < end]
            if mark is not None:
                self._bound(inside, sources(mark), results, start)
            else:
                every = bool(NAMES_RESULT.search(text, start, end))
                loose = [each for each in inside if each.measured or every]
                self.faults += [
                    (each.start, f"{each.text} is bound to no result and not in given.txt") for each in loose
                ]

    def _bound(self, inside: list[Number], words: list[str], results: Mapping[str, Any], start: int) -> None:
        figures: Mapping[str, float] | None = None
        waiting = list(inside)
        for word in words:
            if word.removesuffix(":").endswith(".json"):
                figures = results.get(word.removesuffix(":"), {}).get("figures")
                if figures is None:
                    self.faults.append((start, f"there is no result {word.removesuffix(':')}"))
                    return
            elif not waiting:
                self.faults.append((start, f"the mark goes on with {word}, and there is no number for it"))
                return
            else:
                self._one(waiting.pop(0), word, figures or {})
        self.faults += [(each.start, f"{each.text}: the mark of its block has nothing for it") for each in waiting]

    def _one(self, number: Number, source: str, figures: Mapping[str, float]) -> None:
        if source.startswith("="):
            if source[1:] != number.text:
                self.faults.append((number.start, f"{number.text}: its mark has {source}"))
            elif number.exact:
                self.faults.append((number.start, f"{number.text} looks measured: {source} will not do"))
            return
        try:
            right, value = agrees(number, source, figures)
        except (KeyError, ValueError, SyntaxError) as error:
            self.faults.append((number.start, f"{number.text}: {source} is of no figures ({error})"))
            return
        if not right:
            self.faults.append((number.start, f"{number.text}: {source} is {value:g}"))
            self._changes.append((number, number.like(value)))

    @property
    def text(self) -> str:
        """The page with the values of the results."""
        text = self.original
        for number, new in sorted(self._changes, key=lambda change: -change[0].start):
            text = text[: number.start] + new + text[number.start + len(number.text) :]
        return text


def check_pages(root: Path, write: bool = False) -> list[str]:
    """What is wrong with the numbers of all pages, a line each."""
    results, allowed, lines = results_of(root), given(root), []
    unused = {(page, phrase) for page, phrase, _ in allowed}
    for path in pages(root):
        name = str(path.relative_to(root))
        phrases = [(page, phrase) for page, phrase, _ in allowed if page in (name, "*")]
        page = Page(path.read_text(encoding="utf-8"), [phrase for _, phrase in phrases], results)
        unused -= {each for each in phrases if each[1] not in page.unused}
        lines += [f"{name}:{page.original.count(chr(10), 0, at) + 1}: {fault}" for at, fault in sorted(page.faults)]
        if write and page.text != page.original:
            path.write_text(page.text, encoding="utf-8")
    lines += [f"given.txt: {page} has no number in {phrase!r}" for page, phrase in sorted(unused)]
    for name, result in results.items():
        peers = [peer for peer in PEERS if any(peer in figure for figure in result["figures"])]
        if peers and not result.get("settings"):
            lines.append(f"{name} compares with {', '.join(peers)} and names no settings")
    return lines


def older(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """Results whose modules have changed: name, commit, modules that did, and commits of these since."""
    now: set[str] | None = None
    for name, result in results_of(root).items():
        changed = []
        for module, digest in result.get("measures", {}).items():
            if not files(module, root) or digests([module], root)[module] != digest:
                now = set(everywhere(root)) if now is None else now
                changed += [module] * (digest not in now)  # else it has only moved
        if "measures" not in result:
            changed = ["names none"]
        commit, short = result["commit"], result["commit"][:8]
        if git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
            yield name, f"{short} (not in the history)", " ".join(changed), "?"
        elif changed:
            places = [module.replace(".", "/") for module in changed]
            paths = [path for place in places for path in (place, f"{place}.py")]
            yield (
                name,
                short,
                " ".join(changed),
                git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *paths) or "?",
            )


def git(root: Path, *words: str) -> str | None:
    """What git says, or None."""
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def main() -> int:
    """Check, and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the results' values into the pages")
    parser.add_argument("--release", action="store_true", help="fail where a result is older than what it measured")
    options = parser.parse_args()
    faults = check_pages(ROOT, options.write)
    print(*faults, sep="\n", end="\n" if faults else "")
    if git(ROOT, "rev-parse", "HEAD") is None:
        print("figures: no git here, so it cannot be told whether the commits of results exist")
    stale = list(older(ROOT))
    if stale:
        print(
            f"{len(stale)} results are older than what they measured (result, commit, commits since, modules changed):"
        )
        for name, commit, changed, since in stale:
            print(f"  {name:40} {commit:10} {since:>4}  {changed.replace('antiphon.', '')}")
    print(f"figures: {len(faults)} numbers or results are wrong")
    return 1 if faults or (stale and options.release) else 0


if __name__ == "__main__":
    sys.exit(main())
