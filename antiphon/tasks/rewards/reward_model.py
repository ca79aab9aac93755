"""The score of a reward model, which `antiphon reward-model` trains."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from antiphon.core.errors import DataError
from antiphon.core.types import Message, Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rendering import Renderer


class RewardModel:
    """The logit of a sequence classifier of transformers with one label, at the last token of the conversation."""

    def __init__(self, path: str, device: str = "cpu") -> None:
        """Load the model and tokenizer in the directory `path`; each grading worker holds a copy of its own.

        Raises:
            DataError: There is no model, or it has more than one label.
        """
        if not (Path(path) / "config.json").is_file():
            raise DataError(f"path {path!r}: there is no such model directory")
        torch.set_num_threads(1)
        self._renderer = Renderer(path)
        self._model = (
            AutoModelForSequenceClassification.from_pretrained(path, trust_remote_code=False).to(device).eval()
        )
        if self._model.config.num_labels != 1:
            raise DataError(
                f"path {path!r}: the model has {self._model.config.num_labels} labels, a reward model has 1"
            )

    def __call__(self, prompt: Prompt, transcript: Transcript) -> Score:
        """Score the last response, with an end-of-sequence token as in training; ungraded if there is none."""
        last = max((i for i, m in enumerate(transcript.messages) if m.role == "assistant"), default=None)
        if last is None:
            return Score.ungraded("there is no response")
        with torch.inference_mode():
            return Score.of(self._model(self._tokens(transcript.messages[: last + 1])).logits.item())

    def _tokens(self, messages: tuple[Message, ...]) -> torch.Tensor:
        """Return the tokens [1, L] of a conversation that ends with a response."""
        prompt = self._renderer.encode_prompt(messages[:-1])
        response = self._renderer.encode_response(messages[-1].content)
        return torch.tensor([[*prompt.tolist(), *response.tolist()]], device=self._model.device)
