"""TRL's own trainers, given the same weights, tokens, log-probs and advantages, come to the same loss and the same gradient:
theirs padded in one batch, ours packed, with prompts read once, and cut into micro-batches.

`CASES` is the dictionary of their settings and ours. Left out is where they differ in substance: TRL divides by completions
without a token to train on, too, and, but for `dapo` and `cispo`, by the counts of a micro-batch. It has no loss with our
`label_smoothing`: its `robust` takes away what ours adds.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from antiphon.algorithms.config import AlgorithmConfig
from antiphon.algorithms.offline_config import PreferenceConfig
from antiphon.core.types import (
    REFERENCE_LOGPROBS,
    AttemptId,
    AttemptStatus,
    PolicyVersion,
    Sample,
    Sampling,
    Score,
    Segment,
    Streams,
    TrainBatch,
    TrajectoryMeta,
    Turn,
)
from antiphon.learning.batch import BatchOptions, build_batch
from antiphon.learning.config import LearnerConfig, OptimizerConfig
from antiphon.learning.data_samples import make_pair, make_scored_pair, pair_mean_batch, supervised_batch
from antiphon.learning.host_device_copy import to_floats
from antiphon.learning.objectives.pairs import PreferenceLearner, RewardLearner
from antiphon.learning.pack_learner import PackLearner
from antiphon.learning.torch_learner import TorchLearner

trl = pytest.importorskip("trl", reason="trl is not installed; it is in the extra `dev`")

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("default"),  # what TRL and accelerate warn of is theirs
]

VOCABULARY = 31
COMPLETION = 24  # most tokens of one
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=128, **shape)).save_pretrained(
        directory
    )
    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, "0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0", pad_token="0").save_pretrained(directory)
    return directory


def samples(temperature: float = 1.0) -> list[Sample]:
    """Four groups of three: ragged, each of one prompt; some completions have a stretch that the policy did not sample."""
    rng = np.random.default_rng(5)
    found = []
    for number in range(12):
        prompt = np.random.default_rng(number // 3).integers(1, VOCABULARY, 2 + 3 * (number // 3))
        tokens = np.concatenate([prompt, rng.integers(1, VOCABULARY, rng.integers(1, COMPLETION + 1))])
        length, start = len(tokens), len(prompt)
        mask = np.arange(length) >= start
        if number % 2 and length > start + 4:
            mask[start + 2 : start + 4] = False

        def near(spread, mask=mask):
            """Log-probs about those of the untrained model, whose tokens are all about as likely."""
            drawn = -np.log(VOCABULARY) + rng.normal(0, spread, len(mask))
            return np.where(mask, drawn, 0).astype(np.float32)

        version = PolicyVersion(0, 0)
        segment = Segment(
            tokens=tokens.astype(np.int32),
            loss_mask=mask,
            logprobs=near(0.3),
            versions=np.zeros(length, np.int32),
            turns=(Turn(start=start, stop=length, sampling=Sampling(max_tokens=length, temperature=temperature)),),
        )
        meta = TrajectoryMeta(
            id=AttemptId(number // 3, number % 3, 0),
            prompt_id=str(number // 3),
            task="test",
            started=version,
            newest=version,
            status=AttemptStatus.FINISHED,
            score=Score.of(1.0),
        )
        found.append(
            Sample(
                meta=meta,
                segment=segment,
                streams=Streams({REFERENCE_LOGPROBS: near(0.5)}),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                weights=np.ones(length, np.float32),
            )
        )
    return found


def padded(arrays, *, left=False):
    """Rows of one width, 0 where they end (or begin)."""
    width = max(map(len, arrays))
    rows = [np.pad(array, (width - len(array), 0) if left else (0, width - len(array))) for array in arrays]
    return torch.from_numpy(np.stack(rows))


def inputs_of(given: list[Sample]) -> dict[str, torch.Tensor]:
    """What TRL's GRPO trainer computes its loss from."""
    starts = [sample.segment.turns[0].start for sample in given]

    def completions(array_of):
        return padded([array_of(sample)[start:] for sample, start in zip(given, starts, strict=True)])

    prompts = [sample.segment.tokens[:start] for sample, start in zip(given, starts, strict=True)]
    tool_mask = completions(lambda sample: sample.segment.loss_mask.astype(np.int64))
    return {
        "prompt_ids": padded(prompts, left=True).long(),
        "prompt_mask": padded([np.ones_like(prompt) for prompt in prompts], left=True).long(),
        "completion_ids": completions(lambda sample: sample.segment.tokens).long(),
        "completion_mask": completions(lambda sample: np.ones(len(sample.segment.tokens), np.int64)),
        "tool_mask": tool_mask,
        "advantages": torch.tensor([float(sample.advantages[-1]) for sample in given]),
        "old_per_token_logps": completions(lambda sample: sample.segment.logprobs),
        "ref_per_token_logps": completions(lambda sample: sample.streams[REFERENCE_LOGPROBS]),
        "num_items_in_batch": tool_mask.sum(),
    }


