"""Whether each trajectory of a run's record is, token for token, what the engines sampled and what the agents were told.

Three witnesses are held against each other: the record (`rollouts/`), what the engines wrote down where they sampled
(`engine_witness`), and what the agents' framework got (`agent_witness`). Log-probs are computed anew besides, by transformers
with the checkpoint of the version that sampled each token. Nothing of the gateway, the learner or the engines is used for it.
"""

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
TOLERANCE = 1e-3  # of log-probs: float32, sums in another order
BATCH = 64

Row = Mapping[str, Any]  # of the record: a segment
Note = Mapping[str, Any]  # of an engine: a request


@dataclass(slots=True)
class Exactness:
    """What was compared, and what was not equal."""

    trajectories: int = 0
    segments: int = 0
    turns: int = 0
    tool_calls: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    """That engines were given, over all turns."""
    otherwise_tokenised: int = 0
    """Turns whose text the tokenizer reads as other tokens than were sampled."""
    rendered_otherwise: int = 0
    """Turns before which the chat template, given the conversation as the framework sent it, has other tokens than the prompt:
    had prompts been rendered anew, each would have been a mismatch."""
    recomputed_tokens: int = 0
    mixed_cache_tokens: int = 0
    """Sampled after an update in flight: no single version can compute their log-probs again."""
    logprob_difference_mean_1e6: float = 0.0
    """Of recomputed and recorded log-probs, in millionths."""
    logprob_difference_max_1e6: float = 0.0
    mismatches: list[str] = field(default_factory=list)


def verify(run: Path, witnesses: Path) -> Exactness:
    """Check every trajectory in the directory of a run that has ended."""
    found = Exactness()
    rows = pq.read_table(run / "rollouts").to_pylist()
    attempts: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        attempts[row["grp"], row["sibling"], row["try"]].append(row)
    sampled: dict[str, list[Note]] = defaultdict(list)
    for note in (note for path in witnesses.glob("engine-*.jsonl") for note in _lines(path)):
        sampled[note["request"].partition("/")[0]].append(note)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "model")
    told: dict[str, list[Note]] = defaultdict(list)
    for note in _lines(witnesses / "agent.jsonl"):
        told[json.dumps([note["prompt"], note["replies"]])].append(note)
    for attempt, segments in attempts.items():
        name = ".".join(map(str, attempt))
        segments.sort(key=lambda row: row["segment"])
        problems = [*_as_sampled(segments, sampled[name]), *_told(segments, sampled[name], told, tokenizer, found)]
        found.mismatches += [f"{name}: {problem}" for problem in problems]
        _count(segments, sampled[name], found)
    found.trajectories = len(attempts)
    _recompute(run, rows, found)
    return found


def _as_sampled(segments: list[Row], notes: list[Note]) -> Iterator[str]:
    """Every request of the attempt is a turn with its tokens, log-probs and versions, after the very prompt that the engine was
    given; and the loss mask covers these tokens and no others."""
    left = Counter(_key(note["prompt"], note["tokens"], note["logprobs"], note["versions"]) for note in notes)
    for row in segments:
        covered = np.zeros(len(row["tokens"]), bool)
        for turn in json.loads(row["turns"]):
            span = slice(turn["start"], turn["stop"])
            columns = (row[name][span] for name in ("tokens", "logprobs", "versions"))
            key = _key(row["tokens"][: span.start], *columns)
            if not left[key]:
                yield f"no engine has sampled turn {span.start}:{span.stop} of segment {row['segment']} after this prompt"
            left[key] -= left[key] > 0
            covered[span] = True
        if covered.tolist() != row["loss_mask"]:
            yield f"the loss mask of segment {row['segment']} is not what was sampled"
        if any(logprob for logprob, ours in zip(row["logprobs"], covered, strict=True) if not ours):
            yield f"segment {row['segment']} has log-probs where nothing was sampled"
    if missing := left.total():
        yield f"{missing} requests were answered and are not in the record"
    parts = json.loads(segments[0]["meta"])["score"]["parts"]
    if len(segments) > 1 + parts["forks"] + parts["retries"]:
        yield f"{len(segments)} segments, but {parts['forks']:g} forks and {parts['retries']:g} retries"


