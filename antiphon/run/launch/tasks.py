"""Loading the prompts of a run's tasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from antiphon.core.errors import ConfigError, UnsupportedError
from antiphon.core.rng import derive
from antiphon.core.types import IntArray, PlacedImage, Prompt
from antiphon.engines.base import ENGINES
from antiphon.engines.config import SERVER_KINDS, EngineConfig
from antiphon.run.config import RunConfig
from antiphon.tasks.config import TaskConfig
from antiphon.tasks.mixture import Mixture
from antiphon.tasks.prompts import load_prompts
from antiphon.tasks.rendering import Renderer

SHIPPED = {*ENGINES.shipped, *SERVER_KINDS}  # kinds of engines


@dataclass(slots=True, kw_only=True)
class TaskData:
    """Prompts of a run, by what they are for."""

    mixture: Mixture  # for rollouts
    examples: Mixture | None = None  # for supervised fine-tuning
    response: str = ""  # configured answer of each example, see `SftConfig.response`
    validation: Sequence[Prompt] = ()
    test: Sequence[Prompt] = ()
    renderer: Renderer | None = None  # encodes examples; set once the model's directory is known

    def sample(self, task: str, count: int) -> list[Prompt]:
        """Return some prompts of a task that is trained on, or of its test prompts if it is only evaluated."""
        trained = self.mixture.sample(task, count)
        return trained or [prompt for prompt in self.test if prompt.task == task][:count]

    def use_renderer(self, renderer: Renderer, engines: EngineConfig) -> None:
        """Encode with `renderer` from now on.

        Raises:
            DataError: Prompts have images, and the model cannot read them.
            ConfigError: Prompts have images, and engines of some kind refuse them.
        """
        self.renderer = renderer
        mixtures = (self.mixture, *([self.examples] if self.examples else []))
        prompts = chain(*(mixture.prompts for mixture in mixtures), self.validation, self.test)
        shown = next((prompt for prompt in prompts if any(message.images for message in prompt.messages)), None)
        if shown is not None:
            renderer.encode_images(shown.messages)
            for kind in {each.kind for each in engines.engine_kinds} & SHIPPED - {"native"}:
                message = f"engines of this kind read no images, and prompt {shown.id!r} has some; valid is native"
                raise ConfigError(message, key="engine.kind", value=kind, valid=["native"])

    def next_example(self) -> tuple[IntArray, IntArray, tuple[PlacedImage, ...]]:
        """Return the tokens of the next example for supervised fine-tuning, prompt and answer, and the prompt's images."""
        if self.examples is None or self.renderer is None:
            raise UnsupportedError("this run has no examples for supervised fine-tuning")
        return self.renderer.encode_example(self.examples.next(), self.response)


def load_tasks(config: RunConfig) -> TaskData:
    """Load all prompts of a run."""
    return TaskData(
        mixture=Mixture.load(config.tasks, config.seed),
        examples=Mixture.load(_example_tasks(config), derive(config.seed, "sft")),
        response=config.sft.response if config.sft else "",
        validation=load_held_out(config, "validation", 0),
        test=load_held_out(config, "test", config.evaluation.limit),
    )


def load_held_out(config: RunConfig, split: str, limit: int) -> list[Prompt]:
    """Load the `validation` or `test` prompts of all tasks, the first `limit` of them if that is not 0."""
    prompts = [
        prompt
        for task in config.tasks
        if (source := getattr(task, split)) is not None
        for prompt in load_prompts(task, source, config.seed, config.tasks)
    ]
    return prompts[:limit] if limit else prompts


def _example_tasks(config: RunConfig) -> Sequence[TaskConfig]:
    if config.sft is None or config.sft.prompts is None:
        return [task.model_copy(update={"curriculum": None}) for task in config.tasks]
    return (TaskConfig(name="sft", prompts=config.sft.prompts),)