def arguments(directory, **settings):
    return {
        "output_dir": str(directory / "trl"),
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "report_to": [],
        **settings,
    }


def theirs(trainer, inputs) -> tuple[float, torch.Tensor]:
    """The loss and the flat gradient of one call of the trainer's own `compute_loss`."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def ours(
    learner: PackLearner, batch: TrainBatch, algorithm: AlgorithmConfig = AlgorithmConfig()
) -> tuple[dict[str, float], torch.Tensor]:
    """The metrics and the flat gradient of an update, before clipping."""
    learner.begin(algorithm, OptimizerConfig(), 1)
    (packs,) = batch.updates[0].packs
    assert len(packs) > 1
    summed = [to_floats(learner._backward(pack)) for pack in packs]
    totals = {name: sum(metrics[name] for metrics in summed) for name in summed[0]}
    means = {name: total / totals["tokens"] for name, total in totals.items()} | {"loss": totals["loss"]}
    return means, torch.cat([p.grad.flatten() for p in learner.model.parameters()])


TOKENS, SEQUENCES = {"aggregation": "token_mean"}, {"aggregation": "sequence_mean_token_mean"}
SUMS, NORMALISED = {"aggregation": "sequence_mean_token_sum"}, {"aggregation": "sequence_mean_token_sum_norm"}
# By default TRL also multiplies the divergence with the ratio, which no setting of ours does.
KL, THEIR_KL = {"kl": {"coefficient": 0.1}}, {"beta": 0.1, "use_bias_correction_kl": False}
BOUNDS, THEIR_BOUNDS = {"clip_low": 0.03, "clip_high": 0.04}, {"epsilon": 0.03, "epsilon_high": 0.04}
LEVEL, THEIR_LEVEL = {"ratio_level": "sequence"}, {"importance_sampling_level": "sequence"}
CASES = {
    "grpo": (SEQUENCES, {"loss_type": "grpo"}),
    "grpo with a divergence": (SEQUENCES | KL, {"loss_type": "grpo"} | THEIR_KL),
    "bnpo": (TOKENS, {"loss_type": "bnpo"}),
    "dapo": (TOKENS | {"clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dapo with a divergence": (TOKENS | KL, {"loss_type": "dapo"} | THEIR_KL),
    "dapo with an entropy bonus": (TOKENS | {"entropy_coefficient": 0.01}, {"loss_type": "dapo", "entropy_coef": 0.01}),
    "dapo at a temperature": (TOKENS, {"loss_type": "dapo", "temperature": 0.7}),
    "dr_grpo": (NORMALISED, {"loss_type": "dr_grpo"}),
    "dr_grpo with a divergence": (NORMALISED | KL, {"loss_type": "dr_grpo"} | THEIR_KL),
    "gspo": (SEQUENCES | LEVEL | BOUNDS, {"loss_type": "grpo"} | THEIR_LEVEL | THEIR_BOUNDS),
    "gspo of tokens": (TOKENS | LEVEL | BOUNDS | KL, {"loss_type": "bnpo"} | THEIR_LEVEL | THEIR_BOUNDS | THEIR_KL),
    "luspo": (SUMS | LEVEL | BOUNDS, {"loss_type": "luspo"} | THEIR_LEVEL | THEIR_BOUNDS),
    "dual clip": (TOKENS | {"dual_clip": 1.3}, {"loss_type": "bnpo", "delta": 1.3}),
    # TRL's bound is on the ratio itself.
    "cispo": (
        TOKENS | {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.2},
        {"loss_type": "cispo", "epsilon_high": 1.2},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_policy_losses(model, tmp_path, name):
    settings, trl_settings = CASES[name]
    from datasets import Dataset

    given = samples(trl_settings.get("temperature", 1.0))
    trainer = trl.GRPOTrainer(
        model=str(model),
        reward_funcs=lambda **columns: [0.0],
        args=trl.GRPOConfig(**arguments(tmp_path, **trl_settings), max_completion_length=COMPLETION),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * 8),
    )
    loss, gradient = theirs(trainer, inputs_of(given))
    algorithm = AlgorithmConfig(**settings)
    batch = build_batch(
        [given[first : first + 3] for first in range(0, 12, 3)],
        BatchOptions(aggregation=algorithm.aggregation, max_tokens=COMPLETION, tokens_per_pack=64),
    )
    metrics, packed = ours(TorchLearner(str(model), LearnerConfig(), 0), batch, algorithm)
    assert metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
    assert float((packed - gradient).norm() / gradient.norm()) < TOLERANCE
    assert 0.02 < metrics["clip_fraction"] < 0.98, "what is clipped and what is not are both in the data"
    told = {name: value for name, (value,) in trainer._metrics["train"].items()}
    assert metrics["entropy"] == pytest.approx(told["entropy"], rel=TOLERANCE)
    if "reference_kl" in metrics:
        assert metrics["reference_kl"] == pytest.approx(told["kl"], rel=TOLERANCE)


def test_supervised_loss(model, tmp_path):
    from datasets import Dataset

    trainer = trl.SFTTrainer(
        model=str(model),
        args=trl.SFTConfig(**arguments(tmp_path)),
        train_dataset=Dataset.from_list([{"input_ids": [1, 2, 3]}] * 8),
    )
    examples = [np.split(sample.segment.tokens, [sample.segment.turns[0].start]) for sample in samples()]
    labels = [np.concatenate([np.full_like(prompt, -100), response]) for prompt, response in examples]
    mask = padded([np.ones_like(label) for label in labels]).long()
    inputs = {
        "input_ids": padded([np.concatenate(example) for example in examples]).long(),
        "attention_mask": mask,
        "labels": padded(labels).long().masked_fill(mask == 0, -100),
    }
    loss, gradient = theirs(trainer, inputs)
    learner = TorchLearner(str(model), LearnerConfig(), 0)
    metrics, packed = ours(learner, supervised_batch(examples, 64), AlgorithmConfig(loss="sft"))
    assert metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
    assert float((packed - gradient).norm() / gradient.norm()) < TOLERANCE


def preferences() -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A prompt, the better response and the other, of eight ragged pairs; two pairs have each prompt."""
    rng = np.random.default_rng(7)
    prompts = [rng.integers(1, VOCABULARY, length) for length in (2, 5, 8, 11)]
    responses = [[rng.integers(1, VOCABULARY, rng.integers(1, COMPLETION + 1)) for _ in range(2)] for _ in range(8)]
    return [(prompts[number // 2], *both) for number, both in enumerate(responses)]


PREFERENCES = {
    "dpo": (PreferenceConfig(beta=0.5), {"loss_type": ["sigmoid"], "beta": 0.5}),
    "ipo": (PreferenceConfig(loss="ipo", beta=0.5), {"loss_type": ["ipo"], "beta": 0.5}),
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preference_losses(model, tmp_path, name):
    preference, trl_settings = PREFERENCES[name]
    from datasets import Dataset

    pairs, rng = [], np.random.default_rng(9)
    for number, row in enumerate(preferences()):
        pairs.append([])
        for sample in make_pair(number, *(tokens.astype(np.int32) for tokens in row)):
            drawn = -np.log(VOCABULARY) + rng.normal(0, 0.5, len(sample.weights))
            said = np.where(sample.segment.loss_mask, drawn, 0).astype(np.float32)
            pairs[-1].append(replace(sample, streams=sample.streams.with_stream(REFERENCE_LOGPROBS, said)))
    trainer = trl.DPOTrainer(
        model=str(model),
        args=trl.DPOConfig(**arguments(tmp_path, **trl_settings), precompute_ref_log_probs=True),
        train_dataset=Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}] * 8),
    )
    keys = "ref_chosen_logps", "ref_rejected_logps"
    rows = [
        dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), map(np.ndarray.tolist, row), strict=True))
        | {key: float(sample.streams[REFERENCE_LOGPROBS].sum()) for key, sample in zip(keys, both, strict=True)}
        for row, both in zip(preferences(), pairs, strict=True)
    ]
    loss, gradient = theirs(trainer, trainer.data_collator(rows))
    metrics, packed = ours(PreferenceLearner(str(model), LearnerConfig(), 0, preference), pair_mean_batch(pairs, 64))
    assert metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
    assert float((packed - gradient).norm() / gradient.norm()) < TOLERANCE
    if name == "dpo":  # the rewards that TRL tells of are not those that its IPO compares: sums, where those are means
        names = {
            "accuracy": "accuracies",
            "margin": "margins",
            "reward_chosen": "chosen",
            "reward_rejected": "rejected",
        }
        for key, their in names.items():
            assert metrics[key] == pytest.approx(trainer._metrics["train"][f"rewards/{their}"][0], rel=TOLERANCE), key
        assert 0 < metrics["accuracy"] < 1


