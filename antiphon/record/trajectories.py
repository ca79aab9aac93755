"""Trajectories as Parquet files, exact to the last bit, with one row a segment; pandas reads them.

    pandas.read_parquet("runs/tiny_arithmetic/rollouts")

A row names its attempt (`lineage`, `grp`, `sibling`, `try`) and its place among the attempt's segments; `tokens`,
`loss_mask`, `logprobs` and `versions` are lists of one length. Columns of the whole attempt (prompt, score, failure) are
repeated in each of its rows. `turns` and `streams` are meant for programs.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from antiphon.core.types import (
    AttemptId,
    AttemptStatus,
    Failure,
    PayloadReference,
    PlacedImage,
    PolicyVersion,
    Score,
    Segment,
    Streams,
    StreamSpec,
    TextStatistics,
    Timing,
    Trajectory,
    TrajectoryMeta,
    Turn,
)
from antiphon.record import image_files, safe_files

GROUP_TOKENS = 1 << 19  # of a row group, about
_STREAM = pa.struct(
    [("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int32())), ("data", pa.binary())]
)
SCHEMA = pa.schema(
    [
        ("lineage", pa.int32()),
        ("grp", pa.int64()),
        ("sibling", pa.int32()),
        ("try", pa.int32()),
        ("segment", pa.int32()),
        ("segments", pa.int32()),
        ("parent", pa.int32()),
        ("task", pa.string()),
        ("prompt", pa.string()),
        ("status", pa.string()),
        ("score", pa.float64()),
        ("tokens", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("turns", pa.string()),
        ("streams", pa.list_(_STREAM)),
        ("meta", pa.string()),
    ]
)
_IMAGE = pa.struct([("start", pa.int32()), ("stop", pa.int32()), ("digest", pa.string())])
SCHEMA_WITH_IMAGES = SCHEMA.append(pa.field("images", pa.list_(_IMAGE)))  # of a file in which a segment has images

# Columns with the word "attempt" are repeated in each row of an attempt's segments; L is the segment's number of tokens.
COLUMNS: Mapping[str, str] = {
    "lineage": "lineage of the attempt",
    "grp": "number of the attempt's group in its lineage",
    "sibling": "number of the attempt among the siblings of its group",
    "try": "number of the attempt among the tries of its sibling, from 0",
    "segment": "number of the segment in its attempt, from 0",
    "segments": "segments of the attempt",
    "parent": "segment that this one continues or was forked from; null if there is none",
    "task": "task of the attempt's prompt",
    "prompt": "id of the attempt's prompt",
    "status": "status of the attempt when it arrived: `finished` or `failed`. Its final status is in the ledger",
    "score": "score of the attempt; null if no grader gave one",
    "tokens": "token ids of prompt, observations and responses, [L]",
    "loss_mask": "true on tokens that the policy sampled, [L]",
    "logprobs": "log-probs with which the tokens of `loss_mask` were sampled, [L]",
    "versions": "policy versions that sampled the tokens of `loss_mask`, [L]",
    "turns": "turns of the segment, as JSON: place, reward, tool calls, timing",
    "streams": "further arrays with one row per token: name, dtype, shape of a row, bytes",
    "meta": "all other facts about the attempt, as JSON",
    "images": "images of the segment, if any has some: place of their tokens, and name of the file in `rollouts/_images/`",
}

_encode, _decode = msgspec.json.encode, msgspec.json.decode


def write(file: Path | IO[bytes], lineage: int, trajectories: Sequence[Trajectory]) -> None:
    """Write the trajectories of attempts of `lineage`. The file is not yet durable. Images are written by `image_files`."""
    rows = [
        (trajectory.meta, index, segment, len(trajectory.segments))
        for trajectory in trajectories
        for index, segment in enumerate(trajectory.segments)
    ]
    metas, segments = [row[0] for row in rows], [row[2] for row in rows]
    columns = [
        pa.array([lineage] * len(rows), pa.int32()),
        pa.array([meta.id.group for meta in metas], pa.int64()),
        pa.array([meta.id.sibling for meta in metas], pa.int32()),
        pa.array([meta.id.attempt for meta in metas], pa.int32()),
        pa.array([row[1] for row in rows], pa.int32()),
        pa.array([row[3] for row in rows], pa.int32()),
        pa.array([segment.parent for segment in segments], pa.int32()),
        pa.array([meta.task for meta in metas], pa.string()),
        pa.array([meta.prompt_id for meta in metas], pa.string()),
        pa.array([str(meta.status) for meta in metas], pa.string()),
        pa.array([meta.score.value for meta in metas], pa.float64()),
        *(_lists([getattr(segment, name) for segment in segments]) for name in _PER_TOKEN),
        pa.array([_encode(segment.turns).decode() for segment in segments], pa.string()),
        pa.array([[_stream(s.streams, spec) for spec in s.streams] for s in segments], pa.list_(_STREAM)),
        pa.array([_encode(meta).decode() for meta in metas], pa.string()),
    ]
    schema = SCHEMA
    if any(segment.images for segment in segments):
        schema = SCHEMA_WITH_IMAGES
        columns.append(pa.array([[_image(image) for image in s.images] for s in segments], pa.list_(_IMAGE)))
    table = pa.Table.from_arrays(columns, schema=schema)
    # A reader of one attempt reads its row group alone.
    tokens = sum(len(segment.tokens) for segment in segments)
    size = max(GROUP_TOKENS * len(rows) // max(tokens, 1), 1)
    # Log-probs hardly repeat: dictionaries would take half of the time, and half of the file.
    pq.write_table(table, file, row_group_size=size, compression="zstd", use_dictionary=False, write_statistics=False)


_PER_TOKEN = ("tokens", "loss_mask", "logprobs", "versions")


def digest(trajectory: Trajectory) -> int:
    """Return the CRC-32 of a trajectory's tokens, mask, log-probs, versions and images."""
    if isinstance(trajectory.payload, PayloadReference):
        return trajectory.payload.digest
    found = 0
    for segment in trajectory.segments:
        for name in _PER_TOKEN:
            found = crc32(np.ascontiguousarray(getattr(segment, name)).data, found)
        for image in segment.images:
            found = crc32(f"{image.start}:{image.stop}:{image.digest}".encode(), found)
    return found


