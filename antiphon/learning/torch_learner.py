"""The learner on torch: packs in, an updated model out. One process; it knows losses, not where samples came from."""

import contextlib
import ctypes
import math
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.losses import LossInputs, total_loss
from antiphon.algorithms.registry import LOSSES
from antiphon.algorithms.routing import Routers
from antiphon.errors import AntiphonError, DataError
from antiphon.learning import lora
from antiphon.learning.attention import NAME as PACKED_ATTENTION
from antiphon.learning.attention import PackLayout, Reader
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.lean import make_lean
from antiphon.learning.learner import SAVED
from antiphon.learning.logprobs import token_logprobs
from antiphon.learning.models import head_weight, load_model, resolve_device
from antiphon.learning.rhythm import AllRead, RhythmReader, middle_layers
from antiphon.points import reach
from antiphon.record.checkpoint import TRAINING_STATE, written
from antiphon.types import MIXED_CACHE, ROUTED_EXPERTS, FloatArray, Pack, TrainBatch, Update, WeightsUpdate
from antiphon.weights.adapters import flat
from antiphon.weights.base import Adapters, Exchange, channel
from antiphon.workers import Worker

ADAPTER = "adapter"  # where a checkpoint has what peft reads
WRITER_PATIENCE = 0.005  # seconds that a call may have to wait for a look at the writer


