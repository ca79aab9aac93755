"""Dishonest and honest responses to the rewards that read text alone, and to the calls and answers of tools."""

import asyncio
import random

import pytest

from antiphon.core.types import Message, Prompt, Sampling, Turn
from antiphon.tasks.base import Transcript, as_step
from antiphon.tasks.environments.tools.environment import ToolUse
from antiphon.tasks.rewards import build_reward
from antiphon.tasks.tool_calls import TOOL_FORMATS


def grade(name, response, payload=None, turns=(), **options):
    prompt = Prompt(id="p", task="t", messages=(Message("user", "?"),), payload=payload or {})
    return build_reward(name, options)(prompt, Transcript([Message("assistant", response)], turns=turns))


NUMBER = r"answer: \d+"
TAGS = r"<answer>.+</answer>"
WORDS = r"<answer>\S+( \S+)*</answer>"
LETTERS = r"[^\W\d]+"

# cause: pattern, options, response
TO_REGEX = {
    "Arabic digits": (NUMBER, {}, "answer: ٨٢"),
    "full-width digits": (NUMBER, {}, "answer: ８２"),
    "one Devanagari digit among others": (NUMBER, {}, "answer: 8२"),
    "digits of mathematics": (NUMBER, {}, "answer: 𝟖𝟐"),
    "Thai digits where it may be anywhere": (NUMBER, {"whole": False}, "the answer: ๘๒."),
    "digits in a class": (r"answer: [\d.]+", {}, "answer: ٣.٥"),
    "a digit as a letter": (LETTERS, {}, "٣"),
    "superscripts": (NUMBER, {}, "answer: ⁸²"),
    "nothing that can be seen in tags": (TAGS, {}, "<answer>\u200b</answer>"),
    "joiners in tags": (TAGS, {}, "<answer>\u200d\u2060</answer>"),
    "a soft hyphen for a word": (WORDS, {}, "<answer>\u00ad</answer>"),
    "marks of direction for words": (WORDS, {}, "<answer>\u200e \u200f</answer>"),
    "a byte order mark for a response": (r".+", {}, "\ufeff"),
    "tag characters for a response": (r".+", {}, "\U000e0041\U000e0042"),
    "variation selectors for a response": (r".+", {}, "\ufe00\ufe0f"),
    "Hangul filler for a response": (r"\S+", {}, "\u3164"),
    "spaces for a response": (r".+", {}, " \t\n\u00a0"),
    "empty": (NUMBER, {}, ""),
    "the pattern itself": (NUMBER, {}, NUMBER),
    "before it": (NUMBER, {}, "no answer: 82"),
    "behind it": (NUMBER, {}, "answer: 82 or 83"),
    "a line break behind it": (NUMBER, {}, "answer: 82\nanswer: x"),
    "an anchor and another line": (r"^answer: \d+$", {"whole": False}, "I refuse.\nanswer: 82"),
    "an anchor and a line behind": (r"^answer: \d+$", {"whole": False}, "answer: 82\nor not"),
    "another case": (NUMBER, {}, "Answer: 82"),
    "Cyrillic letters": (NUMBER, {}, "аnswer: 82"),
    "full-width letters": (NUMBER, {}, "ａｎｓｗｅｒ: 82"),
    "a full-width colon": (NUMBER, {}, "answer： 82"),
    "the first way only": (r"yes|no", {}, "yes and no"),
    "a byte of null": (NUMBER, {}, "answer: 82\0"),
}
RIGHT_TO_REGEX = {
    "plain": (NUMBER, {}, "answer: 82"),
    "spaces around": (NUMBER, {}, "\n answer: 82 \n"),
    "a mark of order in front": (NUMBER, {}, "\ufeffanswer: 82"),
    "another case where it may be": (NUMBER, {"ignore_case": True}, "ANSWER: 82"),
    "lines in tags": (TAGS, {}, "<answer>one\ntwo</answer>"),
    "Arabic digits that are asked for": (r"[٠-٩]+", {}, "٨٢"),
    "other digits in a text": (TAGS, {}, "<answer>ছয় ৬</answer>"),
    "Persian with joiners": (r"[\w ]+", {}, "می\u200cخواهم"),
    "a joiner that is asked for": ("می\u200cخواهم", {}, "می\u200cخواهم"),
    "a family": (r"😀|👨‍👩‍👧", {}, "👨‍👩‍👧"),
    "a family in tags": (TAGS, {}, "<answer>👨\u200d👩\u200d👧</answer>"),
    "a heart": (r"I ❤️ you", {}, "I ❤️ you"),
    "accents": (r"\w+", {}, "déjà"),
    "Chinese": (r"[^\W\d]+", {}, "答案"),
    "anywhere": (NUMBER, {"whole": False}, "So the answer: 82."),
    "anchored": (r"^answer: \d+$", {"whole": False}, "answer: 82"),
    "long": (r"<think>.*</think>\s*<answer>.*</answer>", {}, f"<think>{'so ' * 40_000}</think>\n<answer>82</answer>"),
    "both of a pattern": (r"(?i:yes|no)", {}, "YES"),
    "a named group": (r"(?P<a>\d)(?P=a)", {}, "88"),
    "nothing where it may be nothing": (r".*", {}, ""),
}
BACKTRACKING = {
    "letters": (r"(a+)+b", "a" * 60),
    "either of two": (r"(a|aa)+$", "a" * 100 + "!"),
    "words": (r"(\w+\s?)*!", "word " * 60),
    "tags": (r"(<a>(.|\n)*)*</b>", "<a>" * 2_000),
    "digits": (r"^(\d+,?)+x$", "1" * 60),
    "backward": (r"(.*)*\1x", "ab" * 400),
}

