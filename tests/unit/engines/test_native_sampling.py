"""Drawing tokens: the right distribution, the right support, the right log-probability."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from antiphon.engines.native.sampling import SamplingParams, sample, sample_inverse_cdf, truncate_mass, uniform_numbers


def make_draw(rows: int, **changes: float) -> SamplingParams:
    """The same draw for every row, at uniform 0.5 unless told."""
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "uniform": 0.5, "support": 0} | changes
    kinds = {"top_k": np.int64, "support": np.int64, "uniform": np.float64}
    return SamplingParams(**{name: np.full(rows, value, kinds.get(name, np.float32)) for name, value in fields.items()})


def reference_support(probabilities: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """What may be drawn, told slowly: k likeliest, then the fewest that hold top_p of those, then min_p of the likeliest."""
    kept = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        whole, held, nucleus = sum(probabilities[i] for i in kept), 0.0, []
        for i in kept:
            if held >= top_p * whole:
                break
            nucleus.append(i)
            held += probabilities[i]
        kept = nucleus or kept[:1]
    return {i for i in kept if probabilities[i] >= min_p * probabilities[kept[0]]}


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 700),
    sharpness=st.floats(0.1, 6),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_support_of_truncated_sampling(
    seed: int, size: int, sharpness: float, top_k: int, top_p: float, min_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.permutation(np.linspace(-sharpness, sharpness, size)) + rng.normal(0, 1e-4, size)
    mass = np.exp(logits - logits.max()).astype(np.float32)
    top_p = float(np.float32(top_p))
    kept = truncate_mass(torch.from_numpy(mass)[None], make_draw(1, top_k=top_k, top_p=top_p, min_p=min_p))[0].numpy()
    support = reference_support(mass.astype(np.float64), top_k, top_p, float(np.float32(min_p)))
    got = set(np.flatnonzero(kept).tolist())
    # A token on the very edge of the nucleus may fall either way by rounding.
    edge = sum(mass[list(support)].astype(np.float64)) / sum(mass.astype(np.float64))
    assert got == support or (len(got ^ support) == 1 and top_p < 1 and edge == pytest.approx(top_p, abs=1e-3))
    assert np.array_equal(kept[kept > 0], mass[kept > 0])


def test_rows_are_truncated_each_by_its_own_limits() -> None:
    logits = torch.linspace(3, -3, 500).repeat(4, 1)
    draw = SamplingParams(
        temperature=np.array([1, 1, 0, 1], np.float32),
        top_p=np.array([1, 0.1, 0.1, 1], np.float32),
        top_k=np.array([0, 0, 0, 3]),
        min_p=np.zeros(4, np.float32),
        uniform=np.full(4, 0.999999),
        support=np.zeros(4, np.int64),
    )
    drawn = sample(logits.clone(), draw)
    tokens, logprobs = drawn.tokens, drawn.logprobs
    assert drawn.support is None
    assert tokens[0] > 490 and tokens[1] < 20 and tokens[2] == 0 and tokens[3] == 2
    expected = torch.log_softmax(logits.double(), -1)[range(4), tokens.tolist()]
    assert np.allclose(logprobs, expected, atol=1e-6)


@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(2, 700),
    temperature=st.floats(0.3, 2),
    top_k=st.integers(1, 60),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0, 0.5),
)
def test_a_recorded_support_is_that_of_transformers(
    seed: int, size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """The support, the log-prob among its tokens, and the token, which is drawn as where nothing is recorded."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (2, size)).astype(np.float32))
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "uniform": rng.random()}
    draw = make_draw(2, **limits, support=top_k)
    draw.top_k[1] = draw.support[1] = 0  # beside one from the other rules alone
    drawn, plain = sample(logits.clone(), draw), sample(logits.clone(), make_draw(2, **limits))
    warped = logits[:1] / np.float32(temperature)
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(float(np.float32(top_p))), MinPLogitsWarper(min_p)):
        warped = warper(None, warped)
    kept = torch.isfinite(warped[0]).nonzero()[:, 0].tolist()
    ours = [token - 1 for token in drawn.support[0].tolist() if token]
    assert len(ours) == len({*ours}) and not drawn.support[1].any()
    if {*ours} == {*kept}:  # else rounding decides about the last of them
        assert drawn.tokens[0] == plain.tokens[0]
        expected = torch.log_softmax(warped.double(), -1)[0, drawn.tokens[0]]
        assert drawn.logprobs[0] == pytest.approx(float(expected), abs=1e-5)
    else:
        assert len({*ours} ^ {*kept}) == 1 and (top_p < 1 or min_p > 0)


