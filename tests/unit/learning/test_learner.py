"""The learner: schedule, updates, checkpoints."""

from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.core import errors
from antiphon.core.errors import ConfigError, DataError
from antiphon.core.types import OLD_VALUE, RETURNS, Streams, TrainBatch
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import CriticConfig, LearnerConfig, OptimizerConfig
from antiphon.learning.data_samples import supervised_batch
from antiphon.learning.learner import SAVED
from antiphon.learning.objectives.critic import CriticLearner
from antiphon.learning.pack_learner import learning_rate_factor
from antiphon.record.checkpoint import publish_checkpoint, read_state, staging_dir, verify_checkpoint
from antiphon.weights.base import TransferContext
from antiphon.weights.shared_memory import SharedMemory
from tests.raising import raises_with

from .conftest import make_learner, make_sample


def examples(count: int = 8):
    rng = np.random.default_rng(0)
    return [(rng.integers(0, 31, 4).astype(np.int32), rng.integers(0, 31, 5).astype(np.int32)) for _ in range(count)]


def test_it_learns_what_it_is_shown(model_directories):
    learner = make_learner(model_directories["llama"], tokens_per_pack=40)
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2), 60)
    batch = supervised_batch(examples(), 40)
    losses = [learner.step(batch)["loss"] for _ in range(60)]
    assert losses[0] > 3 and losses[-1] < 0.1


def test_empty_update_reports_nothing(model_directories):
    """... and takes nothing from what the others say, wherever it stands."""
    empty = replace(supervised_batch(examples(), 100).updates[0], packs=((),))
    (update,) = supervised_batch(examples(), 100).updates
    said = []
    for updates in ((update,), (update, empty), (empty, update)):
        learner = make_learner(model_directories["llama"])
        learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(), 9)
        said.append(learner.step(TrainBatch(updates=updates)))
    for name in ("entropy", "loss", "grad_norm"):
        assert said[0][name] == said[1][name] == said[2][name] > 0


class NoWaits(TorchDispatchMode):
    """Lets nothing pass that would wait for a GPU: a look at a number, a shape that depends on one."""

    def __torch_dispatch__(self, operation, types, args=(), options=None):
        assert operation not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return operation(*args, **options or {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_no_pack_is_waited_for(model_directories, kind, dtype):
    learner = make_learner(model_directories[kind], dtype=dtype, gradient_checkpointing=True, logits_chunk=7)
    learner.begin(AlgorithmConfig(), OptimizerConfig(), 1)
    ((packs,),) = [update.packs for update in supervised_batch(examples(), 40).updates]
    with NoWaits():
        for pack in packs:
            learner._backward(pack)


def test_its_log_probs_are_those_of_transformers(model_directories):
    for directory in model_directories.values():
        learner = make_learner(directory)
        model = AutoModelForCausalLM.from_pretrained(directory)
        ((packs,),) = [update.packs for update in supervised_batch(examples(5), 22).updates]
        for pack, scored in zip(packs, learner.predict(list(packs)), strict=True):
            pairs = [np.split(array, np.cumsum(pack.lengths)[:-1]) for array in (pack.tokens, scored)]
            for tokens, got in zip(*pairs, strict=True):
                logits = model(torch.from_numpy(tokens)[None].long()).logits[0].log_softmax(-1).detach()
                want = [float(logits[i - 1, tokens[i]]) if i >= 4 else 0.0 for i in range(len(tokens))]
                np.testing.assert_allclose(got, want, atol=1e-5)


def saved(learner, directory, state):
    """Save a checkpoint and wait until it is in place."""
    told, place = [], staging_dir(directory)
    learner.emit = told.append
    learner.save(place)
    while learner.advance():
        pass
    assert told == [SAVED]
    publish_checkpoint(place, directory, state)


def test_a_checkpoint_is_a_model_directory(model_directories, tmp_path):
    learner = make_learner(model_directories["tied llama"])
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2), 3)
    learner.step(supervised_batch(examples(), 100))
    saved(learner, tmp_path / "step_000001", {"step": 1})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000001")
    for (name, ours), (_, theirs) in zip(learner.model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    verify_checkpoint(tmp_path / "step_000001")
    assert read_state(tmp_path / "step_000001") == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("frozen", [["lm_head.*"], ["model.embed_tokens.weight", "*.layers.0.mlp.*"]], ids=str)
def test_frozen_parameters_stay_as_they_are(frozen, model_directories):
    learner = make_learner(model_directories["llama"], freeze=tuple(frozen))
    before = {name: parameter.clone() for name, parameter in learner.model.named_parameters()}
    chosen = {name for name in before if any(fnmatchcase(name, pattern) for pattern in frozen)}
    trained = learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2, weight_decay=0.1), 3)
    learner.step(supervised_batch(examples(), 100))
    assert trained == sum(parameter.numel() for name, parameter in before.items() if name not in chosen)
    after = dict(learner.model.named_parameters())
    assert {name for name in before if torch.equal(before[name], after[name])} == chosen != set()


