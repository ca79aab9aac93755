"""Tests of the check of documented numbers: changes on either side are found, and results of changed code are listed."""

import json
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from antiphon.simulate.speed_estimate import HANDOVER
from tools import figures
from tools.figures import Page, check_pages, find_numbers, find_stale, read_results

ROOT = Path(__file__).parents[2]
RESULTS = {"speed.json": {"figures": {"ratio": 1.6337, "share": 0.0617, "count": 11520, "alpha_0.5": -0.0879}}}
TEXT = "It is 1.63 times as fast, 6.2 % off, in 11,520 attempts of 8; the gain is −0.09.\n"
MARK = "<!-- figures speed.json: ratio 100*share count =8 'alpha_0.5' -->\n"


def faults(text, *phrases, results=RESULTS):
    return [message for _, message in Page(text, list(phrases), results).faults]


def test_a_page_that_agrees_with_its_results():
    assert faults(TEXT + MARK) == []


@pytest.mark.parametrize(
    ("before", "after"), [("1.63", "1.64"), ("6.2", "6.1"), ("11,520", "11,521"), ("of 8", "of 9"), ("−0.09", "0.09")]
)
def test_a_number_that_is_changed_in_the_text(before, after):
    assert len(faults(TEXT.replace(before, after) + MARK)) == 1


@pytest.mark.parametrize(("name", "off"), [("ratio", 0.01), ("share", 0.001), ("count", 1), ("alpha_0.5", 0.01)])
def test_a_number_that_is_changed_in_the_result(name, off):
    changed = {"speed.json": {"figures": RESULTS["speed.json"]["figures"] | {name: 0}}}
    assert len(faults(TEXT + MARK, results=changed)) == 1
    changed["speed.json"]["figures"][name] = RESULTS["speed.json"]["figures"][name] + off
    assert len(faults(TEXT + MARK, results=changed)) == 1


def test_two_numbers_that_change_places():
    assert len(faults(TEXT.replace("1.63", "x").replace("6.2", "1.63").replace("x", "6.2") + MARK)) == 2


@pytest.mark.parametrize(
    "text",
    [
        "It is 1.63 times as fast.",
        "It takes 12 s.",
        "It takes 12 seconds.",
        "It is 86 % of that.",
        "It makes 320 a second.",
        "It is 3 × as fast.",
        "It takes 5 GiB.",
        "It was 11,520 of them.",
        "It is 1.63x as fast.",
        "It took 40s.",
        "It makes 320/s.",
        "It makes 320 tokens per second.",
        "It is a 3-fold gain.",
        "By `python benchmarks/speed.py`, 40 of them.",
        "| a | b |\n|---|---|\n| row | 0.87 |",
    ],
)
def test_a_number_that_looks_measured_and_is_bound_to_nothing(text):
    assert len(faults(text + "\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Of 8 prompts.",
        "`0.5` in code",
        "```yaml\nrate: 0.5\n```",
        "[a](b.md#1.5)",
        "8 × 8",
        "arXiv 2510.11345",
        "v0.32.0",
        "<!-- 1.5 -->",
        "GPT-4.5 or 99th",
        "| 0.5 | 20 % |\n|---|---|\n| 1.5 | 8 |",
    ],
)
def test_numbers_that_measure_nothing(text):
    assert faults(text + "\n") == []


def test_both_ends_of_a_range_are_checked():
    assert len(faults("It takes 6.4–7.1 GiB, or 3-4 s.\n")) == 3


def test_what_is_allowed_stands_in_its_phrase_only():
    assert faults("A bound of\n0.28.\n", "bound of 0.28") == []
    assert len(faults("A bound of 0.29.\n", "bound of 0.28")) == 1
    assert Page("A bound of 0.29.\n", ["bound of 0.28"], RESULTS).unused == ["bound of 0.28"]


@pytest.mark.parametrize(
    "mark",
    [
        "speed.json: ratio ratio",
        "speed.json:",
        "speed.json: other",
        "slow.json: ratio",
        "speed.json: =1.63",
        "speed.json: 1.63",
        "speed.json: max(1.63,1)",
        "speed.json: ratio/0",
        "speed.json: [ ratio: {}",
        "speed.json: [ ratio ]",
        "speed.json: ratio+",
    ],
)
def test_marks_that_do_not_fit(mark):
    assert len(faults(f"It is 1.63 times.\n<!-- figures {mark} -->\n")) == 1


