"""Meshes: how a learner's model is divided among ranks. Importing it imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from antiphon.core.config import Config, unit

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # names of how many a layer has


def count_experts(shape: Mapping[str, Any]) -> int | None:
    """Return how many experts a layer has, from a model's config.json; None if its layers are dense."""
    return next(filter(None, map(shape.get, EXPERTS)), None)


class MeshConfig(Config):
    """The ranks of a learner, each a process with a device of its own: replicate x shard x context x tensor x pipeline."""

    replicate: Annotated[int, unit("ranks")] = Field(1, gt=0)
    """Copies of the model, each of which has a share of the packs."""
    shard: Annotated[int, unit("ranks")] = Field(1, gt=0)
    """Ranks among which parameters, gradients and optimiser state are cut (FSDP), each with a share of the packs."""
    context: Annotated[int, unit("ranks")] = Field(1, gt=0)
    """Ranks among which the tokens of a pack are divided."""
    tensor: Annotated[int, unit("ranks")] = Field(1, gt=0)
    """Ranks among which heads, feed-forward columns and the vocabulary are divided."""
    pipeline: Annotated[int, unit("ranks")] = Field(1, gt=0)
    """Ranks among which the layers are divided."""
    pipeline_chunks: Annotated[int, unit("stages per rank")] = Field(1, gt=0)
    """Stages that each of them has; with several, packs are through sooner, and more is sent (interleaved 1F1B)."""
    expert: Annotated[int, unit("ranks")] = Field(1, gt=0)
    """Number of the ranks of `shard` among which the experts of a mixture are divided."""
    context_attention: Literal["heads", "keys"] = "heads"
    """With `context`, whether ranks exchange tokens for heads (Ulysses), or gather the keys of all tokens."""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def data(self) -> int:
        """Shares that packs are divided into."""
        return self.replicate * self.shard

    def data_rank(self, rank: int) -> int:
        """Return which share of the packs a rank computes; `learning.mesh` says how ranks are laid out."""
        around, expert = divmod(rank // self.tensor, self.expert)
        copy, shard = divmod(around // self.context, self.shard // self.expert)
        return copy % self.replicate * self.shard + shard * self.expert + expert

    def unused_beside_shard(self, kind: str) -> Iterator[tuple[str, str]]:
        """Yield axes that a kind of learner cannot use which divides among the ranks of `shard` alone: (key, message)."""
        if self.shard == 1:
            yield "mesh.shard", f"1 leaves {kind!r} (learner.kind) nothing to divide: give 2 or more"
        for axis in ("replicate", "context", "tensor", "pipeline", "expert"):
            if (ranks := getattr(self, axis)) > 1:
                yield f"mesh.{axis}", f"{ranks}: {kind!r} (learner.kind) divides among the ranks of mesh.shard alone"

    def incompatibilities(self, shape: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield what cannot be divided in a model, from its config.json: (key, message)."""
        heads = shape.get("num_attention_heads") or 0
        keys = shape.get("num_key_value_heads") or heads
        parts = {
            "tensor": {
                "attention heads": heads,
                "key and value heads": keys,
                "feed-forward columns": shape.get("intermediate_size"),
            },
            "expert": {"experts": count_experts(shape)},
        }
        if self.expert > 1 and not any(count for key, count in shape.items() if "expert" in key):
            yield "expert", f"{self.expert} ranks have no experts to divide: its layers are dense"
        if "vision_config" in shape:
            for axis in ("context", "tensor", "pipeline", "expert"):
                if (ranks := getattr(self, axis)) > 1:
                    yield axis, f"{ranks}: a vision-language model is divided by replicate and shard only"
        for key, counts in parts.items():
            for what, count in counts.items():
                if count and count % getattr(self, key):
                    yield key, f"{getattr(self, key)} ranks cannot divide {count} {what} evenly"
        stages, layers = self.pipeline * self.pipeline_chunks, shape.get("num_hidden_layers") or 0
        if layers % stages:
            yield "pipeline", f"{layers} layers cannot be cut into {stages} equal stages (pipeline x pipeline_chunks)"
        heads, keys = heads // self.tensor, keys // self.tensor
        uneven = bool(heads) and (heads % self.context or (keys % self.context and self.context % keys))
        if self.context_attention == "heads" and uneven:
            yield (
                "context",
                f"{self.context} ranks cannot divide {heads} attention heads and {keys} key and value heads evenly; "
                "context_attention: keys need not",
            )


class MeshesConfig(Config):
    """Meshes of models that do not have `learner.mesh`. Of several critics or teachers each has the ranks of one."""

    reference: MeshConfig | None = None
    """Mesh of the reference; null is that of `learner.mesh`."""
    critic: MeshConfig | None = None
    """Mesh of the critic; null is that of `learner.mesh`."""
    teacher: MeshConfig | None = None
    """Mesh of the teacher; null is that of `learner.mesh`."""

    @property
    def roles(self) -> dict[str, MeshConfig]:
        """The meshes of the roles that have one of their own."""
        return {role: mesh for role in type(self).model_fields if (mesh := getattr(self, role)) is not None}
