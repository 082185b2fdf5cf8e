"""What a user says of the data."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Data(BaseModel):
    """Where the conversations come from and what to do with lines that are wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(
        description='JSONL file (.jsonl, .jsonl.gz, .jsonl.zst) of {"id", "messages", "tools"?}, {"id", "text"} or '
        '{"id", "input_ids", "loss_mask"?}.'
    )
    on_error: Literal["skip", "fail"] = Field(
        default="skip", description="`skip`: report a bad line, count it and go on. `fail`: stop at the first."
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Read no more than this many lines; all when absent."
    )
