"""Configuration of what to solve. Importing it imports no torch."""

from typing import Any

from pydantic import Field

from antiphon.config import Config


class PromptsConfig(Config):
    """Where prompts come from."""

    source: str
    """`jsonl`, `parquet`, `huggingface`, `reasoning_gym`, `mini_swe`, or package.module:function that yields prompts."""
    path: str = ""
    """File, Hugging Face id, or reasoning-gym dataset name."""
    split: str = "train"
    prompt_column: str = "prompt"
    """Column with the question: a string, or a list of chat messages."""
    limit: int = Field(0, ge=0)
    """Use only the first so many prompts; 0 uses all."""
    shuffle: bool = True
    """Reshuffle each epoch with the run's seed."""
    options: dict[str, Any] = {}
    """Passed to the source."""


class PairsConfig(PromptsConfig):
    """Prompts, each with two responses."""

    chosen_column: str = "chosen"
    """Column with the better one: a string, or a list of chat messages that ends with it."""
    rejected_column: str = "rejected"

    @property
    def responses(self) -> dict[str, str]:
        """Each key that names a column with a response, and the name."""
        return {"chosen_column": self.chosen_column, "rejected_column": self.rejected_column}


class ResponsesConfig(PromptsConfig):
    """Prompts, each with a response."""

    response_column: str = "response"
    """A string, or a list of chat messages that ends with it."""

    @property
    def responses(self) -> dict[str, str]:
        """Each key that names a column with a response, and the name."""
        return {"response_column": self.response_column}


class TaskConfig(Config):
    """One task of the mixture."""

    name: str
    prompts: PromptsConfig
    validation: PromptsConfig | None = None
    """Prompts that may stop or tune something; never trained on."""
    test: PromptsConfig | None = None
    """Prompts for the reported accuracy only."""
    weight: float = Field(1.0, gt=0.0)
    """Share of the mixture, relative to the other tasks."""
    system: str | None = None
    """System message put before each prompt."""
    environment: str | None = None
    """`guess_number`, `mini_swe`, or package.module:attribute; none means one turn without an environment."""
    environment_options: dict[str, Any] = {}
    reward: str = "math"
    """`math`, `exact_match`, `reasoning_gym`, `environment_return`, `reward_model`, or package.module:attribute."""
    reward_options: dict[str, Any] = {}


class GradingConfig(Config):
    """Worker processes that run rewards."""

    workers: int = Field(1, gt=0)
    deadline: float = Field(10.0, gt=0.0)
    """Seconds after which one grading is killed and the trajectory is left ungraded."""
