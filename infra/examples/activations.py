"""Stream single tokens' activations of one depth in shuffled order, as the training of a sparse autoencoder does.

    layertap export stores/mine activations --to safetensors --depths 15
    python -m infra.examples.activations activations 15

Needs torch and safetensors alone. Files are taken in random order into a buffer of rows, from which batches are drawn
at random, so that a batch mixes many samples while the memory stays bounded. Each row comes once.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open


def stream(
    directory: Path, depth: int, *, batch_rows: int = 1024, buffer_rows: int = 65_536, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of (activations [B, H], token ids [B]); the order depends on the seed alone.

    Args:
        directory: of an export ``--to safetensors``.
        depth: k of r_k.
        batch_rows: B; the last batch may have fewer.
        buffer_rows: Rows that batches are drawn from; at most those of one sample more are held.
        seed: of the order.
    """
    files = [json.loads(line)["file"] for line in (directory / "index.jsonl").read_text(encoding="utf-8").splitlines()]
    random.Random(seed).shuffle(files)
    generator = torch.Generator().manual_seed(seed)
    states_NH, ids_N = [], []
    held = 0
    for number, name in enumerate(files, 1):
        with safe_open(directory / name, framework="pt") as file:
            states_NH.append(file.get_tensor(f"r_{depth}"))
            ids_N.append(file.get_tensor("input_ids"))
        held += len(ids_N[-1])
        is_last = number == len(files)
        if held < max(buffer_rows, 2 * batch_rows) and not is_last:
            continue
        order = torch.randperm(held, generator=generator)
        rows_NH, tokens_N = torch.cat(states_NH)[order], torch.cat(ids_N)[order]
        # Half of the buffer stays, to be mixed with what comes.
        leave = held if is_last else held // 2 // batch_rows * batch_rows
        for start in range(0, leave, batch_rows):
            rows = slice(start, min(start + batch_rows, leave))
            yield rows_NH[rows], tokens_N[rows]
        states_NH, ids_N, held = [rows_NH[leave:]], [tokens_N[leave:]], held - leave


def main() -> None:
    rows, total = 0, torch.zeros(())
    for states_BH, _ in stream(Path(sys.argv[1]), int(sys.argv[2])):
        rows += len(states_BH)
        total = total + states_BH.float().square().sum(dim=0)
    print(f"{rows} rows, root mean square {float((total / rows).mean().sqrt()):.4g}")


if __name__ == "__main__":
    main()
