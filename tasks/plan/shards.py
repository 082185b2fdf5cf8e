"""Shards: parts of a plan with disjoint keys, one for each node of a fleet."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tasks.vocabulary import PlannedSample

Bound = Annotated[str, Field(pattern=r"^[0-9a-f]{0,64}$")]


class Shard(BaseModel):
    """The samples whose keys lie in a range.

    Small enough to be a flow's parameter: a node plans by itself from the same data and keeps what lies in its range.
    Ranges that do not overlap share no key, whatever the nodes find in their data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    group: Annotated[str, Field(min_length=1, description="Name of the fleet's run.")]
    index: Annotated[int, Field(ge=0, description="Which of the shards this is, from 0.")]
    count: Annotated[int, Field(ge=1, description="How many shards there are.")]
    first: Bound = Field(default="", description="Keys of the shard are not below this.")
    end: Bound | None = Field(default=None, description="Keys of the shard are below this; no end when absent.")

    @property
    def name(self) -> str:
        return f"shard-{self.index:03d}"

    def __contains__(self, key: str) -> bool:
        return self.first <= key and (self.end is None or key < self.end)


def cut(group: str, samples: Sequence[PlannedSample], count: int) -> list[Shard]:
    """Cut all keys into at most ``count`` ranges that hold about equally many of the samples' tokens.

    Args:
        group: name of the fleet's run.
        samples: distinct samples that are to be extracted.
        count: of shards; there are fewer if there are fewer samples.
    """
    ordered = sorted(samples, key=lambda sample: sample.key)
    total = sum(sample.num_tokens for sample in ordered)
    firsts: dict[int, str] = {}
    before = 0
    for sample in ordered:
        # By the middle of the sample, so that a long one goes to the side on which most of it lies.
        firsts.setdefault((2 * before + sample.num_tokens) * count // (2 * total), sample.key)
        before += sample.num_tokens
    if not firsts:
        return []
    bounds = ["", *list(firsts.values())[1:]]
    return [
        Shard(group=group, index=i, count=len(bounds), first=first, end=end)
        for i, (first, end) in enumerate(zip(bounds, [*bounds[1:], None], strict=True))
    ]
