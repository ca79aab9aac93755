"""The 25 verifiable instructions of IFEval, one function each, with the keyword arguments of the published data.

The checks agree with the public code of Zhou et al. 2023, "Instruction-Following Evaluation for Large Language Models", also in
odd cases (a Markdown rule `---` is a bullet). They differ from it in these points:

* Keywords are text, not regular expressions, and a letter may be any character; the public code draws another at random.
* A missing kwarg is an error; the public code draws one at random.
* Sentences are counted without a trained model, words in capitals without a tokenizer (`lengths.sentences`,
  `language.capital_words`).
* Signs without width, such as zero-width spaces, are left out; in the public code they part words.
* A text of unknown language does not follow an instruction about languages; in the public code it does.

Every pattern takes time linear in the length of the response.
"""

from antiphon.tasks.rewards.instructions import format, keywords, language, lengths, structure
from antiphon.tasks.rewards.instructions.registry import CHECKS

__all__ = ["CHECKS", "format", "keywords", "language", "lengths", "structure"]
