"""A model as lm-eval sees one: an engine generates, and a learner that does not learn says how likely texts are.

Its methods are called in a thread of lm-eval's own, beside the event loop in which engine and learner are asked. Importing it
imports lm-eval.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from transformers import PreTrainedTokenizerFast

from antiphon.core.errors import UnsupportedError
from antiphon.core.types import AttemptId, Sampling
from antiphon.engines.request_checks import PENALTIES
from antiphon.learning.data_samples import sample_from_tokens
from antiphon.learning.packing import pack_samples, split_packs

T = TypeVar("T")
Tokens = Sequence[int]
Generate = Callable[[Tokens, Sampling], Awaitable[Tokens]]  # the tokens that follow
Score = Callable[[list[Any]], Awaitable[list[np.ndarray]]]  # of packs: log-probs, and whether they are the highest

MOST_TOKENS = 256  # of an answer whose task says nothing of its length
REQUESTS = 512  # whose texts are packed together
SAMPLING = ("top_p", "top_k", "min_p", *PENALTIES)
KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "seed", *SAMPLING)


class SuiteModel(TemplateLM):
    """Answers what lm-eval asks of a model."""

    def __init__(
        self,
        directory: Path,
        loop: asyncio.AbstractEventLoop,
        *,
        generate: Generate,
        score: Score,
        max_length: int,
        positions: int,
        tokens_per_pack: int,
    ) -> None:
        """Ask nothing yet.

        Args:
            directory: Of the model.
            loop: Event loop in which it is asked.
            generate: Asks the engine.
            score: Asks the learner.
            max_length: Most tokens of a sequence that the engine generates, prompt included.
            positions: Most tokens that the model reads when it scores a text.
            tokens_per_pack: Most tokens that are scored at once.
        """
        super().__init__()
        self.tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
        self._max_length, self._positions = max_length, positions
        self._directory, self._loop = directory, loop
        self._generate, self._score = generate, score
        self._tokens_per_pack = tokens_per_pack

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        number: int = self.tokenizer.eos_token_id
        return number

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else int(self.tokenizer.bos_token_id)

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in lm-eval's caches."""
        return str(self._directory).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, with the special tokens of the tokenizer unless it begins with them."""
        begins = self.tokenizer.bos_token is not None and string.startswith(self.tokenizer.bos_token)
        special = not begins if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text, by the model's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what follows each text, up to one of its stops."""
        return self._ask(self._generate_all([request.args for request in requests]))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-prob of each text, in windows of the model's length."""
        windows = [self._windows(text) for (text,) in (request.args for request in requests)]
        found = iter(self._loglikelihood_tokens([window for own in windows for window in own]))
        return [sum(next(found)[0] for _ in own) for own in windows]

    def _windows(self, text: str) -> list[tuple[None, Tokens, Tokens]]:
        pairs = utils.get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self._positions, 1)
        return [(None, *utils.make_disjoint_window(pair)) for pair in pairs]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Tokens, Tokens]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self._ask(self._score_all(pairs))

    async def _generate_all(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
        return list(await asyncio.gather(*(self._continue(context, dict(options)) for context, options in requests)))

    async def _continue(self, context: str, options: dict[str, Any]) -> str:
        options = dict(normalize_gen_kwargs(options, MOST_TOKENS))
        if unknown := sorted(options.keys() - set(KNOWN)):
            raise UnsupportedError(f"a task of the suite samples with {', '.join(unknown)}, which engines do not know")
        stops = handle_stop_sequences(options.get("until"), self.tokenizer.decode(self.eot_token_id))
        room = min(options["max_gen_toks"], self._max_length - 1)
        tokens = self.tok_encode(context)[-(self._max_length - room) :]
        chosen = {name: options[name] for name in SAMPLING if name in options}
        temperature = options["temperature"] if options["do_sample"] else 0.0
        sampling = Sampling(max_tokens=room, temperature=temperature, stop=tuple(filter(None, stops)), **chosen)
        answer = self.tokenizer.decode(list(await self._generate(tokens, sampling)))
        return str(postprocess_generated_text(answer, stops, None))

    async def _score_all(self, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = []
        for start in range(0, len(pairs), REQUESTS):
            part = [self._shortened(*pair) for pair in pairs[start : start + REQUESTS]]
            samples = [
                sample_from_tokens(
                    AttemptId(number, 0, 0), np.array(context, np.int32), np.array(continuation, np.int32)
                )
                for number, (context, continuation) in enumerate(part)
            ]
            members, packs = pack_samples(samples, self._tokens_per_pack)
            scored = split_packs(samples, members, await self._score(list(packs)))
            for (_, continuation), numbers in zip(part, scored, strict=True):
                own = numbers[len(numbers) - len(continuation) :]
                found.append((float(own[:, 0].sum(dtype=np.float64)), bool(own[:, 1].all())))
        return found

    def _shortened(self, context: Tokens, continuation: Tokens) -> tuple[Tokens, Tokens]:
        """Leave out the beginning of a context that is too long: the last token of all is only predicted, never read."""
        return context[-max(self._positions + 1 - len(continuation), 1) :], continuation

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()
