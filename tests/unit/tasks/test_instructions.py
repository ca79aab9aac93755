"""The instruction checks: against the public code of IFEval, as the package if-verifiable has it, and by hand."""

import random
import re
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.types import Message, Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rewards import build_reward
from antiphon.tasks.rewards.instruction_following import variants
from antiphon.tasks.rewards.instructions import CHECKS
from antiphon.tasks.rewards.instructions.language import capital_words
from antiphon.tasks.rewards.instructions.lengths import sentences
from antiphon.tasks.rewards.languages import LANGUAGES, detect_language

WORDS = ["alpha", "Beta", "GAMMA", "don't", "x-ray", "X-RAY", "U.S.", "I", "7", "a_b", "naïve", "über", "...", "Dr."]
MARKS = [
    *["* one", "*", "**", "***", "******", "*hi*", "**bold**", "- two", "---", "[name]", "[", "]", "<<A>>", "<<", ">>"],
    *['"', "'", "{", "}", '{"a": 1}', "```", "```json\n", ",", ".", "?", "!", "Section 1", "SECTION 2", "Section"],
    *["P.S.", "p. s. x", "P.P.S", "P. P.S", "My answer is yes.", "My answer is no", "Any other questions?", "null"],
]
SPACES = [" ", " ", " ", "\n", "\n\n", "\t", "  ", ""]
PIECES = st.sampled_from(WORDS) | st.sampled_from(MARKS) | st.sampled_from(SPACES) | st.text(max_size=4)
RESPONSES = st.lists(PIECES, max_size=25).map("".join)
FEW, RELATION = st.integers(0, 4), st.sampled_from(["less than", "at least"])
KEYWORDS = st.sampled_from(["alpha", "beta", "gamma", "a", "ray", "over"])

KWARGS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "keywords:existence": {"keywords": st.lists(KEYWORDS, min_size=1, max_size=3)},
    "keywords:frequency": {"keyword": KEYWORDS, "frequency": FEW, "relation": RELATION},
    "keywords:forbidden_words": {"forbidden_words": st.lists(KEYWORDS, min_size=1, max_size=3)},
    "keywords:letter_frequency": {
        "letter": st.sampled_from("aBxE"),
        "let_frequency": FEW,
        "let_relation": RELATION,
    },
    "length_constraints:number_paragraphs": {"num_paragraphs": FEW},
    "length_constraints:number_words": {"num_words": FEW, "relation": RELATION},
    "length_constraints:nth_paragraph_first_word": {
        "num_paragraphs": st.integers(2, 3),
        "nth_paragraph": st.integers(1, 2),
        "first_word": st.sampled_from(["alpha", "Beta", "i", "don"]),
    },
    "detectable_content:number_placeholders": {"num_placeholders": FEW},
    "detectable_content:postscript": {"postscript_marker": st.sampled_from(["P.S.", "P.P.S"])},
    "detectable_format:number_bullet_lists": {"num_bullets": FEW},
    "detectable_format:constrained_response": {},
    "detectable_format:number_highlighted_sections": {"num_highlights": FEW},
    "detectable_format:multiple_sections": {
        "section_spliter": st.sampled_from(["Section", "SECTION"]),
        "num_sections": FEW,
    },
    "detectable_format:json_format": {},
    "detectable_format:title": {},
    "combination:two_responses": {},
    "combination:repeat_prompt": {"prompt_to_repeat": st.sampled_from(["alpha", "Beta alpha", "*"])},
    "startend:end_checker": {"end_phrase": st.sampled_from(["Any other questions?", "alpha", "i"])},
    "startend:quotation": {},
    "punctuation:no_comma": {},
}
BY_LANGUAGE = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
BY_TOKENIZER = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}

