"""Detect the language of a text by its script and its most common words and letters.

It is small and deterministic, knows the languages of the instruction checks only, and needs a sentence or two. An unknown
language may be taken for a similar one. In a mixture the language with most of the text wins.
"""

import unicodedata
from collections import Counter

MIN_KNOWN_WORDS = 0.08  # share; running text has several times as many of its own language
# Languages with a script of their own, by the first word of the Unicode name of its letters.
_ONLY_LANGUAGE = {
    "HANGUL": "ko",
    "THAI": "th",
    "BENGALI": "bn",
    "TAMIL": "ta",
    "TELUGU": "te",
    "HEBREW": "he",
    "KANNADA": "kn",
    "GUJARATI": "gu",
    "GURMUKHI": "pa",
    "MALAYALAM": "ml",
}
_EAST_ASIAN = {"CJK", "HIRAGANA", "KATAKANA"}

_WORDS = {
    "LATIN": {
        "en": "the of and to in is that it for was on are as with his they be at this have from or by not but what were we"
        " when your can there an which their you she he my will has if do i how so",
        "es": "el la de que y en un una los las por con para es no se del al lo como más pero sus le ya este sí porque esta"
        " son entre está cuando muy sin sobre también me hay donde yo mi eso ese",
        "pt": "o a de que e do da em um uma para com não os as no na por mais dos das como mas ao ele foi seu sua ou quando"
        " muito nos já está eu também só pelo pela até isso ela entre são você é à",
        "fr": "le la les de des et un une du en est que qui dans pour pas au aux sur par avec ce cette il elle nous vous ne se"
        " plus ou sont mais son sa ses été je tu c'est où être ont à leur",
        "de": "der die das und ist nicht ein eine in zu den mit von sich des auf für dem im auch es an als sie er wir ich so"
        " sind oder aber wie bei einen einem einer noch nach aus wird hat durch nur über wenn dass",
        "it": "il lo la gli le di che e un una è per non in con del della dei delle al alla si sono da nel nella come più ma"
        " anche questo questa ho ha io mi ci se molto quando perché i dal dalla suo",
        "pl": "i w na z się nie to do jest że o jak a po co tak za od przez ale czy już tylko był była są dla ten ta te tym"
        " może być ich jego go jej oraz lub które który która bardzo gdy także",
        "vi": "và của là có không được cho một các những trong để với này người đã khi từ đến như tôi bạn ở nhưng ra về vào"
        " thì sẽ cũng rất nhiều nếu chúng ta đó",
        "sw": "na ya wa kwa ni katika za la kuwa cha ili hii huu hiyo yake wake pia au kama lakini watu sana vya hivyo kila"
        " hili huo mtu yao wao ambayo ambao baada kabla wakati mimi wewe yeye sisi",
        "fi": "ja on ei se että oli hän ovat mutta joka myös kun niin kuin tai voi sen tämä jos mitä minä sinä he me ole olla"
        " jotka vain sekä sitä hyvin siitä nyt ovat kanssa ennen jälkeen hänen tämän",
    },
    "CYRILLIC": {
        "ru": "и в не на что он с как это по но они мы она так его за от из у же все бы был для быть если или когда также"
        " очень чтобы который которые есть я вы",
        "uk": "і в не на що він з як це та але вони ми вона так його за від у ж все би був для бути якщо або коли також дуже"
        " щоб який які є я ви до із",
        "bg": "и в не на че той с като това по но те ние тя така го за от ще се да са е бъде ако или когато също много който"
        " които има аз вие до при си",
    },
    "ARABIC": {
        "ar": "في من على إلى أن هذا هذه التي الذي ما لا هو هي عن مع كان كانت كل أو ثم قد لم بعد بين ذلك كما إن لكن أنا نحن",
        "fa": "و در به از که این را با است برای آن یک خود تا بر هم می شود بود ها اما یا شما من ما هر دارد کرد باید نیز",
        "ur": "کے کی میں ہے اور سے کا کو اس پر نے یہ کہ ہیں تھا بھی کر نہیں ایک وہ جو ہو تو لیے آپ ہم اپنے بہت",
    },
    "DEVANAGARI": {
        "hi": "के है में की और से का को यह पर हैं नहीं एक भी कि ने था हो वह तो लिए कर आप हम इस अपने बहुत मैं",
        "mr": "आहे आणि या एक मी तो ती ते हे आहेत नाही पण साठी होते व आपण खूप मला तुम्ही काही झाली हा केला असे म्हणून",
        "ne": "छ र को मा हो लाई पनि यो गर्न छन् भने ले एक तर थियो त्यो म हामी तपाईं धेरै बाट हुन् गर्छ हुन्छ छैन",
    },
}
# Letters that similar languages do not have.
_LETTERS = {
    "LATIN": {
        "es": "ñ",
        "pt": "ãõ",
        "fr": "œêîû",
        "de": "ßü",
        "pl": "ąęłżśćńź",
        "vi": "ăđơưạảấầậẹếềệịọốồộụủừữ",
        "fi": "äö",
    },
    "CYRILLIC": {"ru": "ыэёь", "uk": "іїєґь", "bg": "ъ"},
    "ARABIC": {"ar": "ةىيكأإؤ", "fa": "ژگپچ", "ur": "ٹڈڑںےہ"},
    "DEVANAGARI": {"mr": "ळ"},
}

LANGUAGES = frozenset(
    ["ja", "zh", *_ONLY_LANGUAGE.values(), *(language for words in _WORDS.values() for language in words)]
)


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code of the language of a text; None if it cannot be told. Ignores case."""
    text = unicodedata.normalize("NFC", text).lower()
    scripts = Counter(_script(letter) for letter in text if letter.isalpha())
    if not scripts:
        return None
    script = scripts.most_common(1)[0][0]
    if script in _EAST_ASIAN:  # Japanese texts have kana, Chinese texts have none
        return "ja" if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.05 * scripts.total() else "zh"
    if script in _ONLY_LANGUAGE:
        return _ONLY_LANGUAGE[script]
    return _detect_by_words(text, script) if script in _WORDS else None


def _script(letter: str) -> str:
    return unicodedata.name(letter, "?").partition(" ")[0]


def _detect_by_words(text: str, script: str) -> str | None:
    words = Counter("".join(sign if _in_word(sign) else " " for sign in text).split())
    found: Counter[str] = Counter()
    for language, common in _WORDS[script].items():
        letters = frozenset(_LETTERS[script].get(language, ""))
        known = frozenset(common.split())
        found[language] = sum(count for word, count in words.items() if word in known or letters.intersection(word))
    (first, most), (_, second) = found.most_common(2)
    return first if most > second and most >= MIN_KNOWN_WORDS * words.total() else None


def _in_word(sign: str) -> bool:
    return sign.isalpha() or sign == "'" or unicodedata.category(sign)[0] == "M"  # vowels of Devanagari are marks
