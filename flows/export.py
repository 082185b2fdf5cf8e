"""The flow ``export``: a store in the files of another project's trainer."""

from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import wait
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.audit import newest_run
from flows.run import begin
from tasks.handoff.errors import HandoffError
from tasks.handoff.export import Export
from tasks.handoff.formats import by_name
from tasks.handoff.task import write_chunk
from tasks.model import Model, resolve
from tasks.store import Reader
from tasks.store import open as open_store

Target = Literal["speculators", "specforge", "model-optimizer", "safetensors"]
WORKERS = 4
RUNNER: Any = ThreadPoolTaskRunner(max_workers=WORKERS)


@flow(name="export", task_runner=RUNNER, persist_result=False)
def export(
    store: str,
    directory: Path,
    to: Target,
    depths: tuple[int, ...] | None = None,
    draft_vocab: int | None = None,
    model: str | None = None,
    chunk_tokens: int = 65_536,
    force: bool = False,
) -> State[Any]:
    """Write a store as files of another project; what is there byte for byte is not written again.

    Args:
        store: Directory or URL of the store.
        directory: Empty, absent, or of an earlier export of the same.
        to: The format.
        depths: Auxiliary depths instead of those that the project reads by default.
        draft_vocab: Choose a draft vocabulary of this many tokens, by how often they are supervised.
        model: The checkpoint that filled the store, for the size of its vocabulary; as the store's newest run says.
        chunk_tokens: Tokens of one chunk: what one task run writes.
        force: Begin even if the files may not fit on the disk.

    Returns:
        A state with a :class:`tasks.handoff.export.ExportReport`; Failed unless all rows are there.
    """
    begin()
    reader = open_store(store)
    vocab_size = None if draft_vocab is None else _vocab_size(reader, model)
    with Export(reader, by_name(to), directory, depths) as target:
        pending, report = target.pending(WORKERS)
        target.require_room(pending, force)
        chunks = list(target.chunks(pending, chunk_tokens))
        futures = [write_chunk.submit(target, chunk, n, len(chunks)) for n, chunk in enumerate(chunks, 1)]
        wait(futures)
        for future in futures:
            report.add(future.result())
        if report.complete:
            target.finish(report, vocab_size, draft_vocab)
    return (Completed if report.complete else Failed)(message=report.message, data=report)


def _vocab_size(reader: Reader, model: str | None) -> int:
    run = newest_run(reader)
    if model is None and "model" not in run:
        raise HandoffError("no run of the store says which checkpoint filled it; name it with --model")
    return resolve(Model(path=model) if model is not None else Model.model_validate(run["model"])).vocab_size
