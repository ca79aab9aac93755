r"""Reads a mathematical answer, in LaTeX or plain text, as a tree: bounded in size, and without computing anything.

A grammar of answers rather than of mathematics: numbers, closed forms, expressions in unknowns, lists, sets, tuples, intervals
and their unions, matrices, equations and inequalities. Sums, integrals, limits, products and set-builders are no answers, so
they cannot be read. Work is linear in the length of the text, which is bounded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

LONGEST = 1_000  # characters
DEEPEST = 25  # levels of brackets, fractions and powers
DEEPEST_TREE = 100  # levels of operations
MOST_DIGITS = 60  # of one number
MOST_TOKENS = 300
ROW = "\n"  # what `\\\\` between the rows of a matrix is read as


class UnreadableAnswerError(ValueError):
    """The text is no answer that the grammar knows, or too large to be one."""


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an answer.

    Kinds: number (`value`; `places` after the point, -1 without one), symbol (`name`), constant (`name`: pi, e, i, oo), add,
    mul, div, pow, neg, root (degree, radicand), call (`name`; arguments), factorial, mixed (whole, fraction), percent, degrees,
    plusminus, list, set, sequence (`name`: its brackets), union, matrix (rows), relation (`name`: = < > <= >= ~ in; sides).
    """

    kind: str
    parts: tuple["Node", ...] = ()
    name: str = ""
    value: Fraction | None = None
    places: int = -1

    def walk(self) -> Iterator["Node"]:
        """Yield this node and all below it."""
        yield self
        for part in self.parts:
            yield from part.walk()


_TOKEN = re.compile(
    r"(?P<number>[1-9][0-9]{0,2}(?:(?:,|\{,\})[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|\\(?:begin|end)\{(?P<matrix>[bpB]?(?:small)?matrix\*?|array)\}(?:\{[clr|]*\}|\[[clr]\])?"
    r"|\\(?:text(?:bf|rm|sf|it|normal)?|math(?:rm|bf|sf|it)|mbox|operatorname|boldsymbol)\{(?P<text>[^{}]*)\}"
    r"|\\(?P<command>[A-Za-z]+)"
    r"|(?<![A-Za-z])(?P<word>and|or|sqrt|pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])"
    r"|(?P<letter>[A-Za-z])"
    r"|(?P<sign>\\[{}|%]|[<>!]=|[-+*/^_=<>()\[\]{}|,;:!%&\n\N{DEGREE SIGN}])"
    r"|(?P<other>\S)"
)
_NUMERAL = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_OPENING, _CLOSING = {"(", "[", r"\{"}, {")", "]", r"\}"}
_JOINED = re.compile(r"\\!\s*")
_SPACES = re.compile(r"\\[,;: ]|\\(?:left|right|displaystyle|quad|qquad|limits)(?![A-Za-z])|[~$ ]+")
_SYNONYMS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{MIDDLE DOT}": "*",
        "\N{DIVISION SIGN}": "/",
    }
)
_UNICODE = {"π": "pi", "∞": "infty", "√": "sqrt", "≤": "le", "≥": "ge", "≈": "approx", "±": "pm", "∪": "cup"}
_UNICODE |= {"∈": "in", "∅": "emptyset"}
_FUNCTIONS = {
    *("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh"),
    *("ln", "log", "lg", "exp"),
}
_GREEK = {
    *(
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "varepsilon",
        "zeta",
        "eta",
        "theta",
        "iota",
        "kappa",
        "lambda",
        "mu",
    ),
    *("nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Delta", "Gamma", "Omega", "Phi"),
}
_TIMES = {"cdot", "times", "div"}
_RELATIONS = {
    **{
        "=": "=",
        "<": "<",
        ">": ">",
        "<=": "<=",
        ">=": ">=",
        "!=": "!=",
        "ne": "!=",
        "neq": "!=",
        "le": "<=",
        "leq": "<=",
        "leqslant": "<=",
        "lt": "<",
        "gt": ">",
    },
    **{"ge": ">=", "geq": ">=", "geqslant": ">=", "approx": "~", "in": "in"},
}
_WORDS_BETWEEN = {"and", "or", ","}


