r"""Answers of outsiders for 82, for option C and for other graders: what must not be paid, and notations that must be."""

NUMBER = {"answer": "82"}
CHOICE = {"answer": "C", "choices": ["red", "blue", "green", "grey"]}

# After "The answer is".
NO_82 = [
    *("82 dozens", "82 gross", "82 lakh", "82 crore", "82 quadrillion", "82 thirds", "82 halves", "82 fifths", "82 sevenths"),
    *("82 and a half", "82 and one third", "82 point five", "82½", "82¼", "82⅓", "82⁴", "82⁻¹", "82ⁿ", "82₉", "82٪", "82‰"),
    *("82８", "82\u0338", "8\u03362\u0336", "∛82", "∑82", "⩽82", "≧82", "≪82", "≢82", "∓82", "－82", "﹣82", "⁻82", "‑82"),
    *("minus $82", r"-\$82", "-{82}", "-(82)", r"-\left(82\right)", r"-\text{82}", r"-\mathrm{82}", r"-\,82", "-~82", "-+82"),
    *("minus about 82", "the negative, 82", "0,082", "000,082", "far from 82", "different from 82", "unequal to 82"),
    *("cannot be 82", "nowhere near 82", "excluding 82", "incorrect, 82", "no 82", "82 is the wrong answer", "82 is false"),
    *("82 isn't correct", "82 can't be right", "82 cannot be", "82? Nope", "82 is impossible", "82 is ruled out"),
    *("a third of 82", "the square of 82", "the reciprocal of 82", "a multiple of 82", "thrice 82", "ten times 82"),
    *("82 in octal", "82 (octal)", "82 binary", "82 times itself", "82 to the fourth", "82 choose two", "82 modulo nine"),
    *("82 multiplied by nine", "82 reversed", r"82\,\text{thousand}", "**82** million", "82-thousand", "82 per hundred"),
    *("82 thousand million", r"82\mathrm{ million}", "82 permille", "82 basis points", "either 82", "~~82~~", "<s>82</s>"),
    *(r"83\frac{-1}{1}", "82" + " " * 1000 + "or 83"),
]
# In a box.
NO_82_BOXED = [
    *(r"82\text{ isn't right}", r"82\text{ cannot be}", r"82\text{ nope}", r"82\text{ impossible}", r"82\text{ rejected}"),
    *(r"82\text{ thirds}", r"82\text{ halves}", r"82\text{ dozens}", r"82\text{ gross}", r"82\text{ lakh}", r"82\text{ crore}"),
    *(r"82\text{ quadrillion}", r"82\text{ point five}", r"82\text{ octal}", r"82\text{ hex}", r"82\text{ modulo nine}"),
    *(r"82\text{ times itself}", r"82\text{ choose two}", r"82\text{ divided by two}", r"82\text{ nine}", r"82\text{ reversed}"),
    *(r"82\text{ per hundred}", "0,082", "0{,}082", r"\phantom{82}", r"\cancel{82}", r"\color{white}82", r"\not{82}", "-(82)"),
    *(r"83\boxed{82}", r"\text{not }\boxed{82}", r"\boxed{82}\boxed{83}", r"x\in\{82,83\}", r"82\pmod{83}", "82^{1}", "82½"),
    *("82⁰", "８２", "82‰", r"-\$82", r"82\text{ or }\boxed{82}", r"82\le x\le 82", r"82\ne 83", "82!", r"82\choose1"),
]
# Right answer, what is boxed, and whether arithmetic is allowed.
NOT_EQUAL = [
    ("82", r"41\frac{82}{2}", True),  # a sum to some, a product to others
    ("82", r"37\frac{45}{1}", True),
    ("|x+4|", "x+4", False),
    ("|x-3|", "3-x", False),
    (r"\sqrt{(x+5)^2}", "x+5", False),
    (r"\frac{1}{13983816}", "0.000000", False),
    (r"\frac{1}{3000000}", "0.0000000", False),
    (r"-\frac{1}{7000000}", "0.000000", False),
    ("[0,1]", "0,1", False),
    ("(0,1]", "0,1", False),
    ("82", r"x\cdot 2=82", False),
    ("82", "x*2=82", False),
    ("B", r"\overline{B}", False),
    (r"10^{-9}\pi", "0.000000", False),
]
NO_C = [
    *("The answer is C\u0336.", "The answer is <s>C</s>.", "The answer is <del>C</del>.", "Answer: 🚫 C", "Answer: C ⛔", "Answer: C 👎"),
    *("Answer: C is ruled out", "Answer: C can be eliminated", "Answer: C must be wrong", "Answer: C has been rejected"),
    *("Answer: C is refuted", "Answer: C is disproved", "Answer: C? Nope", "Answer: C wasn't it", "Answer: C is a distractor"),
    *("The answer is different from C.", "The answer is unlike C.", "Answer: ruling out C", "The answer is impossible: C"),
    *("Answer: either C", r"\boxed{B\boxed{C}}", r"\boxed{\text{not }\boxed{C}}"),
]
NO_SQL = [
    "VALUES (6)",
    "SELECT sum(a) FROM t WHERE a < 4",
    "SELECT count(*) * 2 FROM t",
    "SELECT max(a) + max(a) FROM t",
    "SELECT sum(a) FROM t, t AS b",
    "SELECT sum(a) FROM t UNION SELECT 0",
    "SELECT CASE WHEN EXISTS (SELECT 1 FROM t WHERE a = 1) THEN 6 ELSE 10 END",
    "SELECT group_concat(a) FROM t",
    "SELECT sum(DISTINCT a) || '' FROM t",
    "WITH t(a) AS (VALUES (1), (2), (3)) SELECT sum(a) FROM t",
    "SELECT sum(a) FROM main.t LIMIT 0",
    "SELECT * FROM pragma_table_info('t')",
    "REPLACE INTO t VALUES (6)",
    "SELECT readfile('/etc/passwd')",
    "SELECT NULL",
    "SELECT 6.0000001",
]
# Followed 20 words, no "maybe", and the end.
END = "Is there anything else?"
NO_FORM = {
    "a word parted by signs without width": "w\u200bo\u200br\u200bd " * 6 + END,
    "words parted by soft hyphens": "un\u00adfor\u00adget\u00adta\u00adble " * 4 + END,
    "a forbidden word with a sign without width": "may\u200bbe " + "word " * 20 + END,
    "a forbidden word with a soft hyphen": "may\u00adbe " + "word " * 20 + END,
    "a forbidden word with a joiner": "may\u2060be " + "word " * 20 + END,
    "a forbidden word from right to left": "may\u202ebe " + "word " * 20 + END,
    "the end and a sign of another script": "word " * 20 + END + "؟",
    "the end in a comment": "word " * 20 + f"<!-- {END} -->",
}
# By grader, payload and options: notations that are as good as the usual one.
NOTATIONS = [
    ("numeric", NUMBER, ["The answer is **82**.", "The answer is $82$.", r"The answer is \(82\).", "answer: 82 km/h", "#### 82 "]),
    ("numeric", NUMBER, ["The answer is $82.00.", r"\boxed{\$82}", r"\boxed{\text{82}}", r"\boxed{82\,\text{cm}}", r"\boxed {82}"]),
    ("numeric", NUMBER, [r"\boxed{\boxed{82}}", r"\boxed{\mathbf{82}}", "The answer is 82, isn't it?", "The answer is 82 points."]),
    ("numeric", NUMBER, ["The answer is 82 to the nearest integer.", "The answer is 82 quarters."]),
    ("numeric", {"answer": "-82"}, ["The answer is －82.", r"\boxed{-\$82}", "The answer is minus $82.", "The answer is ‑82."]),
    ("numeric", {"answer": "82000"}, ["The answer is 82,000.", r"\boxed{82{,}000}", "The answer is 82 thousand.", r"\boxed{82\text{ thousand}}"]),
    ("numeric", {"answer": "82.5"}, ["The answer is 82 1/2.", r"\boxed{82\frac{1}{2}}", r"\boxed{\frac{165}{2}}", "The answer is 8.25 × 10^1."]),
    ("math", NUMBER, [r"\boxed {82}", r"\boxed{\boxed{82}}", r"\boxed{\mathbf{82}}", r"\boxed{\left(82\right)}", r"\boxed{82.}"]),
    ("math", NUMBER, [r"\boxed{\displaystyle 82}", r"\boxed{82\,\mathrm{cm}}", r"\boxed{82^{\circ}}", r"\boxed{\textrm{82}}", r"\boxed{82\degree}"]),
    ("math", NUMBER, [r"\boxed{82\text{ points}}", r"\boxed{82\$}", r"\boxed{82\,€}", r"\boxed{\rm 82}", r"\boxed{\num{82}}"]),
    ("math", {"answer": "1234567"}, [r"\boxed{1'234'567}", r"\boxed{1.234.567}", r"\boxed{1\,234\,567}", r"\boxed{1{,}234{,}567}"]),
    ("math", {"answer": "0.5"}, [r"\boxed{0{,}5}", r"\boxed{\frac12}", r"\boxed{5\cdot10^{-1}}", r"\boxed{50\,\%}", r"\boxed{\frac 1 2}"]),
    ("math", {"answer": "82"}, [r"\boxed{\[82\]}", r"\boxed{\underline{82}}", r"\boxed{\color{blue}{82}}", r"\boxed{\textcolor{red}{82}}"]),
    ("math", {"answer": r"\{1,2\}"}, [r"\boxed{x=1 \lor x=2}", r"\boxed{\{1;2\}}", r"\boxed{x=1,\ x=2}", r"\boxed{\lbrace 2,1\rbrace}"]),
    ("math", {"answer": "AB=5"}, [r"\boxed{\overline{AB}=5}"]),
    ("math", {"answer": "(1,2)"}, [r"\boxed{1,2}", r"\boxed{(1;2)}"]),
    ("math", {"answer": "a-b"}, [r"\boxed{a-b}", r"\boxed{-b+a}", r"\boxed{a - b}"]),
    ("math", {"answer": "|x+4|"}, [r"\boxed{|x+4|}", r"\boxed{|4+x|}", r"\boxed{|-x-4|}", r"\boxed{\sqrt{(x+4)^2}}"]),
    ("math", {"answer": r"\cosh^2 x"}, [r"\boxed{\frac{(e^x+e^{-x})^2}{4}}", r"\boxed{1+\sinh^2 x}"]),
    ("math", {"answer": r"\sqrt{xy}"}, [r"\boxed{(xy)^{1/2}}", r"\boxed{\sqrt{yx}}"]),
    ("math", {"answer": r"\frac{1}{810}"}, [r"\boxed{0.001235}", r"\boxed{0.00123457}"]),
    ("multiple_choice", CHOICE, [r"\boxed {C}", r"\boxed{\boxed{C}}", "The answer is C, the most likely one.", "Answer: C) green"]),
]