@pytest.mark.parametrize(
    ("freeze", "key"), [(("lm_head.*", "layers.0.*"), "learner.freeze.1"), (("*",), "learner.freeze")]
)
def test_names_of_frozen_parameters_are_checked(freeze, key, model_directories):
    with raises_with(ConfigError, key=key):
        make_learner(model_directories["llama"], freeze=freeze)


@pytest.mark.parametrize("freeze", [(), ("*.layers.0.*",)], ids=str)
@pytest.mark.parametrize("model", ["tied llama", "llama"])
def test_a_restored_learner_goes_on_to_the_bit(model, freeze, model_directories, tmp_path):
    learner, other = (make_learner(model_directories[model], freeze=freeze) for _ in range(2))
    for each in (learner, other):
        each.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2, schedule="linear"), 4)
    for seed in range(2):
        learner.step(supervised_batch(examples(seed + 3), 100))
    learner.save(tmp_path / "step_000002")
    batches = [supervised_batch(examples(seed), 100) for seed in (7, 8)]
    metrics = [learner.step(batch) for batch in batches]  # while it is written: what is written is of before
    learner.emit = lambda event: None
    while learner.advance():
        pass
    other.restore(tmp_path / "step_000002")
    again = [other.step(batch) for batch in batches]
    for one, two in zip(metrics, again, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in two.items() if k != "seconds"}
    assert [step["lr"] for step in again] == pytest.approx([0.5e-2, 0.25e-2])
    for (name, ours), (_, theirs) in zip(learner.model.named_parameters(), other.model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_that_cannot_be_written_is_told_of(model_directories, tmp_path):
    learner = make_learner(model_directories["tied llama"])
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(), 3)
    (tmp_path / "file").write_text("in the way")
    told = []
    learner.emit = told.append
    learner.save(tmp_path / "file" / "step_000001")
    while learner.advance():
        pass
    assert len(told) == 1 and "file" in told[0]


def test_it_keeps_less_for_the_backward_than_the_model_as_it_is(model_directories):
    def kept(model):
        sizes = []
        model.set_attn_implementation("sdpa")
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.nbytes) or tensor, lambda t: t
        ):
            model(input_ids=torch.arange(12)[None])
        return sum(sizes)

    plain = AutoModelForCausalLM.from_pretrained(model_directories["llama"])
    assert kept(make_learner(model_directories["llama"]).model) < 0.9 * kept(plain.train())


def test_published_weights_are_its_own(model_directories, tmp_path):
    learner = make_learner(model_directories["tied llama"])
    update = learner.publish(3, TransferContext(tmp_path))
    received = {name: tensor.clone() for name, tensor in SharedMemory.receive(update)}
    assert update.version == 3
    assert all(torch.equal(received[name], p) for name, p in learner.model.named_parameters())


@pytest.mark.parametrize("kind", ["llama", "tied llama"])
def test_a_tied_tensor_is_published_once(kind, model_directories, tmp_path):
    """Under its name in the files, and as `tests/system/engine_contract` sends it to engines."""
    update = make_learner(model_directories[kind]).publish(1, TransferContext(tmp_path))
    sent = [name for name, _ in SharedMemory.receive(update)]
    with safe_open(model_directories[kind] / "model.safetensors", "pt") as file:
        assert sorted(sent) == sorted(file.keys())
    assert ("lm_head.weight" in sent) == (kind == "llama")


def updates_of(kinds: str) -> TrainBatch:
    """A batch of updates, one a letter: `g` is as it should be, `n` and `i` have a loss that is not a number, or infinite."""
    spoilt = {"n": np.nan, "i": np.inf}
    made = []
    for number, kind in enumerate(kinds):
        (update,) = supervised_batch(examples()[: 2 + number % 3], 100).updates
        if kind in spoilt:
            value = spoilt[kind]
            packs = [
                [replace(p, coefficients=np.full_like(p.coefficients, value)) for p in own] for own in update.packs
            ]
            update = replace(update, packs=tuple(map(tuple, packs)))
        made.append(update)
    return TrainBatch(updates=tuple(made))


def state_of(learner):
    """Weights, what the optimiser keeps of them, and the learning rate."""
    weights = {name: tensor.detach().clone() for name, tensor in learner.model.named_parameters()}
    moments = [value.clone() for state in learner.optimizer.state.values() for value in state.values()]
    return weights, moments, learner.scheduler.get_last_lr()


