"""The native engine: continuous batching, token-exact under weight updates in flight.

One `step`: start queued requests in free slots; plan which tokens to compute (`plan`); run the model once on all of them,
concatenated (`attention`); sample a token for every sequence that is ready (`sampling`); return the deltas. `load` is called
between two steps.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from antiphon.algorithms.routing import Routers, find_routers
from antiphon.core.errors import StateError, WeightsError
from antiphon.core.types import (
    BEAM_SCORES,
    BEAM_TOKENS,
    MIXED_CACHE,
    ROUTED_EXPERTS,
    SAMPLING_SUPPORT,
    GenerateRequest,
    OnUpdate,
    Streams,
    StreamSpec,
    WeightsUpdate,
)
from antiphon.core.user_errors import name_user_errors
from antiphon.core.vision import reads_images
from antiphon.engines.config import EngineKind
from antiphon.engines.deltas import Delta
from antiphon.engines.native.attention import FlatBatch, KVCache, make_flat_batch
from antiphon.engines.native.drafts import Drafter, GuessedStep
from antiphon.engines.native.images import SlotImages
from antiphon.engines.native.models import eos_ids, longest_plain_sequence, prepare_model
from antiphon.engines.native.own_streams import copy_streams
from antiphon.engines.native.penalties import Candidates, adjust_scores, rank_candidates
from antiphon.engines.native.plan import Plan, plan_step
from antiphon.engines.native.sampling import Drawn, SamplingParams, sample, uniform_numbers
from antiphon.engines.native.slots import MIXED, Indices, SlotTable
from antiphon.engines.native.weights import copy_weights
from antiphon.engines.request_checks import validate_request
from antiphon.engines.request_queue import Continuation, RequestQueue
from antiphon.engines.stops import Decoder, StopRule, finish_reasons

ArrayOf = Mapping[StreamSpec, NDArray[Any]]  # stream -> its rows [R, …]

_FLAGS = [Streams({MIXED_CACHE: np.array([mixed])}) for mixed in (False, True)]  # of one token


@dataclass(slots=True)
class EngineCounters:
    """Counters of the engine's work since it was made."""

    steps: int = 0
    read_tokens: int = 0  # computed without being sampled from the token before: prompts, and recomputation
    sampled_tokens: int = 0
    guessed_tokens: int = 0  # of the next tokens of sequences
    confirmed_tokens: int = 0  # of these, sampled as they were guessed
    loads: int = 0
    seconds: float = 0.0  # spent in `step`