# cause: answer, options, response
TO_EXACT_MATCH = {
    "other digits": ("82", {}, "٨٢"),
    "invisible": ("82", {}, "8\u200b2"),
    "part of a line": ("82", {}, "82 or 83"),
    "lines": ("82", {}, "82\n83"),
    "case": ("Paris", {}, "paris"),
    "confusable": ("Paris", {}, "Раris"),
    "nothing": ("82", {}, ""),
    "nothing for nothing captured": ("82", {"pattern": r"answer: (\d*)"}, "answer: "),
    "an earlier match": ("82", {"pattern": r"answer: (\d+)"}, "answer: 82, answer: 83"),
    "another group": ("82", {"pattern": r"answer: (\d+)|note: (\d+)"}, "note: 82"),
    "a group that is not there": ("82", {"pattern": r"x|answer: (\d+)"}, "answer: 82 x"),
    "the word None": ("None", {"pattern": r"x|answer: (\w+)"}, "x"),
    "JSON with the key twice": ("82", {"pattern": r'"answer": "(\d+)"'}, '{"answer": "82", "answer": "83"}'),
}
RIGHT_TO_EXACT_MATCH = {
    "plain": ("82", {}, "82"),
    "spaces": ("82", {}, " 82\n"),
    "spaces of the answer": (" 82 ", {}, "82"),
    "case": ("Paris", {"ignore_case": True}, "PARIS"),
    "sharp s": ("STRASSE", {"ignore_case": True}, "Straße"),
    "last": ("82", {"pattern": r"answer: (\d+)"}, "answer: 83, no, answer: 82"),
    "whole match": ("82", {"pattern": r"\d+"}, "it is 82"),
    "number": (82, {}, "82"),
    "Chinese": ("巴黎", {}, "巴黎"),
}

TEXT = "one two three four five six seven eight nine ten"
# cause: options, response; each is worth 0
TO_LENGTH = {
    "invisible words": ({"low": 5, "high": 9}, "\u200b \u200b \u200b \u200b \u200b \u200b"),
    "signs for words": ({"low": 5, "high": 9}, "! ! . . - - ?"),
    "spaces for characters": ({"low": 50, "high": 900, "unit": "characters"}, f"a{' ' * 100}b"),
    "line breaks for characters": ({"low": 50, "high": 900, "unit": "characters"}, "a" + "\n" * 100 + "b"),
    "invisible characters": ({"low": 50, "high": 900, "unit": "characters"}, "a" + "\u200b" * 100 + "b"),
    "spaces at the ends": ({"low": 50, "high": 900, "unit": "characters"}, " " * 100 + "a"),
    "brief without spaces": ({"high": 5}, "one-two-three-four-five-" * 40),
    "brief by commas": ({"high": 5}, "one,two,three,four,five," * 40),
    "brief by underlines": ({"high": 5}, "_".join([TEXT.replace(" ", "_")] * 20)),
    "brief by invisible spaces": ({"high": 5}, "\u200b".join(TEXT.split() * 20)),
    "brief by joiners": ({"high": 5}, "\u2060".join(TEXT.split() * 20)),
    "empty": ({"low": 1, "high": 5}, ""),
    "an empty line": ({"low": 1, "high": 5, "unit": "characters"}, "\n \u200b \n"),
}
# options, response, units
COUNTED = {
    "words": ({"high": 10, "low": 10}, TEXT),
    "words with signs": ({"high": 4, "low": 4}, "Well, that is (nearly) "[:-1]),
    "words and dashes": ({"high": 2, "low": 2}, "so — yes"),
    "numbers": ({"high": 3, "low": 3}, "3 + 4 = 7"),
    "a hyphen": ({"high": 2, "low": 2}, "well-known fact"),
    "a long word": ({"high": 1, "low": 1}, "Donaudampfschifffahrtsgesellschaft"),
    "characters": ({"high": 11, "low": 11, "unit": "characters"}, "hello world"),
    "characters over lines": ({"high": 5, "low": 5, "unit": "characters"}, "ab\n\ncd"),
    "Chinese": ({"high": 4, "low": 4, "unit": "characters"}, "你好世界"),
}

