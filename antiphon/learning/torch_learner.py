"""The learner of a policy: its loss, its log-probs, its weights made known."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import filterfalse

import numpy as np
import torch
from transformers import PreTrainedModel

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.losses import LossInputs
from antiphon.algorithms.registry import resolve_loss
from antiphon.algorithms.token_loss import token_loss
from antiphon.core.errors import AntiphonError, ConfigError
from antiphon.core.types import MIXED_CACHE, SAMPLING_SUPPORT, FloatArray, Pack, WeightsUpdate
from antiphon.learning.checkpointed_learner import gather_copies, trim_memory
from antiphon.learning.config import OptimizerConfig
from antiphon.learning.host_device_copy import sum_measures
from antiphon.learning.mesh import Mesh
from antiphon.learning.model import lora
from antiphon.learning.model.attention_stats import AllLayersRead, AttentionStatsReader, middle_layers
from antiphon.learning.model.hf_checkpoint import rename_as_in_files
from antiphon.learning.model.loading import head_weight, load_model
from antiphon.learning.model.logprobs import token_logprobs
from antiphon.learning.pack_learner import PackLearner
from antiphon.learning.parallel.sharding import ShardedModel
from antiphon.weights.adapters import flatten_adapters
from antiphon.weights.base import TransferContext, open_channel
from antiphon.weights.manifest import Adapters, Piece, SentPieces, TensorSpec
from antiphon.weights.reshard import assign_senders, join_updates


class TorchLearner(PackLearner):
    """Trains a policy."""

    _pieces: tuple[Piece, ...] | None = None  # that this rank sends, once all ranks know

    def _load(self) -> PreTrainedModel:
        model = load_model(self.model_path, attention=self.attention, device=self._load_device)
        head_weight(model)  # or there is none to be had
        return model

    def _load_model(self) -> None:
        super()._load_model()
        if self.config.lora is not None:  # or modules whose weights cannot be sent would be found when they first are
            list(self._trained_tensors())

    @property
    def head(self) -> torch.Tensor:
        """The language model head [V, H], or this rank's rows of it."""
        return head_weight(self.model)

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a training phase with the loss of `algorithm`; return the number of trained parameters."""
        self.loss = resolve_loss(algorithm)
        return super().begin(algorithm, optimizer, total_updates)

    def publish(self, version: int, transfer: TransferContext) -> WeightsUpdate:
        """Publish the current weights as `version`."""
        trim_memory()
        if transfer.senders == "all" and isinstance(self.shards, ShardedModel) and self.config.lora is None:
            return self._publish_pieces(version, transfer, self.shards)
        named, base = self.shards.gather_parameters(), None
        if self.config.lora is not None:
            named, base = self._trained_tensors(), Adapters(self.model_path, self.config.lora.scale)
        if self._is_first:
            return open_channel(transfer).send(named, version, base)
        gather_copies({name: tensor.detach for name, tensor in named}, keep=False)
        return WeightsUpdate(version=version, location="", manifest=None)

    def _trained_tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield adapters, and what is trained beside them by its names in the files of the base."""
        trained = dict(self.shards.gather_parameters(trained=True))
        yield from flatten_adapters(rename_as_in_files(self.model, lora.adapter_pairs(trained.items())))
        for name in filterfalse(lora.is_adapter, trained):
            yield from ((stored, trained[name]) for stored in self._base_files.stored_names(self._names[name]))

    def _publish_pieces(self, version: int, transfer: TransferContext, shards: ShardedModel) -> WeightsUpdate:
        """Send this rank's pieces; return what all ranks sent together."""
        assert self.mesh is not None
        own: SentPieces | Exception | None
        try:
            own = self._send_pieces(version, transfer, shards, self.mesh)
        except (AntiphonError, OSError, RuntimeError) as error:  # which the other ranks wait to hear of
            own = error
        parts = []
        for part in self.mesh.all_gather(own):
            if isinstance(part, Exception):
                raise part
            if part is not None:
                parts.append(part)
        return join_updates(version, parts)

    def _send_pieces(
        self, version: int, transfer: TransferContext, shards: ShardedModel, mesh: Mesh
    ) -> SentPieces | None:
        held = dict(shards.named_pieces())
        if self._pieces is None:
            self._pieces = tuple(assign_senders(mesh.all_gather(list(held)))[mesh.rank])
        if not self._pieces:
            return None
        channel = open_channel(replace(transfer, host=mesh.host))  # of its own, on its machine
        return SentPieces(channel.send(((piece.name, held[piece]) for piece in self._pieces), version), self._pieces)

    def predict_base(self, packs: list[Pack]) -> list[FloatArray]:
        """Return log-probs under the model as it was loaded, without adapters, [T] a pack."""
        trained = {name: piece for name, piece in self.shards.local_parameters() if piece.requires_grad}
        saved = {name: trained[name] for name in filterfalse(lora.is_adapter, trained)}
        asks = {name: partial(self.shards.gather_tensor, name, piece) for name, piece in saved.items()}
        values = gather_copies(asks, keep=True)
        try:
            for name, piece in saved.items():
                self.shards.scatter_tensor(name, piece, self._base_files[name])
            with lora.adapters_disabled(self.model):
                return self.predict(packs)
        finally:
            for name, piece in saved.items():
                self.shards.scatter_tensor(name, piece, values[name])

    def logprobs_and_entropies(self, packs: list[Pack]) -> list[FloatArray]:
        """Return log-prob and entropy of each loss token, 0 elsewhere, [T, 2] a pack."""
        return self._query(packs, lambda outputs: torch.stack(outputs, -1))

    def attention_stats(self, packs: list[Pack]) -> list[FloatArray]:
        """Compute WAAD and FAI of the loss tokens from this learner's own weights; see `learning.model.attention_stats`.

        Returns:
            One array [T, 2] a pack, 0 outside the loss.

        Raises:
            UnsupportedError: The model's attention is not plain, or cannot be read.
        """
        middle = middle_layers(self.model.config.get_text_config().num_hidden_layers)
        here = [number for number in middle if self.shards.has_layer(number)]
        readers = {
            id(pack): AttentionStatsReader(pack, here, self.algorithm.rhythm, self.device, self.mesh) for pack in packs
        }

        def pass_on(pack: Pack) -> torch.Tensor:
            return self._pipeline_forward(pack, readers.get(id(pack)))  # none of a pack that only fills up

        def ask(pack: Pack) -> None:
            with self._autocast(), contextlib.suppress(AllLayersRead):
                self.shards.run(self._hidden, pack, self._targets(pack), readers.get(id(pack)))

        with torch.no_grad():
            self.shards.run_packs(packs, pass_on, ask)
            return [readers[id(pack)].values() for pack in packs]

    def check_memory_profile(self) -> None:
        """Raise `ConfigError` if this rank has no GPU whose memory could be profiled."""
        if self.device.type != "cuda":
            raise ConfigError(f"needs CUDA, and the learner runs on {self.device}", key="profile.memory", value=True)

    def _backward(self, pack: Pack) -> dict[str, torch.Tensor]:
        targets = self._targets(pack)
        logprobs, entropies = self.shards.run(self._forward, pack, targets)
        sequence = self._tensor(np.repeat(pack.owners, pack.lengths))[targets]
        inputs = LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=self._tensor(pack.logprobs)[targets],
            advantages=self._tensor(pack.advantages)[targets],
            sequence=sequence,
            turn=_turns(targets, sequence),
            streams={spec: self._tensor(pack.streams[spec])[targets] for spec in pack.streams},
        )
        per_token, metrics = token_loss(self.loss, inputs, self.algorithm)
        loss = (self._tensor(pack.coefficients)[targets] * per_token).sum()
        if torch.is_grad_enabled():
            self.shards.backward(loss)
        with torch.no_grad():
            difference = inputs.old_logprobs - logprobs
            mismatch = difference.neg().exp() - 1 + difference  # k3 of KL(behaviour ‖ policy)
            measures = metrics | {"entropy": entropies, "mismatch_kl": mismatch}
            if MIXED_CACHE in inputs.streams:
                mixed = inputs.streams[MIXED_CACHE].float()
                measures |= {"mixed_share": mixed, "mixed_mismatch_kl": mismatch * mixed}
            return sum_measures(loss, measures, len(logprobs))

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the log-probs and entropies of the loss tokens, [N] each."""
        support = self._tensor(pack.streams[SAMPLING_SUPPORT]) if SAMPLING_SUPPORT in pack.streams else None

        def compute(hidden: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
            return token_logprobs(
                hidden,
                self.head,
                self._tensor(pack.tokens).long()[targets[here]],
                self._tensor(pack.temperatures)[targets[here]],
                self.config.logits_chunk,
                self.shards.vocabulary,
                None if support is None else support[targets[here]],
            )

        with self._autocast():
            return self._split_over_context(self._hidden(pack, targets), compute)


def _turns(targets: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Return the turn of the pack that each loss token belongs to, [N]; the places of the tokens of a turn are consecutive."""
    begins = (targets.diff() != 1) | (sequence.diff() != 0)
    return torch.cat([begins.new_zeros(min(len(targets), 1)), begins]).cumsum(0)