def read_answer(text: str) -> Node:
    """Return the tree of an answer; `UnreadableAnswerError` if it is none, or larger than an answer may be."""
    if len(text) > LONGEST:
        raise UnreadableAnswerError(f"the answer has {len(text)} characters, more than {LONGEST}")
    reader = _Reader(_tokens(text))
    node = reader.read_list()
    if reader.kind:
        raise UnreadableAnswerError(f"{reader.text!r} is not understood there")
    _check_depth(node)
    return node


def _check_depth(node: Node) -> None:
    """Raise `UnreadableAnswerError` for a tree that is deeper than recursion over it may be, such as a long product."""
    depth, level = 0, [node]
    while level := [part for parent in level for part in parent.parts]:
        depth += 1
        if depth > DEEPEST_TREE:
            raise UnreadableAnswerError(f"the answer has more than {DEEPEST_TREE} operations within one another")


def _tokens(text: str) -> list[tuple[str, str]]:
    """Split into (kind, text); spaces and typesetting are left out."""
    text = " ".join(text.split()).replace(r"\\", ROW).replace("**", "^").translate(_SYNONYMS)
    text = _SPACES.sub(" ", _JOINED.sub("", text))
    found: list[tuple[str, str]] = []
    depth = 0
    for match in _TOKEN.finditer(text):
        kind, token = str(match.lastgroup), match[str(match.lastgroup)]
        depth += (token in _OPENING) - (token in _CLOSING) if kind == "sign" else 0
        if kind == "number" and depth > 0 and "," in token.replace("{,}", ""):  # in brackets, commas separate
            parts = token.split(",")
            found += [piece for part in parts for piece in (("sign", ","), ("number", part))][1:]
            continue
        if kind == "matrix":
            token = match[0][1:4]  # "beg" or "end"
        elif kind == "text":
            token = token.strip().lower()
            kind = "number" if _NUMERAL.fullmatch(token) else kind
        elif kind == "word":
            kind = "text" if token in _WORDS_BETWEEN else "command"
        elif kind == "other" and token in _UNICODE:
            kind, token = "command", _UNICODE[token]
        elif kind == "command" and token in {"dfrac", "tfrac", "cfrac"}:
            token = "frac"
        found.append((kind, token))
    if len(found) > MOST_TOKENS:
        raise UnreadableAnswerError(f"the answer has {len(found)} symbols, more than {MOST_TOKENS}")
    return found