# Two sentences that anybody might write, in each language.
SPEECH = {
    "ar": "أعتقد أن هذا الكتاب جيد جدا لأنه يتحدث عن الحياة في المدينة. لا أعرف من كتبه ولكن كل الناس يحبونه.",
    "bg": "Мисля, че тази книга е много добра, защото разказва за живота в града. Не знам кой я е написал.",
    "bn": "আমি মনে করি এই বইটি খুব ভালো কারণ এটি শহরের জীবন নিয়ে লেখা। কে লিখেছে তা আমি জানি না।",
    "de": "Ich glaube, dass dieses Buch sehr gut ist, weil es vom Leben in der Stadt erzählt. Wer es schrieb, weiß ich nicht.",
    "en": "I think that this book is very good, because it tells of life in the city. Who wrote it I do not know.",
    "es": "Creo que este libro es muy bueno, porque habla de la vida en la ciudad. No sé quién lo escribió.",
    "fa": "فکر می کنم این کتاب خیلی خوب است، چون از زندگی در شهر می گوید. نمی دانم چه کسی آن را نوشته است.",
    "fi": "Minusta tämä kirja on hyvin hyvä, koska se kertoo elämästä kaupungissa. En tiedä, kuka sen on kirjoittanut.",
    "fr": "Je pense que ce livre est très bon, parce qu'il parle de la vie dans la ville. Je ne sais pas qui l'a écrit.",
    "gu": "મને લાગે છે કે આ પુસ્તક ખૂબ સારું છે, કારણ કે તે શહેરના જીવન વિશે છે. કોણે લખ્યું તે હું જાણતો નથી.",
    "he": "אני חושב שהספר הזה טוב מאוד, כי הוא מספר על החיים בעיר. אני לא יודע מי כתב אותו.",
    "hi": "मुझे लगता है कि यह किताब बहुत अच्छी है, क्योंकि यह शहर के जीवन के बारे में है। मैं नहीं जानता कि इसे किसने लिखा।",
    "it": "Penso che questo libro sia molto bello, perché parla della vita nella città. Non so chi lo abbia scritto.",
    "ja": "この本はとても良いと思います。街の生活について書かれているからです。誰が書いたのかは知りません。",
    "kn": "ಈ ಪುಸ್ತಕ ತುಂಬಾ ಚೆನ್ನಾಗಿದೆ ಎಂದು ನಾನು ಭಾವಿಸುತ್ತೇನೆ. ಯಾರು ಬರೆದರು ಎಂದು ನನಗೆ ಗೊತ್ತಿಲ್ಲ.",
    "ko": "이 책은 도시의 삶을 이야기하기 때문에 아주 좋다고 생각합니다. 누가 썼는지는 모릅니다.",
    "ml": "ഈ പുസ്തകം വളരെ നല്ലതാണെന്ന് ഞാൻ കരുതുന്നു. ആരാണ് എഴുതിയതെന്ന് എനിക്കറിയില്ല.",
    "mr": "मला वाटते की हे पुस्तक खूप चांगले आहे, कारण ते शहरातील जीवनाबद्दल आहे. ते कोणी लिहिले हे मला माहीत नाही.",
    "ne": "मलाई लाग्छ यो किताब धेरै राम्रो छ, किनभने यो सहरको जीवनको बारेमा हो। यो कसले लेख्यो मलाई थाहा छैन।",
    "pa": "ਮੈਨੂੰ ਲੱਗਦਾ ਹੈ ਕਿ ਇਹ ਕਿਤਾਬ ਬਹੁਤ ਚੰਗੀ ਹੈ। ਮੈਨੂੰ ਨਹੀਂ ਪਤਾ ਕਿ ਇਹ ਕਿਸ ਨੇ ਲਿਖੀ।",
    "pl": "Myślę, że ta książka jest bardzo dobra, bo opowiada o życiu w mieście. Nie wiem, kto ją napisał.",
    "pt": "Acho que este livro é muito bom, porque fala da vida na cidade. Não sei quem o escreveu.",
    "ru": "Я думаю, что эта книга очень хорошая, потому что она рассказывает о жизни в городе. Я не знаю, кто её написал.",
    "sw": "Nadhani kitabu hiki ni kizuri sana kwa sababu kinasema juu ya maisha ya mjini. Sijui ni nani aliyekiandika.",
    "ta": "இந்தப் புத்தகம் மிகவும் நல்லது என்று நினைக்கிறேன். யார் எழுதினார் என்று எனக்குத் தெரியாது.",
    "te": "ఈ పుస్తకం చాలా బాగుందని నేను అనుకుంటున్నాను. ఎవరు రాశారో నాకు తెలియదు.",
    "th": "ฉันคิดว่าหนังสือเล่มนี้ดีมาก เพราะเล่าเรื่องชีวิตในเมือง ฉันไม่รู้ว่าใครเขียน",
    "uk": "Я думаю, що ця книга дуже добра, бо вона розповідає про життя в місті. Я не знаю, хто її написав.",
    "ur": "میرا خیال ہے کہ یہ کتاب بہت اچھی ہے کیونکہ یہ شہر کی زندگی کے بارے میں ہے۔ میں نہیں جانتا کہ اسے کس نے لکھا۔",
    "vi": "Tôi nghĩ rằng cuốn sách này rất hay, vì nó kể về cuộc sống trong thành phố. Tôi không biết ai đã viết nó.",
}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """The public checkers, with nltk's own tokenizers as they are without the data that it would download."""
    why = "the outside package if-verifiable is not installed: pip install -c constraints.txt -e .[dev]"
    instructions = pytest.importorskip("if_verifiable.ifeval.instructions", reason=why)
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT
    from langdetect import DetectorFactory
    from nltk.tokenize.destructive import NLTKWordTokenizer
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    DetectorFactory.seed = 0
    split, tokenize = PunktSentenceTokenizer().tokenize, NLTKWordTokenizer().tokenize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instructions.instructions_util, "count_sentences", lambda text: len(split(text)))
        words = staticmethod(lambda text: [word for sentence in split(text) for word in tokenize(sentence)])
        patch.setattr(instructions.instructions_util.nltk, "word_tokenize", words)
        yield INSTRUCTION_DICT