@pytest.mark.parametrize(("printed", "value", "right"), [("4", 3.91, True), ("4", 4.1, False), ("5", 3.91, False)])
def test_a_bound_is_rounded_away_from_the_value(printed, value, right):
    text = f"It is within {printed} %.\n<!-- figures a.json: <off -->\n"
    assert (faults(text, results={"a.json": {"figures": {"off": value}}}) == []) is right


@pytest.mark.parametrize(
    ("printed", "value", "right"),
    [
        ("0.88", 0.875, True),
        ("0.87", 0.875, False),
        ("0.99", 0.995, True),
        ("8", 7.5, True),
        ("3e-4", 0.0003, True),
        ("0.6", 0.64, True),
        ("0.7", 0.64, False),
        ("1,718", 1717.5055, True),
        ("−0.09", -0.0879, True),
    ],
)
def test_numbers_are_rounded_to_the_printed_digits(printed, value, right):
    text = f"It is {printed} there.\n<!-- figures a.json: key -->\n"
    assert (faults(text, results={"a.json": {"figures": {"key": value}}}) == []) is right


def test_brackets_stand_for_the_same_of_each_name():
    assert figures.expand_comment("<!-- figures a.json: x [ b c: {}_1 100*{} ] 'd e' -->") == [
        *("a.json:", "x", "b_1", "100*b", "c_1", "100*c", "'d e'")
    ]


def test_values_are_put_into_the_text_as_they_were_printed():
    results = {"speed.json": {"figures": {"ratio": 2.7, "share": 0.05, "count": 12345, "alpha_0.5": 0.1}}}
    written = Page(TEXT + MARK, [], results).text
    assert written == "It is 2.70 times as fast, 5.0 % off, in 12,345 attempts of 8; the gain is 0.10.\n" + MARK
    assert faults(written, results=results) == []


@pytest.mark.parametrize(
    ("printed", "value", "written"),
    [("4", 3.2, "4"), ("0.51", 0.2559, "0.26"), ("300", 296.4, "297"), ("0.2", 0.3, "0.3")],
)
def test_bounds_are_put_into_the_text_rounded_away_from_the_value(printed, value, written):
    results = {"a.json": {"figures": {"off": value, "rest": -value}}}
    text = "It is within {} %, and above −{} %.\n<!-- figures a.json: <off >rest -->\n"
    page = Page(text.format(printed, printed), [], results)
    assert page.text == text.format(written, written)
    assert faults(page.text, results=results) == []


def test_each_number_of_our_own_pages_is_held():
    """A digit is changed in drawn places; each has to be noticed."""
    draw, results, tried = random.Random(0), read_results(ROOT), 0
    for path in figures.list_pages(ROOT):
        text = path.read_text(encoding="utf-8")
        phrases = [
            phrase for page, phrase, _ in figures.read_exceptions(ROOT) if page in (str(path.relative_to(ROOT)), "*")
        ]
        free = [span for phrase in phrases for span in figures.find_phrase(text, phrase)]
        marked = [(start, end) for start, end, mark in figures.split_blocks(text) if mark]
        held = [
            each
            for each in find_numbers(text)
            if any(a <= each.start < b for a, b in marked) and not any(a <= each.start < b for a, b in free)
        ]
        for each in draw.sample(held, min(4, len(held))):
            at = each.start + max(i for i, sign in enumerate(each.text) if sign.isdigit())
            changed = text[:at] + str((int(text[at]) + draw.randint(1, 9)) % 10) + text[at + 1 :]
            assert Page(changed, phrases, results).faults, f"{path.name}: {each.text}"
            tried += 1
    assert tried > 50


# --- results that are older than what they measured --------------------------------------------------------------------------


def git(root, *words):
    return subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True, capture_output=True
    )