class _Reader:
    """Recursive descent over the tokens of one answer."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = [*tokens, ("", "")]
        self._place = 0
        self._depth = 0

    @property
    def kind(self) -> str:
        """Kind of the next token; empty at the end."""
        return self._tokens[self._place][0]

    @property
    def text(self) -> str:
        """Text of the next token."""
        return self._tokens[self._place][1]

    def _next(self) -> str:
        self._place += 1
        return self._tokens[self._place - 1][1]

    def _accept(self, kind: str, *texts: str) -> str:
        """Take the next token if it is one of these; return it, or an empty string."""
        return self._next() if self.kind == kind and self.text in texts else ""

    def _expect(self, *signs: str) -> str:
        if self.kind == "sign" and self.text in signs:
            return self._next()
        raise UnreadableAnswerError(f"expected {' or '.join(signs)} before {self.text or 'the end'!r}")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise UnreadableAnswerError(f"the answer has more than {DEEPEST} levels")

    # --- lists and relations -------------------------------------------------------------------------------------------

    def read_list(self) -> Node:
        """Read what commas, semicolons, "and" or "or" separate; one item stands for itself."""
        items = [self._relation()]
        while self._accept("sign", ",", ";") or self._accept("text", *_WORDS_BETWEEN):
            while self._accept("text", *_WORDS_BETWEEN):  # ", and"
                pass
            items.append(self._relation())
        return items[0] if len(items) == 1 else Node("list", tuple(items))

    def _relation(self) -> Node:
        node = self._union()
        sign = self._relation_sign()
        if not sign:
            return node
        node = Node("relation", (node, self._union()), sign)
        if (second := self._relation_sign()) and sign in {"<", "<="} and second in {"<", "<="}:  # a < x < b
            return Node("relation", (*node.parts, self._union()), f"{sign} {second}")
        if second:
            raise UnreadableAnswerError("an answer has one equation at the most")
        return node

    def _relation_sign(self) -> str:
        if self.kind in {"sign", "command"} and self.text in _RELATIONS:
            return _RELATIONS[self._next()]
        return ""

    def _union(self) -> Node:
        parts = [self._sum()]
        while self._accept("command", "cup"):
            parts.append(self._sum())
        return parts[0] if len(parts) == 1 else Node("union", tuple(parts))

    # --- expressions ---------------------------------------------------------------------------------------------------

    def _sum(self) -> Node:
        terms = [self._signed()]
        while self.text in {"sign": ("+", "-"), "command": ("pm", "mp")}.get(self.kind, ()):
            terms.append(self._signed())
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _signed(self) -> Node:
        self._deeper()
        if self._accept("sign", "-"):
            node = Node("neg", (self._signed(),))
        elif self._accept("sign", "+"):
            node = self._signed()
        elif self._accept("command", "pm", "mp"):
            node = Node("plusminus", (self._product(),))
        else:
            node = self._product()
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._power()
        while True:
            if self._accept("sign", "*") or self._accept("command", "cdot", "times"):
                node = Node("mul", (node, self._unary()), "*")  # other than of `f(2)`, which is a name
            elif self._accept("sign", "/", ":") or self._accept("command", "div"):
                node = Node("div", (node, self._unary()))
            elif self._begins_factor():
                before, after = node, self._power()
                mixed = _is_whole(before) and after.kind == "div" and all(map(_is_whole, after.parts))
                node = Node("mixed" if mixed else "mul", (before, after))
            else:
                return node

    def _unary(self) -> Node:
        return Node("neg", (self._power(),)) if self._accept("sign", "-") else self._power()

    def _begins_factor(self) -> bool:
        if self.kind == "command":
            return self.text in {"frac", "sqrt", "pi", "binom", "infty", "lfloor", "lceil", *_FUNCTIONS, *_GREEK}
        if self.kind == "text":
            return self.text in {"e", "i"}
        return self.kind == "letter" or (self.kind == "sign" and self.text in "([{")

    def _power(self) -> Node:
        base = self._base()
        while True:
            if self._accept("sign", "^"):
                if self.kind == "command" and self.text == "circ":
                    self._next()
                    base = Node("degrees", (base,))
                    continue
                base = Node("pow", (base, self._argument()))
            elif self._accept("sign", "!"):
                base = Node("factorial", (base,))
            elif self._accept("sign", "%", r"\%"):
                base = Node("percent", (base,))
            elif self._accept("sign", "\N{DEGREE SIGN}"):
                base = Node("degrees", (base,))
            else:
                return base

    def _argument(self) -> Node:
        r"""Read what follows `^`, `_`, `\frac` or `\sqrt`: a group in braces, or one sign."""
        self._deeper()
        if self._accept("sign", "{"):
            node = self._sum()
            if self.kind == "command" and self.text == "circ":  # ^{\circ} stands alone
                raise UnreadableAnswerError("degrees are written ^\\circ")
            self._expect("}")
        elif self.kind == "number" and len(self.text) > 1 and "." not in self.text:  # \frac12
            text = self.text
            self._tokens[self._place] = ("number", text[1:])
            node = _number(text[0])
        elif self._accept("sign", "-"):
            node = Node("neg", (self._base(),))
        else:
            node = self._base()
        self._depth -= 1
        return node

    def _base(self) -> Node:
        self._deeper()
        kind, text = self.kind, self.text
        if kind == "number":
            node = _number(self._next())
        elif kind == "letter":
            self._next()
            node = Node("constant", name=text) if text in "ei" else Node("symbol", name=text + self._subscript())
        elif kind == "sign" and text in {"(", "[", "{", r"\{", "|"}:
            node = self._group(self._next())
        elif kind == "command":
            node = self._command(self._next())
        elif kind == "matrix" and text == "beg":
            node = self._matrix()
        elif kind == "text" and len(text) == 1 and text.isalpha():
            self._next()
            node = Node("constant" if text in "ei" else "symbol", name=text)
        else:
            raise UnreadableAnswerError(f"{text or 'the end'!r} is not understood there")
        self._depth -= 1
        return node

    def _subscript(self) -> str:
        if not self._accept("sign", "_"):
            return ""
        name = "".join(part.name or str(part.value) for part in self._argument().walk() if not part.parts)
        return f"_{name}"

    def _group(self, opening: str) -> Node:
        closing = {"(": (")", "]"), "[": (")", "]"), "{": ("}",), "|": ("|",)}.get(opening, (r"\}",))
        if opening == r"\{" and self._accept("sign", r"\}"):
            return Node("set")
        node = self.read_list()
        closed = self._expect(*closing)
        items = node.parts if node.kind == "list" else (node,)
        if opening == r"\{" or (opening == "{" and node.kind == "list"):
            return Node("set", items)
        if opening == "|":
            return Node("call", (node,), "abs")
        if node.kind == "list":
            return Node("sequence", items, opening + closed)
        if opening + closed not in {"()", "[]", "{}"} or node.kind not in _SINGLE:
            raise UnreadableAnswerError(f"{opening} and {closed} stand around no pair")
        return node

    def _command(self, name: str) -> Node:
        if name == "frac":
            return Node("div", (self._argument(), self._argument()))
        if name == "binom":
            return Node("call", (self._argument(), self._argument()), "binom")
        if name == "sqrt":
            return self._root()
        if name in {"pi", "infty"}:
            return Node("constant", name={"infty": "oo"}.get(name, name))
        if name in {"emptyset", "varnothing"}:
            return Node("set")
        if name in _GREEK:
            return Node("symbol", name=name + self._subscript())
        if name in {"lfloor", "lceil"}:
            return self._whole_part(name)
        if name in _FUNCTIONS:
            return self._function(name)
        raise UnreadableAnswerError(f"\\{name} is no part of an answer")

    def _root(self) -> Node:
        degree = Node("number", value=Fraction(2))
        if self._accept("sign", "["):
            degree = self._sum()
            self._expect("]")
        return Node("root", (degree, self._argument()))

    def _whole_part(self, name: str) -> Node:
        node = self._sum()
        if not self._accept("command", f"r{name[1:]}"):
            raise UnreadableAnswerError(f"\\{name} is not closed")
        return Node("call", (node,), {"lfloor": "floor", "lceil": "ceil"}[name])

    def _function(self, name: str) -> Node:
        base = (self._argument(),) if self._accept("sign", "_") else ()
        power = self._argument() if self._accept("sign", "^") else None
        argument = self._power() if self.kind == "sign" else self._open_argument()
        if power == _INVERSE and name in {"sin", "cos", "tan"}:
            return Node("call", (argument,), f"arc{name}")
        node = Node("call", (argument, *base), name)
        return node if power is None else Node("pow", (node, power))

    def _open_argument(self) -> Node:
        r"""Read `2x` of `\sin 2x\cos x`: factors without a sign between them, up to the next function."""
        node = self._unary()
        while self._begins_factor() and self.text not in _FUNCTIONS:
            node = Node("mul", (node, self._power()))
        return node

    def _matrix(self) -> Node:
        self._next()
        rows, row = [], [self._relation()]
        while not (self.kind == "matrix" and self.text == "end"):
            if self._accept("sign", "&"):
                row.append(self._relation())
            elif self._accept("sign", ROW):
                rows.append(Node("list", tuple(row)))
                row = [self._relation()] if not (self.kind == "matrix" and self.text == "end") else []
            else:
                raise UnreadableAnswerError("a matrix is not closed")
        self._next()
        if row:
            rows.append(Node("list", tuple(row)))
        return Node("matrix", tuple(rows))


_INVERSE = Node("neg", (Node("number", value=Fraction(1)),))
_SINGLE = {
    *(
        "number",
        "symbol",
        "constant",
        "add",
        "mul",
        "div",
        "pow",
        "neg",
        "root",
        "call",
        "factorial",
        "mixed",
        "percent",
    ),
    *("degrees", "matrix", "set", "sequence", "union"),
}


def _number(text: str) -> Node:
    digits = text.replace("{,}", "").replace(",", "")
    if len(digits) > MOST_DIGITS:
        raise UnreadableAnswerError(f"a number has {len(digits)} digits, more than {MOST_DIGITS}")
    return Node("number", value=Fraction(digits + "0" if digits.endswith(".") else digits), places=_places(digits))


def _places(digits: str) -> int:
    return len(digits.partition(".")[2]) if "." in digits else -1


def _is_whole(node: Node) -> bool:
    return node.kind == "number" and node.places < 0