def verdict_of(theirs: dict[str, Any], name: str, response: str, **kwargs: Any) -> bool:
    checker = theirs[name](name)
    checker.build_description(**kwargs)
    return bool(checker.check_following(response))


def test_there_are_the_25_of_the_paper(theirs: dict[str, Any]) -> None:
    assert set(CHECKS) == set(theirs) == set(KWARGS) | BY_LANGUAGE | BY_TOKENIZER and len(CHECKS) == 25


@pytest.mark.parametrize("name", KWARGS)
def test_verdicts_are_those_of_the_public_code(name: str, theirs: dict[str, Any]) -> None:
    @settings(max_examples=150, deadline=None)
    @given(RESPONSES, st.fixed_dictionaries(KWARGS[name]))
    def same(response: str, kwargs: dict[str, Any]) -> None:
        assert CHECKS[name](response, **kwargs) == verdict_of(theirs, name, response, **kwargs)

    same()


PLAIN = ["The dog ran home.", "Is it LATE?", "Go now!", "WE met at 7 o'clock.", "She read a LONG X-RAY report."]


@pytest.mark.parametrize("name", sorted(BY_TOKENIZER))
def test_verdicts_on_plain_prose_are_those_of_untrained_nltk(name: str, theirs: dict[str, Any]) -> None:
    draw = random.Random(0)
    number, relation = {"length": ("num_sentences", "relation"), "change": ("capital_frequency", "capital_relation")}[
        name[:6]
    ]
    for _ in range(200):
        response = draw.choice([" ", "\n"]).join(draw.choices(PLAIN, k=draw.randint(0, 8)))
        kwargs = {number: draw.randint(0, 8), relation: draw.choice(["less than", "at least"])}
        assert CHECKS[name](response, **kwargs) == verdict_of(theirs, name, response, **kwargs), response


def test_languages_are_those_that_langdetect_finds(theirs: dict[str, Any]) -> None:
    assert set(SPEECH) == LANGUAGES - {"zh"}
    for code, text in SPEECH.items():
        assert verdict_of(theirs, "language:response_language", text, language=code)
        said = {other for other in SPEECH if CHECKS["language:response_language"](text, language=other)}
        assert said == {code}


def test_loose_accuracy_looks_at_the_same_variants(theirs: dict[str, Any]) -> None:
    their_variants = sys.modules["if_verifiable.common"].get_loose_transformations

    @settings(max_examples=100, deadline=None)
    @given(RESPONSES)
    def same(response: str) -> None:
        assert set(variants(response)) == set(their_variants(response))

    same()


# --- by hand -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, count",
    [
        ("", 0),
        ("One", 1),
        ("One. Two? Three!", 3),
        ("Dr. Smith met J. R. Brown. They left.", 2),
        ("1. Wash.\n2. Dry.", 2),
        ("Wait... what? Yes!!", 2),
        ('He said "No." Then he left.', 2),
        ("Pens, paper, etc. are here. Come.", 2),
        ("Pens, paper, etc. Come.", 2),
        ("It costs 3.50 at example.com today.", 1),
        ("你好。再见。", 2),
    ],
)
def test_sentences(text: str, count: int) -> None:
    assert sentences(text) == count


def test_words_in_capitals() -> None:
    assert capital_words("IT'S A BIG U.S. DAY, I'm X-RAY and/or NASA2") == 9
    assert capital_words("nothing Here") == 0


@pytest.mark.parametrize("text", ["", "42", "Bonjour", "qwer asdf zxcv", "...", "नी"])
def test_a_language_that_cannot_be_told(text: str) -> None:
    assert detect_language(text) is None