DICE = random.Random(0)


def varied(sentence, signs):
    """The sentence many times, each time with other signs."""
    return " ".join(sentence.format(*DICE.choices(signs, k=4)) for _ in range(60))


# each repeats itself: at least half of its n-grams
TO_REPETITION = {
    "plainly": "this is the best answer of all " * 20,
    "invisible signs": varied("th{}is is{} the{} best{}", ["", "\u200b", "\u200d", "\u2060\u200b", "\u00ad", "\ufeff"]),
    "case": " ".join(
        DICE.choice((str.upper, str.lower, str.title))(word) for word in ["this", "is", "the", "best"] * 40
    ),
    "signs behind words": varied("this{} is{} the{} best{}", [*".,;:!?", ""]),
    "signs between words": varied("this {} is {} the {} best {}", [*".,;:!?-", "...", ""]),
    "brackets and quotes": varied("{}this {}is {}the {}best", [*"([«“'\"", ""]),
    "full-width letters": varied("th{}s {}s the best", ["i", "ｉ", "𝐢", "𝑖", "ⅰ"]),
    "accents": varied("this is th{} b{}st", ["e", "é", "e\u0301", "è", "ê", "ë", "e\u0301\u0300"]),
    "other spaces": varied("this{}is{}the{}best", [" ", "\u00a0", "\u2003", "\t", "\u3000", " \n"]),
    "marks of emphasis": varied("{}this {}is {}the {}best", ["", "*", "**", "_", "~~", "`", "# "]),
    "signs between characters, spaces": varied("哈{}哈{}", [" ", "\n", "\u3000", "\t", "  "]),
}
UNREPEATED = {
    "a sentence": TEXT,
    "a short one": "Yes.",
    "a sum": "3 + 4 = 7 and 3 - 4 = -1",
    "a list": "- first of these\n- second thing here\n- third and last",
    "empty": "",
    "one phrase again": f"{TEXT} and one more that begins with one two",
}


@pytest.mark.parametrize("cause", TO_REGEX)
def test_regex_pays_no_hack(cause):
    pattern, options, response = TO_REGEX[cause]
    assert grade("regex", response, pattern=pattern, **options).value == 0


@pytest.mark.parametrize("cause", RIGHT_TO_REGEX)
def test_regex_pays_what_matches(cause):
    pattern, options, response = RIGHT_TO_REGEX[cause]
    assert grade("regex", response, pattern=pattern, **options).value == 1


@pytest.mark.parametrize("cause", BACKTRACKING)
@pytest.mark.parametrize("name", ["regex", "exact_match"])
def test_patterns_end(name, cause):
    pattern, response = BACKTRACKING[cause]
    assert grade(name, response, {"answer": "b"}, pattern=pattern).value == 0  # it would take years


@pytest.mark.parametrize("cause", TO_EXACT_MATCH)
def test_exact_match_pays_no_hack(cause):
    answer, options, response = TO_EXACT_MATCH[cause]
    assert grade("exact_match", response, {"answer": answer}, **options).value == 0


@pytest.mark.parametrize("cause", RIGHT_TO_EXACT_MATCH)
def test_exact_match_pays_what_is_right(cause):
    answer, options, response = RIGHT_TO_EXACT_MATCH[cause]
    assert grade("exact_match", response, {"answer": answer}, **options).value == 1


@pytest.mark.parametrize("cause", TO_LENGTH)
def test_length_counts_no_padding(cause):
    options, response = TO_LENGTH[cause]
    assert grade("length", response, **options).value == 0


@pytest.mark.parametrize("cause", COUNTED)
def test_length_counts_what_is_read(cause):
    options, response = COUNTED[cause]
    assert grade("length", response, **options).value == 1


