"""The score of a reward model, as `antiphon reward-model` trains one."""

from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from antiphon.core.errors import DataError
from antiphon.core.types import Message, Prompt, Score
from antiphon.tasks.base import Transcript
from antiphon.tasks.rendering import Renderer


class RewardModel:
    """What a sequence classifier of transformers with one label says of the conversation, at its last token."""

    def __init__(self, path: str, device: str = "cpu") -> None:
        """`path` is the model's directory, with its tokenizer. Each grading worker holds a model of its own, on `device`, and
        reads one conversation at a time. `DataError` if it has another number of labels."""
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
        """The score of the last response, closed as those of the model's training were; ungraded if there is none."""
        last = max((i for i, m in enumerate(transcript.messages) if m.role == "assistant"), default=None)
        if last is None:
            return Score.ungraded("there is no response")
        with torch.inference_mode():
            return Score.of(self._model(self._tokens(transcript.messages[: last + 1])).logits.item())

    def _tokens(self, messages: tuple[Message, ...]) -> torch.Tensor:
        """[1, L] of a conversation that ends with a response."""
        prompt = self._renderer.encode_prompt(messages[:-1])
        response = self._renderer.encode_response(messages[-1].content)
        return torch.tensor([[*prompt.tolist(), *response.tolist()]], device=self._model.device)