def _told(
    segments: list[Row], notes: list[Note], told: dict[str, list[Note]], tokenizer: Any, found: Exactness
) -> Iterator[str]:
    """Some run of the agent on this prompt got what the tokens say, reply by reply; each run is taken once."""
    notes = sorted(notes, key=lambda note: int(note["request"].partition("/")[2]))
    replies = []
    for note in notes:
        text = tokenizer.decode(note["tokens"], skip_special_tokens=True)
        spoken = [token for token in note["tokens"] if token not in tokenizer.all_special_ids]
        found.otherwise_tokenised += tokenizer.encode(text, add_special_tokens=False) != spoken
        calls = [call for written in CALL.findall(text) if (call := _call(written))]
        found.tool_calls += len(calls)
        replies.append((CALL.sub("", text).strip() if calls else text, calls))
    line = json.dumps([segments[0]["prompt"], replies])
    if not told[line]:
        yield f"no run of the agent was told {line}"
        return
    for note, asked in zip(notes, told[line].pop()["asked"], strict=True):
        rendered = tokenizer.apply_chat_template(_messages(asked), tokenize=False, add_generation_prompt=True)
        found.rendered_otherwise += tokenizer.encode(rendered, add_special_tokens=False) != note["prompt"]


def _messages(items: list[Any]) -> list[dict[str, Any]]:
    """The conversation that the framework has, as chat templates take it."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item:
            case {"type": "function_call", "name": name, "arguments": arguments}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                call = {"type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
                messages[-1].setdefault("tool_calls", []).append(call)
            case {"type": "function_call_output", "output": output}:
                messages.append({"role": "tool", "content": output})
            case {"role": role, "content": str(text)}:
                messages.append({"role": role, "content": text})
            case {"role": role, "content": parts}:
                messages.append({"role": role, "content": "".join(part["text"] for part in parts)})
    return messages


def _call(written: str) -> tuple[str, Any] | None:
    """The name and the arguments, if it is a call that can be read."""
    try:
        match json.loads(written):
            case {"name": str(name), "arguments": dict(arguments)}:
                return name, arguments
    except ValueError:
        pass
    return None


def _recompute(run: Path, rows: list[Row], found: Exactness) -> None:
    """Log-probs of every token that one version's cache was sampled from, with the weights of that version."""
    with sqlite3.connect(run / "ledger.db") as ledger:
        names = dict(ledger.execute("SELECT version, name FROM checkpoints"))
    differences = []
    for version, name in names.items():
        chosen = [(row, mask) for row in rows if (mask := _exact(row, version)).any()]
        chosen.sort(key=lambda pair: len(pair[0]["tokens"]))
        model = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / name, dtype=torch.float32).eval()
        for start in range(0, len(chosen), BATCH):
            differences.append(_differences(model, chosen[start : start + BATCH]))
    found.mixed_cache_tokens = sum(int(_mixed(row).sum()) for row in rows)
    found.recomputed_tokens = sum(map(len, differences))
    if missing := found.sampled_tokens - found.mixed_cache_tokens - found.recomputed_tokens:
        found.mismatches.append(f"{missing} tokens are of versions without a checkpoint")
    if found.recomputed_tokens:
        every = np.concatenate(differences)
        found.logprob_difference_mean_1e6 = 1e6 * float(every.mean())
        found.logprob_difference_max_1e6 = 1e6 * float(every.max())
        found.mismatches += [f"a log-prob is {off:.2g} off" for off in every[every > TOLERANCE]]


def _differences(model: Any, chosen: list[tuple[Row, np.ndarray]]) -> np.ndarray:
    """How far recorded log-probs at the chosen tokens are from those of the model; padding comes after, and is not seen."""
    longest = max(len(row["tokens"]) for row, _ in chosen)
    tokens = torch.zeros(len(chosen), longest, dtype=torch.long)
    for place, (row, _) in enumerate(chosen):
        tokens[place, : len(row["tokens"])] = torch.tensor(row["tokens"])
    with torch.inference_mode():
        logprobs = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0].numpy()
    return np.concatenate(
        [
            np.abs(logprobs[place, : len(mask) - 1] - np.array(row["logprobs"])[1:])[mask[1:]]
            for place, (row, mask) in enumerate(chosen)
        ]
    )


def _exact(row: Row, version: int) -> np.ndarray:
    """Tokens [L] that this version sampled, after a cache of its own."""
    return np.array(row["loss_mask"]) & (np.array(row["versions"]) == version) & ~_mixed(row)


def _mixed(row: Row) -> np.ndarray:
    (stream,) = (stream for stream in row["streams"] if stream["name"] == "mixed_cache")
    return np.frombuffer(stream["data"], stream["dtype"])


def _count(segments: list[Row], notes: list[Note], found: Exactness) -> None:
    found.segments += len(segments)
    found.turns += len(notes)
    found.sampled_tokens += sum(sum(row["loss_mask"]) for row in segments)
    found.prompt_tokens += sum(len(note["prompt"]) for note in notes)


def _key(*columns: Any) -> str:
    return json.dumps(columns)


def _lines(path: Path) -> Iterable[Any]:
    return map(json.loads, path.read_text().splitlines())