def test_case_is_checked_with_the_language() -> None:
    assert CHECKS["change_case:english_capital"](SPEECH["en"].upper())
    assert not CHECKS["change_case:english_capital"](SPEECH["de"].upper())
    assert not CHECKS["change_case:english_capital"](SPEECH["en"])
    assert CHECKS["change_case:english_lowercase"](SPEECH["en"].lower())
    assert not CHECKS["change_case:english_lowercase"](SPEECH["en"])


def test_keywords_are_text() -> None:
    assert CHECKS["keywords:existence"]("I like C++.", keywords=["c++"])
    assert not CHECKS["keywords:existence"]("colour", keywords=["col.ur"])
    assert CHECKS["keywords:letter_frequency"]("#a #b", letter="#", let_frequency=2, let_relation="at least")


@pytest.mark.parametrize("sign", ["[", "<", "*", ".", " ", "\n", "_", "-", "{", "p. ", "'", '."', "a.", "* ", "[]"])
def test_no_check_is_slow_on_what_repeats(sign: str) -> None:
    """Quadratic patterns would take minutes, and run into the time limit of the suite."""
    fixed: dict[str, Any] = dict.fromkeys(("keyword", "letter", "first_word", "prompt_to_repeat", "end_phrase"), "a")
    fixed |= {"keywords": ["a"], "forbidden_words": ["a"], "relation": "at least", "let_relation": "at least"}
    fixed |= {"postscript_marker": "P.S.", "section_spliter": "Section"}
    for name, kwargs in KWARGS.items():
        CHECKS[name](sign * 200_000, **{key: fixed.get(key, 1) for key in kwargs})
    assert sentences(sign * 200_000) <= 200_000 >= capital_words(sign * 200_000)
    assert detect_language(sign * 200_000) is None


# --- the reward ----------------------------------------------------------------------------------------------------------

ROW = {
    "key": 1000,
    "prompt": "Write about dogs without commas, in at least 3 words.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    # As the published data have it: one mapping for all keys there are.
    "kwargs": [
        {"num_words": None, "relation": None, "keywords": None},
        {"num_words": 3, "relation": "at least", "keywords": None},
    ],
}


def judge(response: str, row: Any = ROW, **options: Any) -> Score:
    prompt = Prompt(id="p", task="t", messages=(Message("user", "?"),), payload=row)
    score = build_reward("instruction_following", options)(prompt, Transcript([Message("assistant", response)]))
    assert isinstance(score, Score)
    return score


def test_the_value_is_the_share_of_what_is_followed() -> None:
    assert judge("Dogs are fine animals").value == 1
    half = judge("Dogs, cats and birds")
    assert half.value == 0.5
    assert half.parts == {"punctuation:no_comma": 0.0, "length_constraints:number_words": 1.0}
    assert judge("Dogs, cats and birds", all_or_nothing=True).value == 0
    assert judge("Dogs are fine animals", all_or_nothing=True).value == 1


def test_loose_accuracy_forgives_a_first_line() -> None:
    text = "Sure, here it is:\nDogs are fine animals"
    assert (judge(text).value, judge(text, loose=True).value) == (0.5, 1.0)


def test_nothing_follows_no_instruction() -> None:
    assert judge(" \n").value == 0
    assert judge("", loose=True).value == 0


def test_an_instruction_that_comes_twice_has_two_parts() -> None:
    row = {"instruction_id_list": ["keywords:existence"] * 2, "kwargs": [{"keywords": ["dog"]}, {"keywords": ["cat"]}]}
    assert judge("a dog", row).parts == {"keywords:existence": 1.0, "keywords:existence/1": 0.0}


@pytest.mark.parametrize(
    "names, kwargs, message",
    [
        (["punctuation:no_commas"], [{}], "unknown instruction 'punctuation:no_commas': valid are change_case"),
        (
            ["length_constraints:number_words"],
            [{"num_words": 3}],
            "number_words': missing a required argument: 'relation'",
        ),
        (["punctuation:no_comma"], [{"n": 3}], "no_comma': got an unexpected keyword argument 'n'"),
        (["punctuation:no_comma"], [], "lists of one length"),
        ([], [], "not empty"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "most"}], "'less than' or 'at least'"),
        (["language:response_language"], [{"language": "tlh"}], "'tlh' cannot be recognised"),
        (
            ["keywords:letter_frequency"],
            [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}],
            "one character",
        ),
    ],
)
def test_what_cannot_be_checked_is_an_error_and_not_a_zero(names: list[str], kwargs: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        judge("Dogs are fine", {"instruction_id_list": names, "kwargs": kwargs})