@pytest.mark.parametrize("size", [7, 256, 1000])
def test_inversion_follows_the_distribution(size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(size) * 2
    uniform = (np.arange(40_000) + 0.5) / 40_000  # every quantile once: counts are exact up to rounding at the edges
    mass = torch.exp(logits - logits.max())[None]
    blocks = torch.stack([part.sum() for part in mass[0].split(256)])[None]
    draws = [
        sample_inverse_cdf(mass.expand(2000, -1), blocks.expand(2000, -1), torch.from_numpy(u))
        for u in uniform.reshape(20, 2000)
    ]
    tokens = torch.cat(draws)
    counts = torch.bincount(tokens, minlength=size).numpy()
    assert np.abs(counts - 40_000 * torch.softmax(logits.double(), -1).numpy()).max() <= 1.01


@given(
    seed=st.integers(0, 2**32 - 1),
    uniform=st.sampled_from([0.0, 1e-12, 0.5, 1 - 2**-24, 1 - 2**-53]),
    size=st.integers(1, 600),
)
def test_a_token_without_mass_is_never_drawn(seed: int, uniform: float, size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (3, size)).astype(np.float32))
    logits[torch.from_numpy(rng.random((3, size)) < 0.8)] = float("-inf")
    logits[:, int(rng.integers(size))] = 0.0
    drawn = sample(logits.clone(), make_draw(3, uniform=uniform))
    tokens, logprobs = drawn.tokens, drawn.logprobs
    expected = torch.log_softmax(logits.double(), -1)[range(3), tokens.tolist()].numpy()
    assert np.isfinite(logprobs).all() and np.allclose(logprobs, expected, atol=1e-5)


def test_temperature_and_greedy_logprobs() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 3000) * 4
    draw = make_draw(64, temperature=0.7)
    draw.temperature[::2] = 0
    draw.uniform[:] = np.random.default_rng(0).random(64)
    drawn = sample(logits.clone(), draw)
    tokens, logprobs = drawn.tokens, drawn.logprobs
    assert np.array_equal(tokens[::2], logits.argmax(-1).numpy()[::2])
    scale = torch.where(torch.arange(64) % 2 == 0, 1.0, 0.7)[:, None]
    expected = torch.log_softmax(logits.double() / scale, -1)[range(64), tokens.tolist()]
    assert np.allclose(logprobs, expected, atol=1e-5) and logprobs.dtype == np.float32


def test_uniforms_are_uniform_and_independent() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200), indexing="ij")
    drawn = uniform_numbers(seeds.ravel(), positions.ravel()).reshape(200, 200)
    counts = np.histogram(drawn, bins=50, range=(0, 1))[0]
    assert ((counts - 800) ** 2 / 800).sum() < 90  # chi-square with 49 degrees of freedom: 1 in 3000
    for shifted in (drawn[1:] * drawn[:-1], drawn[:, 1:] * drawn[:, :-1], drawn[1:, :-1] * drawn[:-1, 1:]):
        assert abs(shifted.mean() - 0.25) < 0.006
    assert len(np.unique(drawn)) == drawn.size
    assert uniform_numbers(np.array([2**64 - 1], np.uint64), np.array([10**6]))[0] < 1