def test_reward_loss(model, tmp_path):
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(11)
    place = tmp_path / "classifier"
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    classifier.score.weight.data *= 50  # scores that are apart
    classifier.save_pretrained(place)
    AutoTokenizer.from_pretrained(model).save_pretrained(place)
    trainer = trl.RewardTrainer(
        model=str(place),
        args=trl.RewardConfig(**arguments(tmp_path)),
        train_dataset=Dataset.from_list([{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}] * 8),
    )
    pairs = preferences()
    rows = [
        {"chosen_ids": [*prompt, *chosen], "rejected_ids": [*prompt, *rejected]} for prompt, chosen, rejected in pairs
    ]
    loss, gradient = theirs(trainer, trainer.data_collator(rows))
    scored = [make_scored_pair(n, *(tokens.astype(np.int32) for tokens in row)) for n, row in enumerate(pairs)]
    metrics, packed = ours(RewardLearner(str(place), LearnerConfig(), 0), pair_mean_batch(scored, 64))
    assert metrics["loss"] == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)
    assert float((packed - gradient).norm() / gradient.norm()) < TOLERANCE
    for name in ("accuracy", "margin"):
        assert metrics[name] == pytest.approx(trainer._metrics["train"][name][0], rel=TOLERANCE, abs=TOLERANCE)
