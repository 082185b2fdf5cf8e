"""speculators 0.9: ``hidden_states/hs_{row}.safetensors`` beside a Hugging Face data set saved to disk.

Its trainer reads r_L before the norm and applies the verifier's norm itself. The files are written as its
``ArrowDataset`` expects them: ``hidden_states`` [T, A + 1, H], the last slot r_L, and ``token_ids`` equal to the data
set's ``input_ids``. The file of a row does not hold the loss mask, so conversations with equal tokens share one.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tasks.handoff.errors import HandoffError, UnreadableSample
from tasks.handoff.example import Example
from tasks.handoff.formats import Format, Found, Row, TokensOf, Vocabulary
from tasks.paths import follow_umask

STATES = "hidden_states"
FREQUENCIES = "token_freq.pt"
_COMPLETE = "state.json"
"""Without this file the directory is no data set."""
_SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int64())),
        ("seq_len", pa.int64()),
        ("source_id", pa.string()),
    ]
)
_ROWS_PER_BATCH = 256


class Speculators(Format):
    name = "speculators"
    layer_option = "--target-layer-ids"
    path_option = "--data-path {} --on-missing raise"
    holds_mask = False
    suffixes = (".safetensors",)

    def default_aux(self, num_layers: int) -> tuple[int, ...]:
        return 2, num_layers // 2, num_layers - 3

    def path(self, row: Row) -> str:
        return f"{STATES}/hs_{row.number}.safetensors"

    def content(self, row: Row) -> tuple[str, ...]:
        return (row.key,)

    def write(self, path: Path, example: Example, depths: Sequence[int]) -> None:
        states_TLH = example.states_LTH.transpose(0, 1).contiguous()
        save_file({"hidden_states": states_TLH, "token_ids": example.input_ids_T.contiguous()}, path)
        follow_umask(path)

    def load(self, found: Found) -> Example:
        try:
            tensors = load_file(found.path)
        except FileNotFoundError:
            raise UnreadableSample("missing", "there is no such file") from None
        except (SafetensorError, OSError, ValueError) as error:
            raise UnreadableSample("unreadable", f"it is no whole safetensors file: {error}") from error
        absent = {"hidden_states", "token_ids"} - tensors.keys()
        if absent:
            raise UnreadableSample("keys", f"it has no tensor {sorted(absent)}, only {sorted(tensors)}")
        states_TLH, ids_T = tensors["hidden_states"], tensors["token_ids"].long()
        if states_TLH.ndim != 3 or ids_T.ndim != 1:
            raise UnreadableSample(
                "shape",
                f"hidden_states {list(states_TLH.shape)} and token_ids {list(ids_T.shape)}, expected [T, L, H] and [T]",
            )
        mask_T = torch.ones_like(ids_T)
        if found.listed is not None:
            listed_T, mask_T = found.listed()
            if not torch.equal(listed_T, ids_T):
                raise UnreadableSample(
                    "token_ids", f"its {len(ids_T)} token ids are not the {len(listed_T)} that the data set has for it"
                )
        return Example(found.source_id, "", ids_T, mask_T, states_TLH.transpose(0, 1))

    def unfinish(self, directory: Path) -> None:
        (directory / _COMPLETE).unlink(missing_ok=True)

    def finish(self, directory: Path, rows: Sequence[Row], tokens: TokensOf, vocabulary: Vocabulary) -> None:
        self.unfinish(directory)
        scratch = directory / ".layertap" / "data-set"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        try:
            _write_data_set(scratch, rows, tokens)
            torch.save(vocabulary.frequencies, scratch / "saved" / FREQUENCIES)
            if vocabulary.draft is not None:
                size = len(vocabulary.draft.d2t)
                np.save(scratch / "saved" / f"d2t-{size}.npy", vocabulary.draft.d2t)
                np.save(scratch / "saved" / f"t2d-{size}.npy", vocabulary.draft.t2d)
            for old in directory.glob("data-*.arrow"):
                old.unlink()
            new = sorted((scratch / "saved").iterdir(), key=lambda path: path.name == _COMPLETE)
            for path in new:
                path.replace(directory / path.name)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def scan(self, directory: Path) -> list[Found]:
        table = _open_table(directory)
        ids = table["source_id"].to_pylist() if "source_id" in table.column_names else range(len(table))
        found = [
            Found(directory / STATES / f"hs_{row}.safetensors", str(source_id), partial(_listed, table, row))
            for row, source_id in enumerate(ids)
        ]
        known = {each.path for each in found}
        for path in sorted((directory / STATES).glob("hs_*.safetensors")):
            if path not in known:
                found.append(Found(path, problem=f"the data set has {len(table)} rows, and none for it"))
        return found


def _write_data_set(scratch: Path, rows: Sequence[Row], tokens: TokensOf) -> None:
    """Write the data set to ``scratch/saved``."""
    from datasets import Dataset, disable_progress_bars, enable_progress_bars
    from datasets.utils.logging import is_progress_bar_enabled

    raw = scratch / "rows.arrow"
    with pa.OSFile(str(raw), "wb") as sink, pa.ipc.new_stream(sink, _SCHEMA) as writer:
        for start in range(0, len(rows), _ROWS_PER_BATCH):
            columns: list[list[Any]] = [[], [], [], []]
            for row in rows[start : start + _ROWS_PER_BATCH]:
                ids_T, mask_T = tokens(row)
                for column, value in zip(columns, (ids_T, mask_T, len(ids_T), row.name), strict=True):
                    column.append(value)
            columns[1] = [mask_T.astype(np.int64) for mask_T in columns[1]]
            arrays = [pa.array(c, type=f.type) for c, f in zip(columns, _SCHEMA, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
    # Its loader takes tensors from the rows, which only this setting makes it do.
    data_set = Dataset.from_file(str(raw)).with_format("torch")
    with raw.open("rb") as file:  # by itself it would be drawn at random, and every export would differ
        data_set._fingerprint = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    had_bars = is_progress_bar_enabled()
    disable_progress_bars()
    try:
        data_set.save_to_disk(scratch / "saved")
    finally:
        if had_bars:
            enable_progress_bars()


def _open_table(directory: Path) -> pa.Table:
    try:
        listed = json.loads((directory / _COMPLETE).read_text())["_data_files"]
        table = pa.concat_tables([_read(directory / each["filename"]) for each in listed])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HandoffError(
            f"{directory} is no data set saved to disk, as speculators has it beside {STATES}/: {error}"
        ) from error
    absent = {"input_ids", "loss_mask"} - set(table.column_names)
    if absent:
        raise HandoffError(f"the data set in {directory} has no column {sorted(absent)}")
    return table


def _read(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def _listed(table: pa.Table, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    columns = table.slice(row, 1)
    ids_T, mask_T = (
        torch.from_numpy(columns[name][0].values.to_numpy(zero_copy_only=False).astype(np.int64))
        for name in ("input_ids", "loss_mask")
    )
    return ids_T, mask_T
