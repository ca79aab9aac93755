"""Instances by path: rows of SWE-bench in a file, or directories of Terminal-Bench and Harbor tasks."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from antiphon.core.errors import ConfigError, DataError
from antiphon.sandbox.sessions.docker import missing_images
from antiphon.tasks.sources import jsonl, parquet
from antiphon_envs.task_images import harbor, swe_bench, terminal_bench
from antiphon_envs.task_images.instance import Instance

FORMATS: Mapping[str, type[Instance]] = {
    "swe_bench": swe_bench.SweBench,
    "terminal_bench": terminal_bench.TerminalBench,
    "harbor": harbor.Harbor,
}
_DIRECTORIES = {
    "terminal_bench": terminal_bench.CONFIG,
    "harbor": harbor.CONFIG,
}  # the file that each format's tasks have
_MOST_NAMED = 5  # missing images that an error names


def task_images(
    split: str,
    path: str = "",
    format: str = "",
    image: str = "",
    test_command: str = "",
    log_parser: str = "",
    check_images: bool = True,
) -> Iterator[dict[str, Any]]:
    """Yield a prompt for each instance at a path.

    Args:
        split: Split of the rows. A directory of tasks has splits if it has directories named as these.
        path: A JSONL or Parquet file of rows, a directory with a file for each split, a task, or a directory of tasks.
        format: `swe_bench`, `terminal_bench` or `harbor`; by default what is there.
        image: Name of the image instead of the published one; `{instance_id}` (of a row) or `{task}` is replaced.
        test_command: Command that runs the tests of rows, instead of the row's.
        log_parser: Parser of the logs of rows, instead of the row's.
        check_images: Look for the images on this machine. Set it to False if environments run on others.

    Raises:
        DataError: A row or a task is malformed, or its image is not on this machine.
        ConfigError: An option is wrong.
    """
    if format not in ("", *FORMATS):
        message = f"is {format!r}, expected one of {', '.join(FORMATS)}"
        raise ConfigError(message, key="format", value=format, valid=tuple(FORMATS))
    if not path:
        raise ConfigError("is missing: it names a file of rows or a directory of tasks", key="path")
    directories = [] if format == "swe_bench" else list(find_tasks(Path(path), split, format))
    if directories:
        if wrong := [key for key, text in {"test_command": test_command, "log_parser": log_parser}.items() if text]:
            raise ConfigError("is an option of rows in the form of SWE-bench only", key=wrong[0])
        instances: list[Instance] = [_read_task(directory, image) for directory in directories]
    elif format in _DIRECTORIES:
        raise DataError(f"there is no task in {path}: none of its directories has a {_DIRECTORIES[format]}", path=path)
    else:
        options = {"image": image, "test_command": test_command, "log_parser": log_parser}
        instances = [swe_bench.read_row(row, **options) for row in _rows(split, path)]
    if check_images:
        require_images(instances)
    for instance in instances:
        yield {"prompt": instance.instruction, "id": instance.id, "instance": to_row(instance)}


def _rows(split: str, path: str) -> Iterator[dict[str, Any]]:
    place = Path(path)
    is_parquet = any(place.glob(f"{split}*.parquet")) if place.is_dir() else place.suffix == ".parquet"
    return (parquet if is_parquet else jsonl)(split, path)


def find_tasks(place: Path, split: str, format: str = "") -> Iterator[Path]:
    """Yield the directories of tasks: `place` itself, or those in it, or those in its directory of the split."""
    files = [_DIRECTORIES[format]] if format else list(_DIRECTORIES.values())

    def is_task(directory: Path) -> bool:
        return any((directory / file).is_file() for file in files)

    if is_task(place):
        yield place
    elif place.is_dir():
        divided = place / split
        yield from filter(is_task, sorted((divided if divided.is_dir() else place).iterdir()))


def _read_task(directory: Path, image: str) -> Instance:
    module = harbor if (directory / harbor.CONFIG).is_file() else terminal_bench
    return module.read_task(directory, image)


def require_images(instances: Iterable[Instance]) -> None:
    """Check that the images of all instances are on this machine.

    Raises:
        DataError: Some are not; the message has the instances and the commands that get the images.
        UnsupportedError: docker is missing.
        SandboxError: docker's daemon does not answer.
    """
    instances = list(instances)
    missing = {*missing_images(instance.image for instance in instances)}
    without = [instance for instance in instances if instance.image in missing]
    if without:
        lines = [f"{each.id} needs the image {each.image}: {each.obtain}" for each in without[:_MOST_NAMED]]
        if len(without) > _MOST_NAMED:
            lines.append(f"and {len(without) - _MOST_NAMED} more")
        raise DataError("images are missing on this machine:\n" + "\n".join(lines), column="image")


def to_row(instance: Instance) -> dict[str, Any]:
    """Return an instance as plain data."""
    name = next(name for name, kind in FORMATS.items() if type(instance) is kind)
    return {"format": name, **msgspec.to_builtins(instance)}


def instance_of(row: Any) -> Instance:
    """Return an instance from plain data; `DataError` if something is missing or wrong."""
    kind = FORMATS.get(row.get("format", "")) if isinstance(row, Mapping) else None
    if kind is None:
        raise DataError(f"this is not a task in an image: it has none of the formats {', '.join(FORMATS)}")
    try:
        return msgspec.convert({key: value for key, value in row.items() if key != "format"}, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"this is not a task in an image: {error}") from None