@pytest.mark.parametrize(("kinds", "skipped"), [("gng", 1), ("ig", 1), ("ggn", 1), ("nin", 3)])
def test_updates_that_are_not_finite_are_skipped(model_directories, kinds, skipped):
    """As if they had not been there."""
    batch = updates_of(kinds)
    others = TrainBatch(updates=tuple(u for u, kind in zip(batch.updates, kinds, strict=True) if kind == "g"))
    states = []
    for taken in (batch, others):
        learner = make_learner(model_directories["llama"])
        learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(learning_rate=1e-2, schedule="linear"), 10)
        metrics = learner.step(taken)
        assert metrics["skipped_updates"] == (skipped if taken is batch else 0)
        states.append(state_of(learner))
    (weights, moments, rate), (expected, kept, same_rate) = states
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert len(moments) == len(kept) and all(map(torch.equal, moments, kept))
    assert rate == same_rate


@pytest.mark.parametrize(
    ("policy", "kinds", "ends"),
    [("skip", "n" * 9 + "g" + "n" * 9, False), ("skip", "n" * 10, True), ("fail", "gi", True), ("fail", "g", False)],
)
def test_a_learner_that_cannot_go_on_says_so(model_directories, policy, kinds, ends):
    learner = make_learner(model_directories["llama"], on_nonfinite=policy)
    learner.begin(AlgorithmConfig(loss="sft"), OptimizerConfig(), 30)
    if not ends:
        learner.step(updates_of(kinds))
        return
    with pytest.raises(errors.NonFiniteError, match=r"learner\.on_nonfinite"):
        learner.step(updates_of(kinds))


def test_a_learner_has_its_own_number_of_threads(model_directories):
    try:
        make_learner(model_directories["llama"], threads=3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


def test_a_directory_without_a_model_is_one_clear_error(tmp_path):
    with raises_with(DataError, path=tmp_path / "config.json"):
        make_learner(tmp_path)


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 10),
    total=st.integers(11, 100),
    final=st.floats(0, 1),
)
def test_schedule_rises_then_falls_to_its_end(schedule, warmup, total, final):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, final_ratio=final)
    rates = [learning_rate_factor(config, n, total) for n in range(total + 1)]
    assert all(b >= a for a, b in pairwise(rates[:warmup]))
    assert all(b <= a + 1e-12 for a, b in pairwise(rates[warmup:]))
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else final)


def test_a_critic_goes_on_to_the_bit(model_directories, tmp_path):
    """... and its checkpoint is a model directory, too."""
    batch = critic_batch()
    learner, other = (make_critic(model_directories["qwen3"], seed) for seed in (0, 1))
    for _ in range(3):
        learner.step(batch)
    saved(learner, tmp_path / "step_000001", {})
    other.restore(tmp_path / "step_000001")
    scored = [critic.predict(list(batch.updates[0].packs[0])) for critic in (learner, other)]
    for ours, theirs in zip(*scored, strict=True):
        assert np.abs(ours).max() > 0 and (ours == theirs).all()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "step_000001", num_labels=1)
    pack = batch.updates[0].packs[0][0]
    said = loaded.score(loaded.model(torch.from_numpy(pack.tokens)[None].long()).last_hidden_state)[0, :-1, 0]
    mask = pack.loss_mask[1:]
    np.testing.assert_allclose(scored[0][0][1:][mask], said.detach().numpy()[mask], atol=1e-5)


def test_a_critic_that_has_learned_nothing_says_nothing(model_directories):
    """Its head would be random otherwise, and the first advantages would be, too."""
    (pack,) = critic_batch().updates[0].packs[0]
    (values,) = make_critic(model_directories["llama"], 0).predict([pack])
    assert pack.loss_mask.any() and not values.any()


def test_a_dense_critic_has_no_experts_to_balance(model_directories):
    """The policy of its run has: the algorithm is the same."""
    learner = make_critic(model_directories["llama"], 0, expert_balance=0.1)
    assert "expert_balance" not in learner.step(critic_batch())


def make_critic(directory, seed, **algorithm):
    critic = CriticConfig(optimizer={"learning_rate": 1e-2})
    found = CriticLearner(str(directory), LearnerConfig(), seed, critic)
    found.begin(AlgorithmConfig(**algorithm), critic.optimizer, 9)
    return found


def critic_batch():
    rng = np.random.default_rng(2)
    sample = make_sample(rng, 12, 0)
    streams = {RETURNS: rng.normal(size=12), OLD_VALUE: np.zeros(12)}
    streams = Streams({spec: array.astype(np.float32) for spec, array in streams.items()})
    return build_batch(
        [[replace(sample, streams=streams)]], BatchOptions(aggregation="token_mean", max_tokens=9, tokens_per_pack=64)
    )
