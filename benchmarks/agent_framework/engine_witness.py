"""The native engine, writing down what it was given and what it sampled: `engine.kind: engine_witness:open_engine`.

Lines of `engine-<process>.jsonl` in the folder that EXACTNESS names, one a request that ran to its end.
"""

import json
import os
from pathlib import Path
from typing import Any

from antiphon.core.types import MIXED_CACHE, FinishReason, GenerateRequest
from antiphon.engines.deltas import Delta
from antiphon.engines.native.engine import NativeEngine
from antiphon.engines.stops import read_decoder


class Witness(NativeEngine):
    """Notes on the side; draws as it would."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._notes: dict[str, tuple[list[int], list[Delta]]] = {}
        self._path = Path(os.environ["EXACTNESS"], f"engine-{os.getpid()}.jsonl")

    def add(self, request: GenerateRequest) -> None:
        """See `EngineCore.add`."""
        super().add(request)
        self._notes[request.id] = request.tokens.tolist(), []

    def step(self) -> list[Delta]:
        """See `EngineCore.step`."""
        deltas = super().step()
        for delta in deltas:
            self._notes[delta.request][1].append(delta)
            if delta.finish is not None:
                self._write(delta.request, *self._notes.pop(delta.request))
        return deltas

    def _write(self, request: str, prompt: list[int], deltas: list[Delta]) -> None:
        whole = Delta.join(deltas)
        if whole.finish is not FinishReason.ABORT:
            columns = {name: getattr(whole, name).tolist() for name in ("tokens", "logprobs", "versions")}
            columns["mixed_cache"] = whole.streams[MIXED_CACHE].tolist()
            with self._path.open("a") as file:
                file.write(json.dumps({"request": request, "prompt": prompt, **columns}) + "\n")


def open_engine(model: str, config: Any, receive: Any) -> Witness:
    """See `antiphon.engines.native.factory.open_engine`."""
    return Witness(model, config, receive=receive, tokenizer=read_decoder(model))