class PackLearner(Worker):
    """Holds a model and its optimiser. `begin` a phase, then `step` and `save`. What the model is, and what its loss, is a
    subclass's to say."""

    def __init__(self, model_path: str, config: LearnerConfig, seed: int) -> None:
        torch.set_num_threads(config.threads)
        torch.manual_seed(seed)
        self.config = config
        self.model_path = model_path
        self.device = resolve_device(config.device)
        self.model = self._load()
        if config.lora is not None:
            lora.adapt(self.model, config.lora)
            for parameter in self._beside_adapters():
                parameter.requires_grad_(True)
        self.model.train()
        if config.dtype == "float32":  # under autocast layers run in the precision it chooses
            make_lean(self.model)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self._routers: Routers | None = None  # once there is a choice of experts to replay
        self._writer: threading.Thread | None = None  # of a checkpoint
        self._error: Exception | None = None  # that ended it

    def _load(self) -> PreTrainedModel:
        """The model, at `model_path`."""
        raise NotImplementedError

    def _beside_adapters(self) -> Iterable[torch.nn.Parameter]:
        """What is trained in any case: what the model was not loaded with."""
        return ()

    def _backward(self, pack: Pack) -> dict[str, float]:
        """Add the pack's gradient; returns sums over its loss tokens, `loss` and `tokens` among them."""
        raise NotImplementedError

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the model says at the loss tokens, first what `score` returns, [N] each."""
        raise NotImplementedError

    # --- the phases of a run -------------------------------------------------------------------------------------------

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """Start a phase with a fresh optimiser and schedule; returns the number of parameters."""
        self.algorithm = algorithm
        self.optimizer_config = optimizer
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=optimizer.learning_rate,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,  # one pass over the parameters, no temporaries
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: rate_at(optimizer, n, total_updates)
        )
        return sum(p.numel() for p in parameters)

    def step(self, batch: TrainBatch) -> dict[str, float]:
        """Do every update of the batch; returns metrics, averaged over tokens and updates."""
        began = time.perf_counter()
        updates = [self._update(update) for update in batch.updates]
        found: dict[str, list[float]] = defaultdict(list)
        for update in updates:  # one of which nothing is computed has no metrics of tokens
            for name, value in update.items():
                found[name].append(value)
        metrics = {name: sum(values) / len(values) for name, values in found.items()}
        return metrics | {
            "seconds": time.perf_counter() - began,
            "tokens": float(batch.tokens),
            "lr": self.scheduler.get_last_lr()[0],
        }

    def score(self, packs: list[Pack]) -> list[FloatArray]:
        """What this model says at the loss tokens, 0 elsewhere, [T] a pack."""
        scored = []
        with torch.no_grad():
            for pack in packs:
                result = np.zeros(len(pack.tokens), dtype=np.float32)
                said, *_ = self._forward(pack, self._targets(pack))
                result[pack.loss_mask] = said.float().cpu().numpy()
                scored.append(result)
        return scored

    # --- weights in, weights out ---------------------------------------------------------------------------------------

    def save(self, place: Path) -> None:
        """Begin to write into `place`: Hugging Face weights, loadable as they are, tokenizer, optimiser, random generator.
        Returns once all is copied; training goes on while it is written, and `SAVED` is emitted when it is there."""
        self._finish_writing()
        kept = self.model.state_dict(keep_vars=True)
        trained = {name: tensor for name, tensor in kept.items() if self.config.lora is None or tensor.requires_grad}
        copied = _copy({"model": trained, "training": self._training_state()})

        def write() -> None:
            try:
                with written(place):
                    self._write(place, copied)
                reach("learner.saved")
            except Exception as error:  # noqa: BLE001 - raised again, or told of, in `_finish_writing`
                self._error = error

        self._error = None
        self._writer = threading.Thread(target=write, name="checkpoint")
        self._writer.start()

    def restore(self, directory: Path) -> None:
        """Go on from a checkpoint, after `begin`."""
        weights: dict[str, torch.Tensor] = {}
        for file in directory.glob("*.safetensors"):
            weights |= load_file(file)
        if self.config.lora is not None:
            lora.restore(self.model, directory / ADAPTER)
            trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
            self.model.load_state_dict({name: weights[name] for name in weights.keys() & trained}, strict=False)
        else:
            missing, unexpected = self.model.load_state_dict(weights, strict=False)
            tied = set(self.model.all_tied_weights_keys)
            if unexpected or set(missing) - tied:
                raise DataError(f"{directory} is not a checkpoint of this model: {[*unexpected, *missing][:3]}")
        state = torch.load(directory / TRAINING_STATE, map_location=self.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"].cpu())

    # --- a device that others use too ----------------------------------------------------------------------------------

    def offload(self) -> None:
        """Leave the device: everything is kept in the memory of its machine."""
        self._move(torch.device("cpu"))

    def reload(self) -> None:
        """Come back to the device."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values() if hasattr(self, "optimizer") else ():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():  # a count of steps stays where the optimiser has it
                    state[name] = value.to(device)
        trim_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def advance(self) -> bool:
        """Wait a little for a checkpoint that is being written; see `Worker.advance`."""
        if self._writer is None:
            return False
        self._writer.join(WRITER_PATIENCE)
        if not self._writer.is_alive():
            self._finish_writing()
        return self._writer is not None

    def close(self) -> None:
        """See `Worker.close`: what is being written becomes whole."""
        if self._writer is not None:
            self._writer.join()

    def _finish_writing(self) -> None:
        """Wait for the checkpoint that is being written, and say what became of it."""
        if self._writer is None:
            return
        self._writer.join()
        self._writer = None
        if self._error is not None and not isinstance(self._error, AntiphonError):
            raise self._error
        self.emit(SAVED if self._error is None else str(self._error))

    def _training_state(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }

    def _write(self, place: Path, copied: dict[str, Any]) -> None:
        state = copied["model"]
        if self.config.lora is not None:
            state = {name: tensor.detach() for name, tensor in self.model.state_dict().items()} | state
            lora.save(state, self.model, self.config.lora, place / ADAPTER)
            state = lora.merged(state, self.config.lora.scale)
        self.model.save_pretrained(place, state_dict=state)
        _copy_tokenizer(Path(self.model_path), place)
        torch.save(copied["training"], place / TRAINING_STATE)

    # --- one update ----------------------------------------------------------------------------------------------------

    def _update(self, update: Update) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        (packs,) = update.packs  # one rank
        for pack in packs:
            for name, value in self._backward(pack).items():
                totals[name] += value
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.optimizer_config.max_grad_norm).item()
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {norm}: the update was not made")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        computed = max(totals.pop("tokens", 0.0), 1.0)
        loss = totals.pop("loss", 0.0)
        metrics = {"loss": loss, "grad_norm": norm} | {name: value / computed for name, value in totals.items()}
        if metrics.get("mixed_share"):
            metrics["mixed_mismatch_kl"] /= metrics["mixed_share"]  # over the flagged tokens alone
        return metrics

    def _targets(self, pack: Pack) -> torch.Tensor:
        """The loss tokens of the pack, [N]."""
        return torch.from_numpy(np.flatnonzero(pack.loss_mask)).to(self.device)

    def _hidden(self, pack: Pack, targets: torch.Tensor, reader: Reader | None = None) -> torch.Tensor:
        """The last hidden states from which the loss tokens are predicted, [N, H]."""
        hidden, layout = self._states(pack, reader)
        return hidden.index_select(0, layout.previous[targets])

    def _states(self, pack: Pack, reader: Reader | None = None) -> tuple[torch.Tensor, PackLayout]:
        """The last hidden states of all tokens, [T, H], and where each token stands."""
        layout = PackLayout.of(pack.lengths, pack.parents, self.device)
        self._route(pack, layout)
        hidden = self.model.base_model(
            input_ids=self._tensor(pack.tokens).long()[None],
            position_ids=layout.positions[None],
            use_cache=False,
            layout=layout,
            reader=reader,
        ).last_hidden_state[0]
        return hidden, layout

    def _route(self, pack: Pack, layout: PackLayout) -> None:
        """Have the next forward, and what of it is computed again, take the experts that are known."""
        recorded = next((pack.streams[spec] for spec in pack.streams if spec.name == ROUTED_EXPERTS), None)
        if recorded is not None:
            self._routers = self._routers or Routers(self.model)
            known = torch.from_numpy(np.flatnonzero(recorded.any((1, 2)))).to(self.device)
            self._routers.replayed = torch.full(recorded.shape, -1, device=self.device)
            self._routers.replayed[layout.previous[known]] = self._tensor(recorded).long()[known] - 1
        elif self._routers is not None:
            self._routers.replayed = None

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.config.dtype == "bfloat16")

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


