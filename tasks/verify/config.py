"""What a user says of the checks."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Audit(BaseModel):
    """How strictly samples are judged, and how much of it is shown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_zero_rows: Annotated[int, Field(ge=0)] = Field(
        default=0, description="All-zero rows that a sample may have at one depth; a trained model has none."
    )
    table_rows: Annotated[int, Field(ge=1, le=500)] = Field(
        default=200, description="Rows of a chunk's audit table in the Prefect UI, worst first."
    )
    max_retries: Annotated[int, Field(ge=0)] = Field(
        default=64,
        description="Samples of a run that failed and are extracted once more, each alone; with more than that, the "
        "fault is not theirs and none is.",
    )
    stop_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.5,
        description="The run stops extracting when more than this share of a chunk's samples, and at least 8, fail. "
        "Until a chunk has passed, 2 suffice, and nothing is extracted beside the chunk that is judged.",
    )
    probe: bool = Field(
        default=True,
        description="The model goes on with a sentence when the engine starts; the text is shown, and the run stops "
        "where it repeats a single token or is no text. Turn it off for a model that is not trained.",
    )
