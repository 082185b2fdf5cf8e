"""The configuration of an extraction: the flow's parameters, and what a preset file holds."""

from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from flows.explain import explain
from tasks.extract.config import Engine
from tasks.layers import Layers
from tasks.model import Checkpoint, Model
from tasks.paths import from_home
from tasks.tokenize.config import Data
from tasks.verify.config import Audit
from tasks.vocabulary import DType, Identity, StoredAs

# Knobs of the flows, with the bounds of the settings that they replace.
Limit = Annotated[int, Field(ge=1)] | None
ChunkTokens = Annotated[int, Field(ge=1)] | None
ShuffleSeed = Annotated[int, Field(ge=0, lt=2**63)] | None

PRESETS = Path(__file__).resolve().parent.parent / "infra" / "presets"


class ConfigError(ValueError):
    """A preset cannot be found or read, or holds something it must not; the message says what to change."""


class Extraction(BaseModel):
    """One extraction: which states of which model over which data, and where they go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Model
    layers: Layers
    dtype: DType = Field(
        default="bfloat16",
        description="Element type that the model computes in and the store keeps. float16 is not offered: DeepSeek "
        "models rescale the residual stream under it.",
    )
    data: Data
    chunk_tokens: Annotated[int, Field(ge=1)] = Field(
        default=65_536, description="Tokens of one chunk: what one task run extracts, verifies and commits."
    )
    store: Annotated[str, Field(min_length=1)] = Field(description="Directory or URL of the store.")
    stored_as: StoredAs = Field(
        default="exact",
        description="`exact` keeps every bit of the states. `float8_e4m3` halves the store and loses precision; the "
        "error is measured and shown by `layertap stats`.",
    )
    engine: Engine = Engine()
    audit: Audit = Audit()

    @field_validator("dtype", mode="before")
    @classmethod
    def _no_half(cls, value: Any) -> Any:
        if value in ("float16", "fp16", "half"):
            raise ValueError(
                "float16 is refused: DeepSeek models rescale the residual stream under it, and massive activations "
                "overflow; use bfloat16 or float32"
            )
        return {"bf16": "bfloat16", "fp32": "float32"}.get(value, value) if isinstance(value, str) else value

    @classmethod
    def load(cls, preset: str) -> Self:
        """Read a preset by name (``infra/presets/NAME.yaml``) or a YAML file by path.

        Raises:
            ConfigError: no such preset, not YAML, or values that are refused.
        """
        path = Path(preset).expanduser()
        if not path.is_file():
            path = PRESETS / f"{preset}.yaml"
            if Path(preset).name != preset or not path.is_file():
                known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.yaml")))
                raise ConfigError(f"{preset} is neither a YAML file nor a preset; presets: {known}")
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{path}: {explain(error, cls)}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: {error}") from error

    def overridden(
        self,
        *,
        dataset: str | None = None,
        limit: int | None = None,
        store: str | None = None,
        chunk_tokens: int | None = None,
        shuffle_seed: int | None = None,
    ) -> Self:
        """The same extraction with the given knobs changed.

        Raises:
            ConfigError: one has a value that is refused.
        """
        values = self.model_dump()
        if dataset is not None:
            values["data"] |= {"path": dataset, "sources": ()}
        values["data"] |= {k: v for k, v in {"limit": limit, "shuffle_seed": shuffle_seed}.items() if v is not None}
        values |= {k: v for k, v in {"store": store, "chunk_tokens": chunk_tokens}.items() if v is not None}
        try:
            return type(self).model_validate(values)
        except ValidationError as error:
            raise ConfigError(explain(error, type(self))) from None

    def anchored(self) -> Self:
        """The same extraction with absolute local paths, so that it means the same in another working directory."""
        values = self.model_dump()
        if "://" not in self.store:
            values["store"] = str(Path(self.store).expanduser().absolute())
        if Path(self.model.path).expanduser().is_dir():
            values["model"]["path"] = str(Path(self.model.path).expanduser().absolute())
        for source in (values["data"], *values["data"]["sources"]):
            if source["path"] is not None:
                source["path"] = source["path"].expanduser().absolute()
        return type(self).model_validate(values)

    def identity(self, checkpoint: Checkpoint) -> Identity:
        """What decides the states' values and shape; ``layers`` must have been checked against the checkpoint."""
        return checkpoint.identity(self.layers, self.dtype, stored_as=self.stored_as, numerics=self.engine.numerics)

    def provenance(self) -> dict[str, Any]:
        """What the store keeps of a run: enough to audit it and to run it again."""
        kept = self.model_dump(mode="json", include={"model", "layers", "dtype", "data", "chunk_tokens", "engine"})
        kept["model"]["path"] = from_home(kept["model"]["path"])
        for source in (kept["data"], *kept["data"]["sources"]):
            for place in {"path", "dataset"} & source.keys():
                source[place] = source[place] and from_home(source[place])
        return kept
