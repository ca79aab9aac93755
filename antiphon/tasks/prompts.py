"""Convert rows of a source to prompts: messages, a stable id, and the whole row as payload."""

import difflib
import hashlib
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

from antiphon.core.errors import ConfigError, DataError
from antiphon.core.registry import Registry
from antiphon.core.rng import derive
from antiphon.core.types import Message, Prompt
from antiphon.core.user_errors import describe_error
from antiphon.tasks.config import PairsConfig, PromptsConfig, ResponsesConfig, TaskConfig
from antiphon.tasks.image_data import join_parts, place_images, read_images

SOURCES = Registry(
    "prompt source",
    {
        name: f"antiphon.tasks.sources:{name}"
        for name in (
            "jsonl",
            "parquet",
            "csv",
            "arrow",
            "text",
            "huggingface",
            "modelscope",
            "reasoning_gym",
            "numbered",
        )
    }
    | {"tools": "antiphon.tasks.environments.tools.problems:tool_problems"},
    group="antiphon.prompt_sources",
)

IMAGE_COLUMN = PromptsConfig.model_fields["image_column"].default
_ROLES = get_args(get_type_hints(Message)["role"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Place of a value in a dataset, for errors."""

    source: str
    path: str = ""
    row: int | None = None
    column: str = ""

    def error(self, message: str) -> DataError:
        """Return an error about the value."""
        row = f", row {self.row}" if self.row else ""
        column = f", column {self.column!r}" if self.column else ""
        message = f"{self.source}{row}{column}: {message}"
        return DataError(message, path=self.path, row=self.row, column=self.column)


def load_prompts(task: TaskConfig, prompts: PromptsConfig, seed: int, tasks: Sequence[TaskConfig] = ()) -> list[Prompt]:
    """Load the prompts of a task in the source's order.

    The id of a prompt depends on its own content only (or is the row's `id`); its seed is derived from `seed` and the id.

    Args:
        task: The task.
        prompts: Source of its prompts, to train or to test.
        seed: Seed of the run.
        tasks: Tasks that rows may name, if the task has a `route`.

    Raises:
        DataError: The source is empty, missing or malformed.
        ConfigError: The source does not take the options.
    """
    source = f"task {task.name!r}, {prompts.source}" + (f" {prompts.path}" if prompts.path else "")
    place = _Place(source=source, path=prompts.path)
    rows = enumerate(islice(_rows(prompts, place), prompts.limit or None), start=1)
    routes = {each.name: each for each in tasks if not each.route}
    drafts = [_make_prompt(row, task, prompts, replace(place, row=number), routes) for number, row in rows]
    if not drafts:
        raise place.error(f"there are no prompts of the split {prompts.split!r}")
    ids = _unique_ids([draft.id for draft in drafts], [_digest(draft) for draft in drafts])
    return [
        replace(draft, id=f"{task.name}/{name}", seed=draft.seed or derive(seed, "prompt", draft.task, name))
        for draft, name in zip(drafts, ids, strict=True)
    ]


def load_examples(
    name: str, examples: PairsConfig | ResponsesConfig, seed: int
) -> list[tuple[Prompt, tuple[str, ...]]]:
    """Load prompts as `load_prompts` does, each with the texts of its responses; `DataError` for a row that lacks one."""
    prompts = load_prompts(TaskConfig(name=name, prompts=examples), examples, seed)
    return [(prompt, tuple(_response(prompt, *of) for of in examples.responses.items())) for prompt in prompts]


def _response(prompt: Prompt, key: str, column: str) -> str:
    """Return the text in a column: a string, or the content of the last of its messages."""
    value = prompt.payload.get(column) if isinstance(prompt.payload, Mapping) else None
    place = _Place(source=f"prompt {prompt.id!r}", column=column)
    if value is None:
        known = ", ".join(map(str, prompt.payload)) if isinstance(prompt.payload, Mapping) else "no payload"
        raise place.error(f"it is missing ({key} names it); the row has {known}")
    last = Message("assistant", value) if isinstance(value, str) else _messages(value, place)[-1]
    if last.role != "assistant":
        raise place.error(f"the last message is the {last.role}'s, expected a response")
    return last.content


def _rows(prompts: PromptsConfig, place: _Place) -> Iterator[Any]:
    """Call the source; its errors name the task."""
    source: Callable[..., Iterable[Any]] = SOURCES.resolve(prompts.source)
    options = {**({"path": prompts.path} if prompts.path else {}), **prompts.options}
    try:
        inspect.signature(source).bind(prompts.split, **options)
    except TypeError as error:
        message = f"{place.source} is called with (split, **options), but {error}"
        raise ConfigError(message, key="options", value=options) from None
    try:
        yield from source(prompts.split, **options)
    except DataError as error:
        path = error.path or place.path
        raise DataError(f"{place.source}: {error}", path=path, row=error.row, column=error.column) from error
    except ConfigError as error:
        raise ConfigError.from_mistakes(replace(each, path=place.source) for each in error.mistakes) from error
    except Exception as error:  # named boundary: the user's source
        if prompts.source in SOURCES.shipped:
            raise
        raise DataError(f"{place.source}: {describe_error(error, source)}", path=place.path) from error


def _make_prompt(
    row: Any, task: TaskConfig, prompts: PromptsConfig, place: _Place, routes: Mapping[str, TaskConfig]
) -> Prompt:
    """Make a prompt; its id is the row's own, or empty."""
    if task.route:
        task = _route(row, replace(place, column=task.route), routes)
    system = (Message("system", task.system),) if task.system is not None else ()
    if isinstance(row, Prompt):
        return replace(row, task=task.name, messages=system + row.messages)
    if not isinstance(row, Mapping):
        raise place.error(f"is {type(row).__name__}, expected a mapping or a Prompt")
    payload, place = dict(row), replace(place, column=prompts.prompt_column)
    if prompts.prompt_column not in payload:
        raise place.error(_missing_column("prompt_column", prompts.prompt_column, list(payload)))
    messages = _messages(payload[prompts.prompt_column], place)
    given = payload.pop(prompts.image_column, None)
    if given is None and prompts.image_column != IMAGE_COLUMN and prompts.image_column not in row:
        raise place.error(_missing_column("image_column", prompts.image_column, list(payload)))
    if given is not None or _has_parts(row[prompts.prompt_column]):
        path, column = Path(prompts.path), replace(place, column=prompts.image_column)
        directory = path if path.is_dir() else path.parent
        images = read_images([] if given is None else given, directory, column.error)
        messages = place_images(messages, images, place.error)
    if messages[-1].role == "assistant":
        raise place.error("the last message is the assistant's, which gives the answer away: a prompt ends before it")
    own = payload.get("id")
    return Prompt(id="" if own is None else str(own), task=task.name, messages=system + messages, payload=payload)


def _route(row: Any, place: _Place, routes: Mapping[str, TaskConfig]) -> TaskConfig:
    """Return the task that a row names in the column of `place`."""
    payload = row.payload if isinstance(row, Prompt) else row
    if not isinstance(payload, Mapping):
        raise place.error(f"is {type(payload).__name__}, expected a mapping with this column (route names it)")
    if place.column not in payload:
        raise place.error(_missing_column("route", place.column, list(payload)))
    name = payload[place.column]
    if not isinstance(name, str) or name not in routes:
        message = f"names {name!r}: {_did_you_mean(str(name), list(routes))}"
        raise place.error(f"{message}a row can name {', '.join(routes) or 'none'}")
    return routes[name]


def _missing_column(key: str, column: str, columns: list[str]) -> str:
    known = ", ".join(map(str, columns)) or "none"
    return f"it is missing ({key} names it): {_did_you_mean(column, columns)}the row has {known}"


def _did_you_mean(name: str, valid: list[str]) -> str:
    nearest = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean {nearest[0]!r}? " if nearest else ""


def _messages(value: Any, place: _Place) -> tuple[Message, ...]:
    """Return messages: a string is one user message, a list holds messages."""
    if isinstance(value, str):
        return (Message("user", value),)
    if not isinstance(value, list) or not value:
        raise place.error(f"holds {type(value).__name__}, expected a string or a list of messages")
    return tuple(_message(item, place) for item in value)


def _has_parts(value: Any) -> bool:
    """Return True if the content of a message is a list of texts and images."""
    return isinstance(value, list) and any(isinstance(each.get("content"), list) for each in value)


def _message(item: Any, place: _Place) -> Message:
    if isinstance(item, Mapping) and isinstance(item.get("content"), list):
        item = {**item, "content": join_parts(item["content"], place.error)}
    if not isinstance(item, Mapping) or not isinstance(item.get("content"), str):
        raise place.error(f"a message is a mapping with the strings 'role' and 'content', not {item!r:.80}")
    if item.get("role") not in _ROLES:
        raise place.error(f"a message has the role {item.get('role')!r}, expected one of {', '.join(_ROLES)}")
    if given := [key for key in ("tool_calls", "tool_call_id") if item.get(key)]:
        raise place.error(
            f"a message has {given[0]}, which a prompt cannot have: write calls and results into its content"
        )
    return Message(item["role"], item["content"])


def _digest(prompt: Prompt) -> str:
    """Digest messages and payload."""
    content: Any = ([(message.role, message.content) for message in prompt.messages], prompt.payload)
    if images := [image for message in prompt.messages for image in message.images]:
        content = (*content, [hashlib.blake2b(image, digest_size=8).hexdigest() for image in images])
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _unique_ids(owns: list[str], digests: list[str]) -> list[str]:
    """Return the source's own id where it is unique, else the digest; exact copies get a counter."""
    times = Counter(owns)
    names = [own if own and times[own] == 1 else digest for own, digest in zip(owns, digests, strict=True)]
    copies: Counter[str] = Counter()
    ids = []
    for name in names:
        copies[name] += 1
        ids.append(name if copies[name] == 1 else f"{name}#{copies[name]}")
    return ids
