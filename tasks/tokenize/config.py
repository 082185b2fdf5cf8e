"""What a user says of the data."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(min_length=1)]

# What the validators below say, for those who check values against the JSON schema before they arrive here.
_HAS_PATH: dict[str, Any] = {"properties": {"path": {"type": "string"}}, "required": ["path"]}
ONE_PLACE: dict[str, Any] = {
    "if": _HAS_PATH,
    "then": {"properties": {"dataset": {"type": "null"}}},
    "else": {"properties": {"dataset": {"type": "string"}}, "required": ["dataset"]},
}
PATH_OR_SOURCES: dict[str, Any] = {
    "if": _HAS_PATH,
    "then": {"properties": {"sources": {"maxItems": 0}}},
    "else": {"properties": {"sources": {"minItems": 1}}, "required": ["sources"]},
}


class Columns(BaseModel):
    """Names of a row's fields, for data that uses other names than ``messages``/``role``/``content`` or ShareGPT's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Name = Field(default="id", description="Field that identifies the conversation; made up where it is missing.")
    messages: Name | None = Field(default=None, description="Field that holds the list of turns.")
    role: Name | None = Field(default=None, description="Field of a turn that names its speaker.")
    content: Name | None = Field(default=None, description="Field of a turn that holds what was said.")
    tools: Name = Field(default="tools", description="Field that holds the tool schemas.")
    text: Name = Field(default="text", description="Field that holds plain text.")
    roles: dict[Name, Literal["system", "developer", "user", "assistant", "tool"]] = Field(
        default_factory=dict, description="Speaker in the data -> role in the chat template, besides the usual ones."
    )


class Source(BaseModel):
    """One file, or one Hugging Face data set."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=ONE_PLACE)

    path: Path | None = Field(
        default=None,
        description="JSONL (.jsonl, .json, .jsonl.gz, .jsonl.zst) or Parquet file; `*` and `?` in its name match "
        "several, read in the order of their names.",
    )
    dataset: Name | None = Field(
        default=None, description="Directory written by `save_to_disk`, or repository id on the Hugging Face hub."
    )
    config: Name | None = Field(default=None, description="Configuration (subset) of the data set.")
    revision: Name | None = Field(default=None, description="Branch, tag or commit of a data set on the hub.")
    split: Name | None = Field(default=None, description="Split of the data set; `train` when absent.")
    columns: Columns = Field(default_factory=Columns)
    weight: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=1.0, description="Share of the rows to draw from this source, against the other sources' weights."
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Read no more than this many rows of this source; all when absent."
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (self.dataset is None):
            raise ValueError("a source needs either `path` or `dataset`")
        if self.path is not None and any((self.config, self.revision, self.split)):
            raise ValueError("`config`, `revision` and `split` belong to a `dataset`, not to a `path`")
        return self


class Data(BaseModel):
    """Where the conversations come from, how they become tokens, and what to do with rows that are wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=PATH_OR_SOURCES)

    path: Path | None = Field(
        default=None,
        description='JSONL or Parquet file (.jsonl, .jsonl.gz, .jsonl.zst, .parquet) of {"id", "messages", "tools"?}, '
        '{"id", "conversations"}, {"id", "text"} or {"id", "input_ids", "loss_mask"?}.',
    )
    sources: tuple[Source, ...] = Field(
        default=(), description="Several sources, in place of `path`; rows are drawn from them by weight."
    )
    on_error: Literal["skip", "fail"] = Field(
        default="skip", description="`skip`: report a bad row, count it and go on. `fail`: stop at the first."
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Read no more than this many rows in all; every row when absent."
    )
    shuffle_seed: Annotated[int, Field(ge=0, lt=2**63)] | None = Field(
        default=None,
        description="Read all rows in the random order of this seed (before any limit); in file order when absent.",
    )
    overflow: Literal["truncate", "skip", "split"] = Field(
        default="truncate",
        description="A sample longer than max_model_len - 1 tokens: cut its tail, skip it, or split it into pieces "
        "(each a sample of its own, without the tokens before it as context).",
    )
    special_tokens: Literal["text", "parse"] = Field(
        default="text",
        description="Control tokens such as <|im_end|> inside the data's own text: `text` tokenizes them as ordinary "
        "characters, `parse` as the control tokens.",
    )
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables handed to the chat template, e.g. {enable_thinking: false}."
    )
    template_date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] = Field(
        default="2025-01-01",
        description="The day (YYYY-MM-DD) given to a chat template that asks for today's, so that a rerun on another "
        "day has the same tokens.",
    )
    processes: Annotated[int, Field(ge=1, le=256)] | None = Field(
        default=None, description="Processes that render and tokenize; one per CPU core when absent."
    )

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if (self.path is None) == (not self.sources):
            raise ValueError("data needs either `path` or `sources`")
        return self

    @property
    def place(self) -> str:
        """Names of the sources, for messages."""
        return ", ".join(str(source.path or source.dataset) for source in self.all_sources)

    @property
    def all_sources(self) -> tuple[Source, ...]:
        return self.sources if self.path is None else (Source(path=self.path),)
