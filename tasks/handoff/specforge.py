"""SpecForge 0.2: ``rows_{a}-{b}/data_{i}.ckpt``, dicts written by torch.save.

``hidden_state`` [1, T, H] is the state after the model's final norm, ``aux_hidden_state`` [1, T, 3 * H] the three
auxiliary states of each token side by side; ``input_ids`` and ``loss_mask`` are int64 [T]. The leading axis is kept:
the reader squeezes it, and would squeeze the tokens of a sample of one. The reader takes no loss at the last token.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from tasks.handoff.errors import HandoffError, UnreadableSample
from tasks.handoff.example import Example, stack
from tasks.handoff.formats import Format, Found, Row, TokensOf, Vocabulary
from tasks.handoff.torch_files import load_dict, save_dict, tensor

ROWS_PER_DIRECTORY = 2000


class SpecForge(Format):
    name = "specforge"
    layer_offset = 1
    layer_option = "aux_hidden_state_layer_ids:"
    path_option = "hidden_states_path: {}"
    takes_normed = True
    num_aux = 3
    suffixes = (".ckpt", ".ckpt.gz")

    def default_aux(self, num_layers: int) -> tuple[int, ...]:
        return 2, num_layers // 2, num_layers - 3

    def path(self, row: Row) -> str:
        first = row.number - row.number % ROWS_PER_DIRECTORY
        return f"rows_{first}-{first + ROWS_PER_DIRECTORY}/data_{row.number}.ckpt"

    def content(self, row: Row) -> tuple[str, ...]:
        return row.key, row.mask

    def write(self, path: Path, example: Example, depths: Sequence[int]) -> None:
        save_dict(
            path,
            {
                "input_ids": example.input_ids_T,
                "loss_mask": example.loss_mask_T,
                "hidden_state": example.final_TH[None],
                "aux_hidden_state": example.aux_TAH[None],
            },
        )

    def load(self, found: Found) -> Example:
        values = load_dict(found.path)
        ids_T = tensor(values, "input_ids", 1, 2).long().flatten()
        mask_T = tensor(values, "loss_mask", 1, 2).long().flatten()
        final_1TH, aux_1TA = tensor(values, "hidden_state", 3), tensor(values, "aux_hidden_state", 3)
        if len(mask_T) != len(ids_T) or final_1TH.shape[0] != 1 or aux_1TA.shape[0] != 1:
            raise UnreadableSample(
                "shape",
                f"hidden_state {list(final_1TH.shape)}, aux_hidden_state {list(aux_1TA.shape)} and a mask of "
                f"{len(mask_T)} entries for {len(ids_T)} tokens",
            )
        return Example(found.source_id, "", ids_T, mask_T, stack(aux_1TA[0], final_1TH[0]), is_normed=True)

    def finish(self, directory: Path, rows: Sequence[Row], tokens: TokensOf, vocabulary: Vocabulary) -> None:
        if vocabulary.draft is not None:
            folder = directory / "vocab_mapping"
            folder.mkdir(exist_ok=True)
            mapping = {
                "d2t": torch.from_numpy(vocabulary.draft.d2t.copy()),
                "t2d": torch.from_numpy(vocabulary.draft.t2d.copy()),
            }
            torch.save(mapping, folder / "vocab_mapping.pt")

    def scan(self, directory: Path) -> list[Found]:
        paths = sorted(path for suffix in self.suffixes for path in directory.rglob(f"*{suffix}"))
        if not paths:
            raise HandoffError(f"{directory} holds no *.ckpt, as SpecForge writes them")
        return [Found(path, str(path.relative_to(directory))) for path in paths]