@pytest.mark.parametrize("cause", TO_REPETITION)
def test_repetition_is_found(cause):
    assert grade("repetition", TO_REPETITION[cause]).value <= -0.5


@pytest.mark.parametrize("cause", UNREPEATED)
def test_no_repetition_is_found(cause):
    assert grade("repetition", UNREPEATED[cause]).value == 0


def turn(reward):
    return Turn(start=0, stop=1, sampling=Sampling(max_tokens=1), reward=reward)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", None, [1.0]])
def test_no_step_pays_what_is_no_number(reward):
    with pytest.raises(TypeError):
        as_step(("", reward if reward != "1" else "one", False, False, {}))


@pytest.mark.parametrize("rewards", [(float("nan"),), (float("inf"), float("-inf")), (1.0, float("inf"))])
def test_no_return_is_infinite(rewards):
    score = grade("environment_return", "", turns=tuple(map(turn, rewards)))
    assert score.value is None


def test_return_is_the_sum_of_turns():
    assert grade("environment_return", "reward: 9", turns=(turn(1.0), turn(None), turn(-0.5))).value == 0.5


# --- tools --------------------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
NO_CALLS = {
    "a name twice": ("hermes", '<tool_call>{"name": "look", "name": "add", "arguments": {}}</tool_call>'),
    "an argument twice": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "a": 2}}</tool_call>'),
    "arguments twice": ("hermes", '<tool_call>{"name": "add", "arguments": {}, "arguments": {"a": 2}}</tool_call>'),
    "a key twice, deep": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": {"b": 1, "b": 2}}}</tool_call>'),
    "no number": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>'),
    "infinity": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>'),
    "two objects": ("hermes", '<tool_call>{"name": "add", "arguments": {}} {}</tool_call>'),
    "no end": ("hermes", '<tool_call>{"name": "add", "arguments": {}}'),
    "deep": ("hermes", '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 50_000),
    "a parameter twice": (
        "qwen3_coder",
        CODER.replace("<parameter=b>", "<parameter=a>"),
    ),
    "text between parameters": ("qwen3_coder", CODER.replace("</parameter>\n<", "</parameter> and <")),
}


@pytest.mark.parametrize("cause", NO_CALLS)
def test_what_is_no_call_is_a_problem(cause):
    name, text = NO_CALLS[cause]
    found = TOOL_FORMATS.resolve(name)({}).parse(text)
    assert not found.calls
    assert found.problems


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("hermes", CALL, 1),
        ("hermes", f"{CALL}\n{CALL}", 2),
        ("hermes", f"<think>{CALL}</think>", 0),
        ("hermes", CALL.replace('"a"', r'"\u0061"'), 1),
        ("qwen3_coder", CODER, 1),
    ],
)
def test_calls_are_read(name, text, count):
    found = TOOL_FORMATS.resolve(name)({}).parse(text)
    assert [call.name for call in found.calls] == ["add"] * count
    assert not found.problems


ANSWERS = {
    "<answer>82</answer>": 1,
    "82": 1,
    "<think>83?</think> <answer> 82 </answer>": 1,
    "<answer>83</answer> No: <answer>82</answer>": 1,
    "<answer>82</answer> or <answer>83</answer>": 0,
    "<answer>82 or 83</answer>": 0,
    "<answer>83 <answer>82</answer>": 0,
    "<think><answer>82</answer>": 0,
    "<think><answer>82</answer></think>": 0,
    "<answer>٨٢</answer>": 0,
    "<answer>8\u200b2</answer>": 0,
    "<answer></answer>": 0,
    "": 0,
    "82 <answer></answer>": 0,
    "<tool_response>82</tool_response>": 0,
}


@pytest.mark.parametrize("response", ANSWERS)
def test_answers_of_tool_use(response):
    async def play():
        prompt = Prompt(id="p", task="t", messages=(Message("user", "?"),), payload={"answer": "82"})
        world = ToolUse(prompt, tools=["calculator"])
        await world.reset(0)
        return await world.step(response)

    _, reward, terminated, _, _ = asyncio.run(play())
    assert (reward, terminated) == (ANSWERS[response], True)


def test_called_twice_pays_no_more():
    async def play():
        prompt = Prompt(id="p", task="t", messages=(Message("user", "?"),), payload={"answer": "82"})
        world = ToolUse(prompt, tools=["calculator"])
        await world.reset(0)
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
        return await world.step(call * 20)

    assert asyncio.run(play())[1] == 0
