"""Checks that a loss has the properties that the learner relies on: `check_loss(my_loss)`, in the test of the loss."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.declarations import declaration_of
from antiphon.algorithms.losses import Loss, LossInputs
from antiphon.algorithms.testing_packs import (
    DIFFERENTIABLE,
    LENGTHS,
    differentiable_copies,
    draw_sequences,
    extreme_packs,
    join_sequences,
    map_tensors,
    named_tensors,
)
from antiphon.core.types import StreamSpec

STEP = 1e-5  # of finite differences, in double precision

Found = dict[str, torch.Tensor]  # values, gradients and metrics of one call, [N] each


def check_loss(
    loss: Loss,
    config: AlgorithmConfig = AlgorithmConfig(),
    *,
    streams: Sequence[StreamSpec] = (),
    seeds: Sequence[int] = (0, 1, 2, 3),
) -> None:
    """Check the properties that the learner relies on.

    - `shape`: the loss returns values and metrics; values are [N], of the dtype of the log-probs, and differentiable.
    - `inputs`: it does not change its inputs.
    - `metrics`: names are strings, the same at every call, with a finite number for each token, [N].
    - `finite`: values and gradients are finite in single precision, also for one token alone, without advantage, and where a
      ratio overflows a float.
    - `repeatable`: a second call returns the same.
    - `order`: each token keeps its value, gradient and metrics in another order of the sequences.
    - `micro-batches`: and where its sequence is alone in the pack: the loss divides by no count of the pack, and no sequence
      depends on another.
    - `gradient`: it agrees with finite differences. What the loss takes out of the graph (`detach`, `no_grad`, `item`,
      comparisons) is held constant in these, so stopped gradients pass and mistakes of a backward pass do not.
    - `declared`: with `zero_at_zero_advantage` the gradient is 0 for tokens without advantage.

    Args:
        loss: The loss function.
        config: Settings that it is called with.
        streams: Streams that it reads, if it does not declare them. Float streams of Antiphon are drawn as log-probs, your own
            from -3 to 3, all others as 0 and 1.
        seeds: Each draws a pack of five sequences of several turns. A rare draw lies on a kink of a loss, where finite
            differences mean nothing; give other seeds then.

    Raises:
        AssertionError: The loss lacks a property; the message begins with its name.
    """
    declared = declaration_of(loss)
    streams = streams or declared.needs
    for inputs in extreme_packs(streams):
        _run(loss, config, inputs)
    for seed in seeds:
        parts = draw_sequences(seed, streams)
        found = _run(loss, config, join_sequences(parts))
        _check_packing(loss, config, parts, found, f"seed {seed}")
        _check_gradient(loss, config, join_sequences(parts), found, f"seed {seed}")
        if declared.zero_at_zero_advantage:
            _check_declared(loss, config, join_sequences(parts), f"seed {seed}")


def _check_packing(loss: Loss, config: AlgorithmConfig, parts: list[LossInputs], found: Found, where: str) -> None:
    ends = list(itertools.accumulate(LENGTHS, initial=0))
    spans = [torch.arange(*span) for span in itertools.pairwise(ends)]
    packings: list[tuple[str, Sequence[int]]] = [
        ("repeatable: a second call", range(len(parts))),
        ("order: another order of the sequences", (3, 0, 4, 2, 1)),
    ]
    packings += [("micro-batches: a sequence alone in its pack", (part,)) for part in range(len(parts))]
    for what, order in packings:
        again = _run(loss, config, join_sequences([parts[part] for part in order]))
        _require(again.keys() == found.keys(), f"metrics: other names: {sorted(again)}, {sorted(found)}")
        for name in found:
            wanted = found[name][torch.cat([spans[part] for part in order])]
            _require_close(f"{what} has other {name} ({where})", again[name], wanted, 1e-9)


def _check_gradient(loss: Loss, config: AlgorithmConfig, pack: LossInputs, found: Found, where: str) -> None:
    held, weights = _Held(), _weights(pack)

    def total(name: str, step: torch.Tensor) -> torch.Tensor:
        moved = replace(pack, **{name: getattr(pack, name) + step})
        with held:
            values, _ = loss(replace(moved, **differentiable_copies(moved)), config)
        return (weights * values.detach()).sum()

    steps = STEP * torch.eye(sum(LENGTHS), dtype=torch.float64)
    total(DIFFERENTIABLE[0], 0 * steps[0])  # whose call it is that the others are held to
    for name in DIFFERENTIABLE:
        slopes = torch.stack([(total(name, step) - total(name, -step)) / (2 * STEP) for step in steps]) / weights
        gradients = found[f"gradients of {name}"]
        _require_close(f"gradient: not that of small steps in {name} ({where})", gradients, slopes, 1e-5)


def _check_declared(loss: Loss, config: AlgorithmConfig, pack: LossInputs, where: str) -> None:
    found = _run(loss, config, replace(pack, advantages=torch.zeros_like(pack.advantages)))
    for name in DIFFERENTIABLE:
        gradient = found[f"gradients of {name}"]
        _require_close(f"declared: zero_at_zero_advantage, but not in {name} ({where})", gradient, 0 * gradient, 0.0)


class _Held(TorchFunctionMode):
    """Records what is taken out of the graph in its first use, and returns the same values, call for call, in later uses.

    Numbers and comparisons are recorded too, so every call takes the same path.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Any] = []
        self._place = 0
        self._off = False  # by `no_grad`; inside of a custom function torch itself takes no notes

    def __enter__(self) -> "_Held":
        self._place = 0
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            self._off = not args[0]
        elif _tracked((args, kwargs)) and not _tracked(found) and (torch.is_grad_enabled() or self._off):
            if self._place == len(self._kept):
                self._kept.append(copy.deepcopy(found))
            found = copy.deepcopy(self._kept[self._place])
            self._place += 1
        return found


