"""The default sizes of packs and logit chunks: chosen by the memory of the machine and the shape of the model."""

import os
from pathlib import Path

from antiphon.cluster.devices import is_cpu
from antiphon.core.config import load
from antiphon.record.run_dir import RunDirectory
from antiphon.run.config import RunConfig
from antiphon.run.memory import DTYPE_BYTES, LOGIT_BYTES, activations_per_token
from antiphon.run.model_files import model_shape

LARGEST = {"tokens_per_pack": 1024, "logits_chunk": 512}  # of a learner on CPUs; larger ones are no faster there
SMALLEST = 128
ACTIVATIONS_SHARE = 1 / 8  # of the machine's memory, for the activations of all processes that train
LOGITS_SHARE = 1 / 64


def choose_pack_size(config: RunConfig, model: Path) -> RunConfig:
    """Return `config` with the keys of `LARGEST` at sizes that suit a learner on CPUs, where the user named none.

    A size is halved until its estimated memory is within its share. It depends on the machine's memory in all, never on what is
    free, so that it is the same in every run. Learners on GPUs and on clusters of several machines keep the defaults.
    """
    learner = config.learner
    unnamed = [key for key in LARGEST if key not in learner.model_fields_set]
    if not unnamed or not is_cpu(learner.device) or not config.cluster.one_machine:
        return config
    processes = learner.mesh.world + config.counts["critic"] * config.learner_of("critic").mesh.world
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / processes
    shape = model_shape(model)
    activations = DTYPE_BYTES[learner.dtype] * activations_per_token(shape, learner.gradient_checkpointing)
    most = {
        "tokens_per_pack": memory * ACTIVATIONS_SHARE / max(activations, 1),
        "logits_chunk": memory * LOGITS_SHARE / (LOGIT_BYTES * shape.get("vocab_size", 1)),
    }
    return _with_learner(config, {key: _fit(LARGEST[key], most[key]) for key in unnamed})


def keep_pack_size(config: RunConfig) -> RunConfig:
    """Return the `config` of a run to resume, with the sizes that the run began with where the user named none."""
    before = load(RunDirectory.resume(config.record.directory, config.name).config, model=RunConfig).learner
    unnamed = [key for key in LARGEST if key not in config.learner.model_fields_set]
    return _with_learner(config, {key: getattr(before, key) for key in unnamed})


def _fit(size: int, most: float) -> int:
    while size > max(most, SMALLEST):
        size //= 2
    return size


def _with_learner(config: RunConfig, changes: dict[str, int]) -> RunConfig:
    return config.model_copy(update={"learner": config.learner.model_copy(update=changes)})