class NativeEngine:
    """An `EngineCore` on torch for decoder models of transformers.

    `model` is taken over (see `models.prepare_model`) or loaded from a directory; `tokenizer` is needed for stop strings only;
    `receive` opens an update's tensors by name. `version` is that of the weights in use.
    """

    def __init__(
        self,
        model: PreTrainedModel | Path | str,
        config: EngineKind,
        *,
        receive: Callable[[WeightsUpdate], Iterable[tuple[str, Tensor]]],
        tokenizer: Decoder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.version = 0
        self.counters = EngineCounters()
        self.model: Any = prepare_model(model, config)
        self._routers = Routers(find_routers(self.model)) if config.routed_experts else None
        self.max_length = longest_plain_sequence(self.model, config.max_length)
        self.capacity = config.slots
        self.config = config
        self._receive = receive
        self._tokenizer = tokenizer
        self._clock = clock
        self.vocabulary = int(self.model.config.get_text_config().vocab_size)
        self._images = SlotImages(self.model, self.model.name_or_path) if reads_images(self.model.config) else None
        self._eos_ids = np.array(eos_ids(self.model), np.int64)
        self._like = next(self.model.parameters()).detach()[:0]
        self._device = self._like.device
        self._table = SlotTable(config.slots, self.max_length)
        self._cache: KVCache | None = KVCache(config.slots)
        self._weights_id = 0  # counts loads; a version number may come back after a rollback, an id does not
        self._rules: dict[int, StopRule] = {}
        self._spoiled: set[int] = set()  # slots in which a token had a log-prob that is not finite
        self._outbox: list[Delta] = []  # made between steps, by `abort` and `load`
        self._queue: RequestQueue[int] = RequestQueue(  # of a running request it keeps the slot
            config.slots, start=self._start_request, stop=self._release, emit=lambda delta: self._outbox.append(delta)
        )
        self._drafter = Drafter(config.draft_tokens, config.draft_rows) if config.draft_tokens else None
        self._broken = False
        self._own_specs: frozenset[StreamSpec] | None = None  # of `compute_streams`, after its first call

    # --- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. `RequestError` if it cannot be run here, or if its id is in use."""
        decodes, sees = self._tokenizer is not None, self._images is not None
        validate_request(request, self.max_length, self.vocabulary, decodes=decodes, reads_images=sees)
        if self._images is not None:
            self._images.check(request, self._weights_id)
        self._queue.add(request)

    def abort(self, request: str) -> None:
        """End a request; the next step returns its last delta. Unknown ids are ignored."""
        self._queue.abort(request)

    @property
    def busy(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._outbox) or self._queue.busy

    # --- weights and memory --------------------------------------------------------------------------------------------

    @property
    def loads(self) -> int:
        """Number of weight updates that came into use so far."""
        return self.counters.loads

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load new weights between two steps.

        `DRAIN` waits until running requests have ended and admits none meanwhile; a later update replaces one that still waits.

        Raises:
            WeightsError: The tensors do not match the model. Some may be copied by then; `step` fails until a load succeeds.
        """
        if self._queue.begin_update(update, mode):
            self._apply_update(update, mode)

    def _apply_update(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        self._broken = True
        copy_weights(self.model, self._receive(update))
        self._broken = False
        self.version = update.version
        self._weights_id += 1
        self.counters.loads += 1
        table = self._table
        for slot, continuation in self._queue.continue_running(mode, table.progress):
            if continuation is Continuation.KEEP_CACHE:
                table.weights_id[slot] = MIXED
                continue
            self._wipe_if_spoiled(slot)
            table.invalidate_cache(slot, self._weights_id)
            if continuation is Continuation.RESTART:
                table.length[slot] = table.prompt[slot]

    def sleep(self) -> None:
        """Free the KV cache and the device; weights move to host memory. Queued requests wait until `wake`.

        Raises:
            StateError: Requests are running.
        """
        if running := len(self._queue.running):
            raise StateError(f"the engine cannot sleep: {running} requests are running")
        self._queue.hold("asleep")
        self._cache = None
        self._table.cached[:] = 0
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move the weights back to the device and admit requests again."""
        self._move(self._device)
        self._cache = self._cache or KVCache(self.config.slots)
        self._queue.release("asleep")

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        self._like = next(self.model.parameters()).detach()[:0]

    # --- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Advance all running requests by at most one token; return their deltas."""
        if self._broken:
            raise WeightsError("the last weight update failed half way; load another before the next step")
        began = self._clock()
        deltas, self._outbox = self._outbox, []
        self._finish_draining()
        if self._cache is not None:
            self._queue.admit()
            with torch.inference_mode():
                plan = plan_step(self._table, self._cache, self.config.prefill_tokens, self._weights_id)
                if not plan.empty:
                    deltas += self._run_guesses(plan, self._cache) or self._run_plan(plan, self._cache)
            self._finish_draining()
        self.counters.steps += 1
        self.counters.seconds += self._clock() - began
        return deltas

    def _finish_draining(self) -> None:
        if (update := self._queue.take_drained()) is not None:
            self._apply_update(update, OnUpdate.DRAIN)

    def _start_request(self, request: GenerateRequest) -> int:
        marked = self._images.mark(request) if self._images is not None else None
        slot = self._table.admit(request, self._weights_id, marked)
        if self._images is not None:
            self._images.occupy(slot, request)
        if (rule := StopRule.of(request)) is not None:
            self._rules[slot] = rule
        return slot

    def _run_guesses(self, plan: Plan, cache: KVCache) -> list[Delta]:
        """Run a step in which several tokens of a sequence are guessed; return no delta if none is."""
        if self._drafter is None or plan.chunks or plan.followers or (self._table.beams[plan.decode] > 1).any():
            return []
        table, guesses = self._table, self._drafter.guess(self._table, plan.decode)
        if not guesses:
            return []
        step = GuessedStep.lay_out(table, plan.decode, guesses)
        logits, experts = self._forward(Plan(step.others, step.chunks), cache, every=True)
        logits = adjust_scores(logits, table, step.slots, step.positions)
        computed = {} if experts is None else {ROUTED_EXPERTS: experts}
        computed.update(self._own_streams(logits, step.slots))
        drawn = sample(logits, self._sampling_params(step.slots, step.positions))
        right, deltas = step.count_right(drawn.tokens), []
        for (slot, guess), count in zip(guesses.items(), right, strict=True):
            self._drafter.note(slot, len(guess), count)
            self.counters.guessed_tokens += len(guess)
            self.counters.confirmed_tokens += count
        for slots, rows in step.iterate_rounds(right):
            going = table.active[slots]  # else a token before has ended the request
            if not going.any():
                continue
            slots, rows = slots[going], rows[going]
            table.cached[slots] += 1
            streams = {spec: array[rows] for spec, array in computed.items()}
            deltas += self._append_tokens(slots, drawn.rows(rows), streams)
        return deltas

    def _run_plan(self, plan: Plan, cache: KVCache) -> list[Delta]:
        table = self._table
        logits, experts = self._forward(plan, cache)
        for slot, _, stop in plan.chunks:
            table.cached[slot] = stop
        table.cached[plan.decode] += 1
        for leader, followers in plan.followers.items():
            cache.copy(leader, followers, int(table.length[leader]))
            table.cached[followers] = table.length[leader]
        rows, slots = _sampled_rows(plan)
        if not len(slots):
            return []
        if plan.followers:
            logits = logits[torch.from_numpy(rows).to(logits.device)]
        logits, beams = self._adjust_scores(logits, slots)
        computed = {**self._own_streams(logits, slots), **({} if experts is None else {ROUTED_EXPERTS: experts[rows]})}
        return _add_beams(self._append_tokens(slots, sample(logits, self._sampling_params(slots)), computed), beams)

    def _adjust_scores(self, logits: Tensor, slots: Indices) -> tuple[Tensor, dict[int, Candidates]]:
        """Return the logits with penalties, and the candidates of each row that belongs to a beam search."""
        table, found = self._table, dict[int, Candidates]()
        logits = adjust_scores(logits, table, slots, table.length[slots])
        for row in np.flatnonzero(table.beams[slots] > 1).tolist():
            slot = int(slots[row])
            ends = len(self._eos_ids) + len(table.requests[slot].sampling.stop_tokens)
            count = int(table.beams[slot]) * max(2, 1 + ends)  # so many that enough of them go on
            found[row] = rank_candidates(logits[row], count, partial(self._end_completion, slot))
        return logits, found

    def _end_completion(self, slot: int, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of some tokens [K] end the completion in a slot if they come next."""
        ended, rule = np.isin(tokens, self._eos_ids), self._rules.get(slot)
        if rule is not None:
            completion = self._table.tokens[slot, self._table.prompt[slot] : self._table.length[slot]]
            ended |= [rule.matches(np.append(completion, token), self._tokenizer) for token in tokens]
        return ended

    def compute_streams(self, logits: Tensor, requests: Sequence[GenerateRequest]) -> ArrayOf:
        """Return streams of your own for the tokens that are about to be sampled; a subclass overrides this.

        Args:
            logits: Logits [R, V] of the model, in its dtype; not to be changed. Row i is sampled from softmax(logits[i] /
                temperature), with the temperature of `requests[i].sampling`; 0 is greedy.
            requests: The request [R] of each row.

        Returns:
            One array [R, …] per stream, with the dtype of its spec; the same specs at every call.
        """
        return {}

    def _own_streams(self, logits: Tensor, slots: Indices) -> ArrayOf:
        """Return copies of what `compute_streams` returns, checked."""
        if type(self).compute_streams is NativeEngine.compute_streams:
            return {}
        requests = [self._table.requests[slot] for slot in slots.tolist()]

        @wraps(self.compute_streams)
        def compute() -> ArrayOf:
            return copy_streams(self.compute_streams(logits, requests), len(requests), self._own_specs)

        found = name_user_errors(compute, "engine.kind", type(self).__name__)()
        self._own_specs = frozenset(found)
        return found

    def _forward(self, plan: Plan, cache: KVCache, every: bool = False) -> tuple[Tensor, NDArray[np.int16] | None]:
        """Run the model on the plan's tokens.

        Returns:
            Logits [R, V] of the rows that are sampled from, or of `every` token; and their experts [R, layers, k] counted from
            1, None if the engine does not record experts.
        """
        table = self._table
        lengths = table.length[plan.decode]
        cache.reserve(int(max(lengths.max(initial=0), *(stop for _, _, stop in plan.chunks), 1)), self.max_length)
        batch, slots, positions = make_flat_batch(cache, (plan.decode, lengths), plan.chunks, self._like)
        tokens = torch.from_numpy(table.tokens[slots, positions].astype(np.int64)).to(
            self._like.device, non_blocking=True
        )
        keep: Tensor | int = 0
        if plan.chunks and not every:
            ends = np.cumsum([stop - start for _, start, stop in plan.chunks]) + len(plan.decode) - 1
            rows = np.concatenate([np.arange(len(plan.decode)), ends[plan.finishing].astype(np.int64)])
            keep = torch.from_numpy(rows).to(self._like.device, non_blocking=True)
        self.counters.read_tokens += 0 if every else len(positions) - len(plan.decode)
        logits = self._run_model(tokens, slots, keep, batch)
        if self._routers is None:
            return logits, None
        experts = self._routers.chosen()[keep] if plan.chunks and not every else self._routers.chosen()
        return logits, (experts + 1).to(torch.int16).cpu().numpy()

    def _run_model(self, tokens: Tensor, slots: Indices, keep: Tensor | int, batch: FlatBatch) -> Tensor:
        """Run the model on tokens [T]; return the logits of the rows `keep`, or with 0 of all."""
        if self._images is not None:
            return self._images.run(tokens, slots, keep, batch, self._weights_id)
        output = self.model(
            input_ids=tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            slot_batch=batch,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _sampling_params(self, slots: Indices, positions: Indices | None = None) -> SamplingParams:
        table = self._table
        return SamplingParams(
            temperature=table.temperature[slots],
            top_p=table.top_p[slots],
            top_k=table.top_k[slots],
            min_p=table.min_p[slots],
            uniform=uniform_numbers(table.seed[slots], table.length[slots] if positions is None else positions),
            support=table.support[slots],
        )

    def _append_tokens(self, slots: Indices, drawn: Drawn, computed: ArrayOf) -> list[Delta]:
        """Append one token to each of `slots` [R]; free the slots whose sequence has ended. Return the deltas."""
        table, tokens, logprobs = self._table, drawn.tokens, drawn.logprobs
        table.tokens[slots, table.length[slots]] = tokens
        table.length[slots] += 1
        ended = np.isin(tokens, self._eos_ids)
        if self._rules:
            ended |= np.array([self._matches_stop_rule(slot) for slot in slots.tolist()], bool)
        reasons = finish_reasons(ended, table.length[slots], table.limit[slots])
        new, versions = tokens.astype(np.int32), np.full(len(slots), self.version, np.int32)
        streams = self._streams(slots, drawn.support, computed)
        deltas = [
            Delta(
                request=table.requests[slot].id,
                tokens=new[i : i + 1],
                logprobs=logprobs[i : i + 1],
                versions=versions[i : i + 1],
                streams=streams[i],
                finish=reasons[i],
            )
            for i, slot in enumerate(slots.tolist())
        ]
        self._spoiled.update(slots[~np.isfinite(logprobs)].tolist())
        self._finish([slot for slot, reason in zip(slots.tolist(), reasons, strict=True) if reason is not None])
        self.counters.sampled_tokens += len(slots)
        return deltas

    def _streams(self, slots: Indices, support: NDArray[np.int32] | None, computed: ArrayOf) -> list[Streams]:
        """Return the streams of the token of each of `slots` [R]."""
        table = self._table
        streams = [_FLAGS[mixed] for mixed in (table.weights_id[slots] == MIXED).tolist()]
        for spec, rows in computed.items():
            streams = [others.with_stream(spec, rows[i : i + 1]) for i, others in enumerate(streams)]
        if support is not None:
            for i in np.flatnonzero(table.support[slots]):
                own = support[i : i + 1, : table.support[slots[i]]]
                streams[i] = streams[i].with_stream(SAMPLING_SUPPORT, own)
        return streams

    def _finish(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._queue.finish(self._table.requests[slot].id)
            self._release(slot)

    def _matches_stop_rule(self, slot: int) -> bool:
        rule = self._rules.get(slot)
        completion = self._table.tokens[slot, self._table.prompt[slot] : self._table.length[slot]]
        return rule is not None and rule.matches(completion, self._tokenizer)

    def _release(self, slot: int) -> None:
        self._table.release(slot)
        if self._images is not None:
            self._images.release(slot)
        self._rules.pop(slot, None)
        self._wipe_if_spoiled(slot)

    def _wipe_if_spoiled(self, slot: int) -> None:
        """Forget the keys and values of a slot that may hold a NaN: no mask hides it from what comes into the slot later."""
        if slot in self._spoiled and self._cache is not None:
            self._cache.clear(slot)
            self._table.cached[slot] = 0
            self._spoiled.discard(slot)


def _add_beams(deltas: list[Delta], candidates: Mapping[int, Candidates]) -> list[Delta]:
    """Add the candidates of beam search, by row, to the deltas of one token."""
    for row, (tokens, scores) in candidates.items():
        streams = deltas[row].streams.with_stream(BEAM_TOKENS, tokens).with_stream(BEAM_SCORES, scores)
        deltas[row] = replace(deltas[row], streams=streams)
    return deltas


def _sampled_rows(plan: Plan) -> tuple[Indices, Indices]:
    """Return the row of the logits and the slot of each sequence that gets a token."""
    slots = [*plan.decode.tolist(), *(plan.chunks[i][0] for i in plan.finishing)]
    rows = list(range(len(slots)))
    if plan.followers:
        row_of = {slot: row for row, slot in enumerate(slots)}
        for leader, followers in plan.followers.items():
            slots += followers
            rows += [row_of[leader]] * len(followers)
    return np.array(rows, np.int64), np.array(slots, np.int64)