def _tracked(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value.requires_grad)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(_tracked, inner))


def _run(loss: Loss, config: AlgorithmConfig, inputs: LossInputs) -> Found:
    """Call the loss and check what one call shows."""
    leaves = differentiable_copies(inputs)
    given = replace(map_tensors(torch.clone, inputs), **{name: leaf.clone() for name, leaf in leaves.items()})
    returned = loss(given, config)
    _require(
        isinstance(returned, tuple) and len(returned) == 2, f"shape: returned {returned}, expected values and metrics"
    )
    values, metrics = returned
    _require_shape(values, inputs)
    _require_unchanged(given, inputs)
    weights = _weights(inputs)
    gradients = torch.autograd.grad(values, list(leaves.values()), weights, allow_unused=True, materialize_grads=True)
    found = {"values": values.detach()}
    found |= {f"gradients of {name}": slope / weights for name, slope in zip(leaves, gradients, strict=True)}
    for name, finite in found.items():
        _require_finite(f"finite: {name}", finite, inputs)
    return found | {f"metric {name!r}": _metric(name, metric, inputs) for name, metric in metrics.items()}


def _weights(inputs: LossInputs) -> torch.Tensor:
    """Return unequal weights of the tokens in the sum that is differentiated, so that gradients across tokens do not cancel."""
    return 1 + inputs.entropies


def _metric(name: Any, metric: Any, inputs: LossInputs) -> torch.Tensor:
    _require(isinstance(name, str), f"metrics: {name!r} is no string")
    shape = tuple(metric.shape) if isinstance(metric, torch.Tensor) else repr(metric)
    _require(
        shape == tuple(inputs.logprobs.shape), f"metrics: {name!r} is {shape}, expected {tuple(inputs.logprobs.shape)}"
    )
    _require_finite(f"metrics: {name!r}", metric.detach(), inputs)
    found: torch.Tensor = metric.detach().double()
    return found


def _require(kept: bool, message: str) -> None:
    if not kept:
        raise AssertionError(message)


def _require_shape(values: Any, inputs: LossInputs) -> None:
    expected = inputs.logprobs
    found = f"{values.dtype} {tuple(values.shape)}" if isinstance(values, torch.Tensor) else repr(values)
    _require(
        found == f"{expected.dtype} {tuple(expected.shape)}",
        f"shape: values are {found}, expected {expected.dtype} {tuple(expected.shape)}",
    )
    _require(values.requires_grad, "shape: values are not differentiable in log-probs or entropies")


def _require_unchanged(given: LossInputs, before: LossInputs) -> None:
    now = named_tensors(given)
    for name, then in named_tensors(before).items():
        _require(torch.equal(now[name], then), f"inputs: {name} were {then.tolist()}, are {now[name].tolist()}")


def _require_finite(what: str, values: torch.Tensor, inputs: LossInputs) -> None:
    for token in (~values.isfinite()).nonzero()[:1, 0].tolist():
        columns = (inputs.logprobs, inputs.old_logprobs, inputs.advantages)
        new, old, advantage = (float(column[token]) for column in columns)
        raise AssertionError(
            f"{what}: {float(values[token])} where the log-prob is {new:g}, sampled with {old:g}, the advantage {advantage:g}"
        )


def _require_close(what: str, found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    excess = (found - wanted).abs() - tolerance * (1 + wanted.abs())
    worst = int(excess.argmax())
    _require(float(excess[worst]) <= 0, f"{what}: token {worst}: {found[worst]:.9g}, expected {wanted[worst]:.9g}")


# --- packs -----------------------------------------------------------------------------------------------------------
