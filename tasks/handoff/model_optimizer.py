"""Model-Optimizer: one ``.pt`` a conversation, a dict written by torch.save.

``hidden_states`` [T, H] is the state after the model's final norm, and says so in ``hidden_states_prenorm``: its
EAGLE trainer takes the states as they are. ``aux_hidden_states`` [T, A * H], ``input_ids`` and ``loss_mask`` int64
[T]. The files lie in ``samples/``, apart from the draft vocabulary. Their names are numbers; the conversation's id is
inside.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from tasks.handoff.errors import HandoffError, UnreadableSample
from tasks.handoff.example import Example, stack
from tasks.handoff.formats import Format, Found, Row, TokensOf, Vocabulary
from tasks.handoff.torch_files import load_dict, save_dict, tensor

SAMPLES = "samples"
VOCABULARY = "d2t.pt"


class ModelOptimizer(Format):
    name = "model-optimizer"
    layer_offset = 1
    layer_option = "eagle_aux_hidden_state_layer_ids:"
    path_option = f"offline_data_path: {{}}/{SAMPLES}"
    takes_normed = True
    suffixes = (".pt",)

    def default_aux(self, num_layers: int) -> tuple[int, ...]:
        return 2, num_layers // 2, num_layers - 3

    def path(self, row: Row) -> str:
        return f"{SAMPLES}/{row.number:08d}.pt"

    def content(self, row: Row) -> tuple[str, ...]:
        return row.key, row.mask, row.name

    def write(self, path: Path, example: Example, depths: Sequence[int]) -> None:
        save_dict(
            path,
            {
                "input_ids": example.input_ids_T,
                "loss_mask": example.loss_mask_T,
                "hidden_states": example.final_TH,
                "aux_hidden_states": example.aux_TAH,
                "conversation_id": example.source_id,
                "hidden_states_prenorm": not example.is_normed,
            },
        )

    def load(self, found: Found) -> Example:
        values = load_dict(found.path)
        ids_T = tensor(values, "input_ids", 1).long()
        mask_T = tensor(values, "loss_mask", 1).long() if "loss_mask" in values else torch.ones_like(ids_T)
        if len(mask_T) != len(ids_T):
            raise UnreadableSample("shape", f"a mask of {len(mask_T)} entries for {len(ids_T)} tokens")
        states_LTH = stack(tensor(values, "aux_hidden_states", 2), tensor(values, "hidden_states", 2))
        source_id = str(values.get("conversation_id", found.source_id))
        return Example(
            source_id, "", ids_T, mask_T, states_LTH, is_normed=not values.get("hidden_states_prenorm", False)
        )

    def finish(self, directory: Path, rows: Sequence[Row], tokens: TokensOf, vocabulary: Vocabulary) -> None:
        if vocabulary.draft is not None:
            torch.save(torch.from_numpy(vocabulary.draft.d2t.copy()), directory / VOCABULARY)

    def scan(self, directory: Path) -> list[Found]:
        paths = sorted(path for path in directory.rglob("*.pt") if path.name != VOCABULARY)
        if not paths:
            raise HandoffError(f"{directory} holds no *.pt, as Model-Optimizer's dumps are")
        return [Found(path, path.stem) for path in paths]