@pytest.fixture
def project(tmp_path):
    """A repository with a module, and a result of it."""
    if shutil.which("git") is None:
        pytest.skip("not installed on this system: git")
    (tmp_path / "antiphon" / "rooms").mkdir(parents=True)
    (tmp_path / "antiphon" / "rooms" / "a.py").write_text(
        '"""A."""\nimport os\n\n\ndef f(x):\n    """F."""\n    return x + 1\n'
    )
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "unbound_numbers.txt").write_text("# none\n")
    (tmp_path / "README.md").write_text("It is 1.63 times as fast.\n<!-- figures speed.json: ratio -->\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    commit = git(tmp_path, "rev-parse", "HEAD").stdout.decode().strip()
    write(
        tmp_path,
        {
            "commit": commit,
            "measures": figures.digest_modules(["antiphon.rooms.a"], tmp_path),
            "figures": {"ratio": 1.63},
        },
    )
    return tmp_path


def write(root, result):
    (root / figures.RESULTS).mkdir(parents=True, exist_ok=True)
    (root / figures.RESULTS / "speed.json").write_text(json.dumps(result))


def stale(root):
    return list(find_stale(root))


def change(root, before, after):
    path = root / "antiphon" / "rooms" / "a.py"
    path.write_text(path.read_text().replace(before, after))
    git(root, "commit", "-qam", "b")


def test_a_result_of_the_code_that_is_there(project):
    assert stale(project) == [] and check_pages(project) == []


def test_a_change_in_substance_is_listed_with_its_commits(project):
    change(project, "x + 1", "x + 2")
    ((name, _, changed, since),) = stale(project)
    assert (name, changed, since) == ("speed.json", "antiphon.rooms.a", "1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""F."""', '"""Another."""'),
        ("import os", "import sys  # why"),
        ("    return x + 1", "    return (\n        x + 1\n    )"),
    ],
)
def test_words_imports_and_form_are_no_change(project, before, after):
    change(project, before, after)
    assert stale(project) == []


def test_a_module_that_moves_is_no_change(project):
    git(project, "mv", "antiphon/rooms/a.py", "antiphon/b.py")
    assert stale(project) == []
    (project / "antiphon" / "b.py").write_text("def f(x):\n    return x\n")
    assert len(stale(project)) == 1


def test_a_commit_that_is_not_there_is_told(project):
    result = json.loads((project / figures.RESULTS / "speed.json").read_text())
    write(project, result | {"commit": "0" * 40})
    assert "not in the history" in stale(project)[0][1]


def test_without_git_only_the_code_is_compared(project):
    shutil.rmtree(project / ".git")
    assert stale(project) == []
    (project / "antiphon" / "rooms" / "a.py").write_text("def f(x):\n    return x\n")
    assert [found[0::3] for found in stale(project)] == [("speed.json", "?")]


def test_a_result_that_names_no_modules_is_told(project):
    result = json.loads((project / figures.RESULTS / "speed.json").read_text())
    del result["measures"]
    write(project, result)
    assert stale(project)[0][2] == "(does not say what it measures)"


def test_a_comparison_with_a_peer_names_its_settings(project):
    result = json.loads((project / figures.RESULTS / "speed.json").read_text())
    result["figures"]["ratio_vs_generate"] = 2
    write(project, result)
    assert len(check_pages(project)) == 1
    write(project, result | {"settings": {"ours": "a", "theirs": "b"}})
    assert check_pages(project) == []


def test_the_planners_constants_are_those_of_a_result():
    medians = read_results(ROOT)["handover.json"]["figures"]
    for way, speed in HANDOVER.items():
        assert speed / 1e9 == pytest.approx(medians[way], rel=0.02)


def test_every_benchmark_says_what_it_measures():
    for path in (ROOT / "benchmarks").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        calls = len(re.findall(r"(?<!def )write_result\(", text))
        assert text.count("measures=") >= calls, path.name


def test_what_benchmarks_measure_exists():
    for path in (ROOT / "benchmarks").glob("*.py"):
        for found in re.findall(
            r"^(?:MEASURES|WHOLE_RUN|SIMULATION) = \((.*?)\)$", path.read_text(encoding="utf-8"), re.M | re.S
        ):
            figures.digest_modules(re.findall(r'"([\w.]+)"', found), ROOT)