class TorchLearner(PackLearner):
    """Trains a policy."""

    def _load(self) -> PreTrainedModel:
        model = load_model(self.model_path, attention=PACKED_ATTENTION, device=self.device)
        self.head = head_weight(model)
        return model

    def begin(self, algorithm: AlgorithmConfig, optimizer: OptimizerConfig, total_updates: int) -> int:
        """See `PackLearner.begin`."""
        self.loss = LOSSES.resolve(algorithm.loss)
        return super().begin(algorithm, optimizer, total_updates)

    def publish(self, version: int, exchange: Exchange) -> WeightsUpdate:
        """Make the weights of now known as `version`."""
        trim_memory()
        if self.config.lora is None:
            return channel(exchange).send(self.model.named_parameters(), version)
        base = Adapters(self.model_path, self.config.lora.scale)
        return channel(exchange).send(flat(lora.adapters(self.model)), version, base)

    def score_base(self, packs: list[Pack]) -> list[FloatArray]:
        """As `score`, under the model that the adapters were added to."""
        with lora.switched_off(self.model):
            return self.score(packs)

    def attend(self, packs: list[Pack]) -> list[FloatArray]:
        """WAAD and FAI of the loss tokens, 0 elsewhere, [T, 2] a pack; see `learning.rhythm`. They are of this learner's
        own weights: never behind the policy, and no second copy of the model is held. `UnsupportedError` for models whose
        attention is not plain, or cannot be read."""
        layers = middle_layers(self.model.config.get_text_config().num_hidden_layers)
        attended = []
        for pack in packs:
            reader = RhythmReader(pack, layers, self.algorithm.rhythm, self.device)
            with torch.no_grad(), self._autocast(), contextlib.suppress(AllRead):
                self._hidden(pack, self._targets(pack), reader)
            attended.append(reader.values())
        return attended

    def _backward(self, pack: Pack) -> dict[str, float]:
        targets = self._targets(pack)
        logprobs, entropies = self._forward(pack, targets)
        sequence = self._tensor(np.repeat(np.arange(len(pack.lengths)), pack.lengths))[targets]
        inputs = LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            behaviour=self._tensor(pack.logprobs)[targets],
            advantages=self._tensor(pack.advantages)[targets],
            sequence=sequence,
            turn=_turns(targets, sequence),
            streams={spec: self._tensor(pack.streams[spec])[targets] for spec in pack.streams},
        )
        per_token, metrics = total_loss(self.loss, inputs, self.algorithm)
        loss = (self._tensor(pack.coefficients)[targets] * per_token).sum()
        loss.backward()
        with torch.no_grad():
            difference = inputs.behaviour - logprobs
            mismatch = difference.neg().exp() - 1 + difference  # k3 of KL(behaviour ‖ policy)
            sums = metrics | {"entropy": entropies, "mismatch_kl": mismatch}
            if MIXED_CACHE in inputs.streams:
                mixed = inputs.streams[MIXED_CACHE].float()
                sums |= {"mixed_share": mixed, "mixed_mismatch_kl": mismatch * mixed}
            return {name: value.sum().item() for name, value in sums.items()} | {
                "loss": loss.item(),
                "tokens": float(len(logprobs)),
            }

    def _forward(self, pack: Pack, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the loss tokens, [N] each."""
        with self._autocast():
            return token_logprobs(
                self._hidden(pack, targets),
                self.head,
                self._tensor(pack.tokens).long()[targets],
                self._tensor(pack.temperatures)[targets],
                self.config.logits_chunk,
            )


def _turns(targets: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Which turn of the pack each loss token belongs to, [N]: the places of a turn's tokens follow one another."""
    begins = (targets.diff() != 1) | (sequence.diff() != 0)
    return torch.cat([begins.new_zeros(min(len(targets), 1)), begins]).cumsum(0)


def rate_at(config: OptimizerConfig, update: int, total: int) -> float:
    """Learning rate at `update` of `total`, relative to its peak: linear warm-up, then the schedule."""
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    progress = min((update - config.warmup_steps) / max(total - config.warmup_steps, 1), 1.0)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 - (1.0 - config.final_ratio) * progress
        case "cosine":
            return config.final_ratio + (1.0 - config.final_ratio) * (1 + math.cos(math.pi * progress)) / 2


def trim_memory() -> None:
    """Give back to the system what glibc's allocator keeps of freed gradients and activations, over a gibibyte beside a
    model of 135M parameters in float32: the copy of the weights needs the room."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _copy(value: Any) -> Any:
    """A deep copy of tensors on the CPU; tensors that share their memory share it in the copy."""
    copies: dict[int, torch.Tensor] = {}

    def copy(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.data_ptr() not in copies or copies[item.data_ptr()].shape != item.shape:
                copies[item.data_ptr()] = item.detach().to("cpu", copy=True)
            return copies[item.data_ptr()]
        if isinstance(item, dict):
            return {key: copy(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(copy(inner) for inner in item)
        return item

    return copy(value)


def _copy_tokenizer(source: Path, target: Path) -> None:
    for file in _tokenizer_files(source):
        shutil.copy2(file, target / file.name)


def _tokenizer_files(source: Path) -> Iterator[Path]:
    names = ("token", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "generation_config")
    return (file for file in source.glob("*") if file.is_file() and file.name.startswith(names))