def read(path: Path) -> dict[AttemptId, Trajectory]:
    """Read the trajectories of a file by attempt; raise `RecordError` if it is damaged."""
    table = safe_files.read_table(path, _schema_of(path))
    with safe_files.convert_read_errors(path):
        return _from_table(table, path.parent)


def read_attempt(path: Path, attempt: AttemptId) -> Trajectory | None:
    """Read the trajectory of one attempt without keeping those of others; None if the file does not have it."""
    names = ("grp", "sibling", "try")
    ids = safe_files.read_table(path, pa.schema([SCHEMA.field(name) for name in names]))
    with safe_files.convert_read_errors(path):
        found = zip(*(ids.column(name).to_pylist() for name in names), strict=True)
        rows = [row for row, numbers in enumerate(found) if numbers == attempt]
    if not rows:
        return None
    count = rows[-1] - rows[0] + 1  # segments of an attempt are neighbours
    table = safe_files.read_rows(path, _schema_of(path), rows[0], count)
    with safe_files.convert_read_errors(path):
        return _from_table(table, path.parent).get(attempt)


def _schema_of(path: Path) -> pa.Schema:
    safe_files.resolve_file(path.parent, path.name)
    with safe_files.convert_read_errors(path):
        return SCHEMA_WITH_IMAGES if "images" in pq.read_schema(path).names else SCHEMA


def _from_table(table: pa.Table, rollouts: Path) -> dict[AttemptId, Trajectory]:
    found: dict[AttemptId, list[Segment]] = {}
    metas: dict[AttemptId, TrajectoryMeta] = {}
    load = cache(partial(image_files.read_image, rollouts))
    arrays = {name: _split(table.column(name)) for name in _PER_TOKEN}
    others = table.drop_columns(list(_PER_TOKEN)).to_pylist()
    for index, row in enumerate(others):
        attempt = AttemptId(row["grp"], row["sibling"], row["try"])
        streams = {_spec(stream): _array(stream) for stream in row["streams"]}
        segment = Segment(
            **{name: arrays[name][index] for name in _PER_TOKEN},
            turns=msgspec.json.decode(row["turns"], type=tuple[Turn, ...]),
            streams=Streams(streams),
            parent=row["parent"],
            images=tuple(
                PlacedImage(load(each["digest"]), each["start"], each["stop"]) for each in row.get("images", ())
            ),
        )
        found.setdefault(attempt, []).append(segment)
        metas[attempt] = _meta(row["meta"])
    return {attempt: Trajectory(meta=metas[attempt], payload=tuple(found[attempt])) for attempt in found}


def read_metas(path: Path) -> dict[AttemptId, TrajectoryMeta]:
    """Read the metadata of the trajectories of a file by attempt, without tokens."""
    texts = safe_files.read_table(path, pa.schema([SCHEMA.field("meta")])).column("meta").to_pylist()
    with safe_files.convert_read_errors(path):
        return {meta.id: meta for meta in map(_meta, texts)}


def _meta(text: str) -> TrajectoryMeta:
    fields = _decode(text)
    return TrajectoryMeta(
        **fields
        | {
            "id": AttemptId(*fields["id"]),
            "started": PolicyVersion(**fields["started"]),
            "newest": PolicyVersion(**fields["newest"]),
            "status": AttemptStatus(fields["status"]),
            "score": msgspec.convert(fields["score"], Score),
            "failure": fields["failure"] and Failure(**fields["failure"]),
            "timing": Timing(**fields["timing"]),
            "wording": TextStatistics(*found) if (found := fields.get("wording")) else None,
        }
    )


def _lists(arrays: Sequence[np.ndarray]) -> pa.Array:
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(arrays) if arrays else []))


def _split(column: pa.ChunkedArray) -> list[np.ndarray]:
    whole = column.combine_chunks()
    values = whole.flatten().to_numpy(zero_copy_only=False)
    offsets = whole.offsets.to_numpy() - (whole.offsets[0].as_py() if len(whole) else 0)
    return [values[start:stop] for start, stop in itertools.pairwise(offsets)]


def _stream(streams: Streams, spec: StreamSpec) -> dict[str, Any]:
    data = np.ascontiguousarray(streams[spec]).tobytes()
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "data": data}


def _image(image: PlacedImage) -> dict[str, Any]:
    return {"start": image.start, "stop": image.stop, "digest": image.digest}


def _spec(stream: dict[str, Any]) -> StreamSpec:
    return StreamSpec(stream["name"], stream["dtype"], tuple(stream["shape"]))


def _array(stream: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(stream["data"], stream["dtype"]).reshape(-1, *stream["shape"])


def with_id(trajectory: Trajectory, attempt: AttemptId) -> Trajectory:
    """Return a trajectory with another id."""
    return replace(trajectory, meta=replace(trajectory.meta, id=attempt))
