"""Plain safetensors for looking into a model: one file a sample, one tensor a depth.

``samples/{key}.safetensors`` holds ``r_{k}`` [T, H] for every exported depth, ``input_ids`` int64 and ``loss_mask``
int64 [T]; ``index.jsonl`` has a line for each sample with its key, file, tokens and source ids. Any program that
reads safetensors can take one depth of one sample, or some rows of it, without reading the others.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tasks.handoff.errors import HandoffError
from tasks.handoff.example import Example
from tasks.handoff.formats import Format, Found, Row, TokensOf, Vocabulary, names
from tasks.paths import follow_umask
from tasks.vocabulary import Identity

INDEX = "index.jsonl"


class SafetensorsFiles(Format):
    name = "safetensors"
    by_key = True
    suffixes = (".safetensors",)

    def default_aux(self, num_layers: int) -> tuple[int, ...]:
        return ()

    def select_depths(self, identity: Identity, aux: Sequence[int] | None = None) -> tuple[int, ...]:
        wanted = identity.depths if aux is None else tuple(aux)
        missing = [depth for depth in wanted if depth not in identity.depths]
        if missing or not wanted or list(wanted) != sorted(set(wanted)):
            raise HandoffError(
                f"--depths {list(wanted)}: choose from those that the store has, {names(identity.depths)}, ascending"
            )
        if identity.last_is_normed and identity.num_layers in wanted:
            raise HandoffError(f"the store has no r_{identity.num_layers}, only the final norm's output; leave it out")
        return wanted

    def path(self, row: Row) -> str:
        return f"samples/{row.key}.safetensors"

    def content(self, row: Row) -> tuple[str, ...]:
        return row.key, row.mask

    def write(self, path: Path, example: Example, depths: Sequence[int]) -> None:
        tensors = {f"r_{depth}": states_TH for depth, states_TH in zip(depths, example.states_LTH, strict=True)}
        tensors |= {"input_ids": example.input_ids_T, "loss_mask": example.loss_mask_T}
        save_file(tensors, path, {"key": example.key})
        follow_umask(path)

    def load(self, found: Found) -> Example:
        tensors = load_file(found.path)
        depths = sorted(int(name[2:]) for name in tensors if name.startswith("r_"))
        states_LTH = torch.stack([tensors[f"r_{depth}"] for depth in depths])
        return Example(found.source_id, "", tensors["input_ids"], tensors["loss_mask"], states_LTH)

    def finish(self, directory: Path, rows: Sequence[Row], tokens: TokensOf, vocabulary: Vocabulary) -> None:
        scratch = directory / ".layertap" / INDEX
        with scratch.open("w", encoding="utf-8") as file:
            for row in rows:
                line = {"key": row.key, "file": self.path(row), "num_tokens": row.num_tokens}
                file.write(json.dumps(line | {"source_ids": row.sources}, ensure_ascii=False) + "\n")
        scratch.replace(directory / INDEX)

    def unfinish(self, directory: Path) -> None:
        (directory / INDEX).unlink(missing_ok=True)
