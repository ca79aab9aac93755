r"""Rewrites notations of numbers, intervals and sets to the ones in the grammar of `answer_reader`.

Each rule keeps the value: `½` is `\frac{1}{2}`, `√12` is `\sqrt{12}`, `0.(3)` is `\frac{1}{3}`, `]0,1[` is `(0,1)`.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_COUNTS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_COUNT = "|".join(_COUNTS)
_SPACE = r"(?:\\[,;: ]|~|\s)*"

# What the rare rules begin with: an answer without any of it is left as it is.
_RARE = re.compile(
    rf"[⁰¹²³⁴-⁹⁻¼-¾⅐-⅞√∛ℝ\]]|\[\s*(?:$|\\cup|∪)|sqrt|per ?cent|{_COUNT}|\\[()\[]|\\text\{{\s*\\%|\.[0-9]*\("
    r"|(?<=[0-9])'|\.[0-9]{3}\.|\{,\}|(?<=[0-9, ])(?:\\\$|[€£¥])$"
    r"|\\(?:rm|bf|num|lor|vee|underline|(?:text)?(?:degree|color))(?![A-Za-z])"
    rf"|\\(?:nicefrac|sfrac|over(?![a-z])|[lr]?vert|[lr]brace|[lr]angle|[bB]ig|angle|dot|bar|overline\s*\{{?[0-9A-Z]|mathbb|R(?![A-Za-z]))"
)


def _replace_count(found: re.Match[str]) -> str:
    count, unit = (found[1], found[2].strip()) if found[1] else (found[3], "")
    return rf"\times10^{{{_COUNTS[count]}}}" + (rf"\text{{{unit}}}" if unit else "")


_RULES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"^\\[(\[](.*)\\[)\]]$", re.DOTALL), r"\1"),
    (re.compile("[⁰¹²³⁴-⁹⁻]+"), lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}"),
    (
        re.compile("[¼-¾⅐-⅞]"),
        lambda found: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", found[0]).split("⁄")),
    ),
    (re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*([0-9]+(?:\.[0-9]+)?)"), r"\\sqrt{\1}"),
    (re.compile(r"∛\s*([0-9]+|[A-Za-z])"), r"\\sqrt[3]{\1}"),
    (re.compile(r"\\(?:nicefrac|sfrac)(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\([lr])brace(?![A-Za-z])"), lambda found: r"\{" if found[1] == "l" else r"\}"),
    (re.compile(r"\\([lr])angle(?![A-Za-z])"), lambda found: "(" if found[1] == "l" else ")"),
    (re.compile(r"\\(?:[Bb]igg?[lrm]?|angle)(?![A-Za-z])"), ""),
    (re.compile(r"^([A-Za-z]\s*\\in\s*)?(?:\\mathbb\{R\}|\\R|ℝ)$"), r"\1(-\\infty,\\infty)"),
    (re.compile(r"\\(?:rm|bf|underline)(?![A-Za-z])|\\(?:text)?color\{(?!white)[a-z]+\}"), ""),
    (re.compile(r"\\(?:lor|vee)(?![A-Za-z])"), r"\\text{or}"),
    (re.compile(r"\\num\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(?:text)?degree(?![A-Za-z])"), r"^\\circ"),
    (re.compile(r"^([0-9.,]+)(?:\\[, ]|[~ ])*(\\\$|[€£¥])$"), r"\2\1"),
    # numbers as other countries write them: 1'234'567, 1.234.567 and 0{,}5, but not 0,5, which may be a list
    (re.compile(r"(?<=[0-9])'(?=[0-9]{3}(?![0-9]))"), ""),
    (re.compile(r"^-?[1-9][0-9]{0,2}(?:\.[0-9]{3}){2,}$"), lambda found: found[0].replace(".", "")),
    (re.compile(r"^(-?[0-9]+)\{,\}([0-9]{1,2}|[0-9]{4,})$"), r"\1.\2"),
    # ]0,1[ is open
    (re.compile(r"(^|\\cup|∪|\\in|=)(\s*(?:\\left)?\s*)\](?=[^\[\]()]*,)"), r"\1\2("),
    (re.compile(r"(,[^\[\]()]*)\[(?=\s*(?:$|\\cup|∪))"), r"\1)"),
    (re.compile(r"\\\\\s*\[[0-9.]+(?:pt|em|ex|mm|cm)\]"), r"\\\\"),
    (re.compile(r"\\overline\{([A-Z]{2,})\}"), r"\1"),
    # words behind a number
    (re.compile(rf"{_SPACE}(?:\\text\{{\s*(?:per ?cent|\\%)\s*\}}|(?<![A-Za-z{{])per ?cent)$"), r"\\%"),
    (
        re.compile(rf"(?<=[0-9]){_SPACE}(?:\\text\{{\s*({_COUNT})\b([^{{}}]*)\}}|({_COUNT})(?![A-Za-z]))"),
        _replace_count,
    ),
    # periods
    (re.compile(r"\\dot\s*\{?([0-9])\}?([0-9]*)\\dot\s*\{?([0-9])\}?$"), r"\\bar{\1\2\3}"),
    (re.compile(r"(\.[0-9]*)\(([0-9]+)\)$"), r"\1\\bar{\2}"),
    (re.compile(r"\\(?:overline|bar|dot)\s*([0-9])$"), r"\\bar{\1}"),
    (re.compile(r"\\dot\{([0-9])\}$"), r"\\bar{\1}"),
]
_GROUPS_OF_THOUSANDS = re.compile(
    "(?<=[0-9])(?:\\\\[, ]|[~ \N{THIN SPACE}\N{NARROW NO-BREAK SPACE}])(?=[0-9]{3}(?![0-9]))"
)
_MIXED = re.compile(r"^(-?)([0-9]+)\s+([0-9]+)/([0-9]+)$")
_EXPONENT = re.compile(r"^(-?[0-9]*\.?[0-9]+)[eE]([+-]?[0-9]+)$")
_PERIODIC = re.compile(r"^(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar)\{([0-9]+)\}$")


@lru_cache(2048)
def rewrite_notation(answer: str) -> str:
    """Return the answer in the notation of the grammar."""
    answer = answer.strip().removesuffix(".").strip()
    if _RARE.search(answer):
        for pattern, replacement in _RULES:
            answer = pattern.sub(replacement, answer)
    answer = _GROUPS_OF_THOUSANDS.sub("", answer)
    answer = _MIXED.sub(r"\1\2\\frac{\3}{\4}", answer)
    answer = _EXPONENT.sub(r"\1\\times10^{\2}", answer)
    return _PERIODIC.sub(_write_period_as_fraction, answer)


def _write_period_as_fraction(found: re.Match[str]) -> str:
    sign, whole, once, period = found.groups()
    top = int(whole + once + period) - int(whole + once or 0)
    value = Fraction(top, (10 ** len(period) - 1) * 10 ** len(once))
    return f"{sign}{value}" if value.denominator == 1 else sign + rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
