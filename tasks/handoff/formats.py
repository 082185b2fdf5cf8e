"""What the formats have in common, and the formats by name.

* Every conversation of the store is a row, in the order in which they were recorded; plain safetensors have a file for
  each distinct sample.
* Rows are whole and not shifted. A sample of one token is written like any other, and no trainer learns from it: its
  shift leaves no row, or nothing to predict. So is one without a supervised token, with a mask of zeros. A sample
  longer than a trainer's own limit is cut there by its loader.
* Rows of equal content share one file by hard links: in speculators' files those with equal tokens, in SpecForge's
  those with equal tokens and masks. Model-Optimizer's files hold the conversation's id, so none are shared; and no
  file is a view of the store, whose chunks are compressed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tasks.handoff.errors import HandoffError
from tasks.handoff.example import Example
from tasks.tokenize.draft_vocabulary import DraftVocabulary
from tasks.vocabulary import Identity

#: Gives (input ids [T], loss mask [T]) of a row.
TokensOf = Callable[["Row"], tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]]


@dataclass(frozen=True)
class Row:
    """One file of an export: a conversation of the store, or a distinct sample."""

    number: int
    key: str
    sources: tuple[str, ...]
    """The conversation's id; of a distinct sample, all that share it."""
    num_tokens: int
    mask: str
    """Digest of the row's loss mask."""

    @property
    def name(self) -> str:
        """By which the store is asked for the row; its key where no source is recorded."""
        return self.sources[0] if self.sources else self.key


@dataclass(frozen=True, eq=False)
class Found:
    """One sample's file of a directory."""

    path: Path
    source_id: str = ""
    listed: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    """Gives (input ids [T], loss mask [T]), both int64, where the format lists them beside the files."""
    problem: str | None = None
    """What is wrong with it before it is opened."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Token frequencies of an export, and the draft vocabulary chosen by them, where one was asked for."""

    frequencies: dict[int, int]
    """Token -> how often it is supervised."""
    draft: DraftVocabulary | None = None


class Format(ABC):
    """Files of one project's trainer."""

    name: str
    version = 1
    """Raise it when the same sample is written in other bytes."""
    layer_offset = 0
    """The project's layer id i means r_{i + layer_offset}."""
    layer_option = ""
    """What the project calls its list of layer ids."""
    path_option = ""
    """How a trainer is given the directory, ``{}`` standing for it."""
    takes_normed = False
    """Whether the final state is expected after the model's final norm."""
    num_aux: int | None = None
    """How many auxiliary depths the project's models take; None where that is configured."""
    by_key = False
    """Whether an export has a file for each distinct sample instead of each conversation."""
    holds_mask = True
    """Whether a sample's file holds the loss mask."""
    suffixes: tuple[str, ...]
    """Of the samples' files."""

    @abstractmethod
    def default_aux(self, num_layers: int) -> tuple[int, ...]:
        """Auxiliary depths that the project's trainer reads unless told otherwise."""

    def needed_depths(self, num_layers: int, aux: Sequence[int] | None = None) -> tuple[int, ...]:
        """The auxiliary depths, those given or else the project's own, and the last depth.

        Raises:
            HandoffError: the project cannot read these.
        """
        chosen = tuple(self.default_aux(num_layers) if aux is None else aux)
        least = max(0, self.layer_offset)
        if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < least or chosen[-1] >= num_layers:
            whose = f"the depths that {self.name} reads by default" if aux is None else "--depths"
            raise HandoffError(
                f"{whose} {list(chosen)} must ascend, each once, from {least} to {num_layers - 1} in a model with "
                f"{num_layers} decoder layers; name others with --depths"
            )
        if self.num_aux is not None and len(chosen) != self.num_aux:
            raise HandoffError(f"{self.name} takes {self.num_aux} auxiliary depths, not {len(chosen)}: {list(chosen)}")
        return (*chosen, num_layers)

    def select_depths(self, identity: Identity, aux: Sequence[int] | None = None) -> tuple[int, ...]:
        """As :meth:`needed_depths`, all of which the store has.

        Raises:
            HandoffError: it lacks one; says which.
        """
        needed = self.needed_depths(identity.num_layers, aux)
        missing = [depth for depth in needed if depth not in identity.depths]
        if missing:
            raise HandoffError(
                f"{self.name} reads {names(needed)} of a model with {identity.num_layers} decoder layers; the store "
                f"lacks {names(missing)}, it has {names(identity.depths)}. Extract with `layers: {{ids: "
                f"{list(needed)}, convention: input}}`, or name auxiliary depths that the store has with --depths"
            )
        return needed

    def layer_ids(self, depths: Sequence[int]) -> list[int]:
        """Auxiliary depths as the project counts layers; ``depths`` ends with the last, which is no id."""
        return [depth - self.layer_offset for depth in depths[:-1]]

    @abstractmethod
    def path(self, row: Row) -> str:
        """Path of a row's file, relative to the export."""

    @abstractmethod
    def content(self, row: Row) -> tuple[str, ...]:
        """What of a row its file depends on: rows for which this is equal share one file."""

    def nbytes(self, num_tokens: int, state_bytes: int) -> int:
        """Bytes of a file with this many tokens, whose states take ``state_bytes``; not less than it will have."""
        return state_bytes + 16 * num_tokens + 4096

    @abstractmethod
    def write(self, path: Path, example: Example, depths: Sequence[int]) -> None:
        """Write a sample's file, its bytes the same each time."""

    @abstractmethod
    def load(self, found: Found) -> Example:
        """Read a sample's file; the key stays empty, and a mask that is nowhere is all ones.

        Raises:
            UnreadableSample: it is not one.
        """

    def input_ids(self, found: Found) -> torch.Tensor:
        """Its token ids alone, int64 [T]; as :meth:`load`."""
        return found.listed()[0] if found.listed is not None else self.load(found).input_ids_T

    @abstractmethod
    def finish(self, directory: Path, rows: Sequence[Row], tokens: TokensOf, vocabulary: Vocabulary) -> None:
        """Write what lies beside the samples' files; only done when all of those are there."""

    def unfinish(self, directory: Path) -> None:
        """Remove what would let a trainer read the directory before it is finished again, where there is such."""
        del directory

    def scan(self, directory: Path) -> list[Found]:
        """The files of a directory to import, in a fixed order.

        Raises:
            HandoffError: there are none.
        """
        raise HandoffError(f"{self.name} cannot be imported")


def by_name(name: str) -> Format:
    """The format with this name.

    Raises:
        HandoffError: there is none.
    """
    from tasks.handoff.model_optimizer import ModelOptimizer
    from tasks.handoff.safetensors_files import SafetensorsFiles
    from tasks.handoff.specforge import SpecForge
    from tasks.handoff.speculators import Speculators

    formats: tuple[Format, ...] = (Speculators(), SpecForge(), ModelOptimizer(), SafetensorsFiles())
    for each in formats:
        if each.name == name:
            return each
    raise HandoffError(f"{name!r} is no format; choose from {', '.join(each.name for each in formats)}")


def names(depths: Sequence[int]) -> str:
    return ", ".join(f"r_{depth}" for depth in depths)
