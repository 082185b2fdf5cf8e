"""What a checkpoint's own files say of the model, read without loading a weight."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Model(BaseModel):
    """Which checkpoint to run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Annotated[str, Field(min_length=1, description="Local directory, or repository id on the Hugging Face hub.")]
    revision: str | None = Field(default=None, description="Branch, tag or commit on the hub; not for a directory.")
    trust_remote_code: bool = Field(
        default=False, description="Run Python code that the checkpoint ships (a tokenizer, say). Off unless asked for."
    )


@dataclass(frozen=True)
class Checkpoint:
    """A resolved checkpoint: a directory on this machine and the facts read from its files."""

    path: Path
    fingerprint: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    config: dict[str, Any]
    """config.json as it stands."""
    trust_remote_code: bool = False


def resolve(model: Model) -> Checkpoint:
    """Find (or fetch) the checkpoint and read its facts."""
    raise NotImplementedError
