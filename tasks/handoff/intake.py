"""An import: files of another project become a store, each audited before it is committed.

What the capture proves by comparing ranks cannot be proved of files. What is left is asked of each: is it whole, are
shapes and token ids those of its sample, is any state NaN, zero, repeated or carried over from another depth, do its
rows predict their next tokens (and not others', as shifted rows do), and is the final state on the side of the final
norm that the format says. States of a wrong layer pass all this: `layertap audit --reference hf` finds them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks import digest
from tasks.handoff.errors import HandoffError, UnreadableSample
from tasks.handoff.example import Example
from tasks.handoff.formats import Format, Found
from tasks.layers import Layers
from tasks.model import Checkpoint
from tasks.paths import from_home
from tasks.profile import profile_of
from tasks.store import FinalNorm, SourceRecord, StagedSample, Store
from tasks.store.maintenance import preflight
from tasks.store.stage import stage_states
from tasks.verify.audit import Predicted, clearly_more, predict
from tasks.verify.examine import Examiner
from tasks.verify.proof import Head, margin
from tasks.vocabulary import LAST_IS_NORMED, Identity, PlannedSample, Receipt, Verdict, digest_ids

IMPORTED_FROM = "imported_from"
"""Name in :attr:`Identity.numerics`: imported states are never mixed with those of an extraction."""


@dataclass(frozen=True)
class Refused:
    """A file that did not become a sample."""

    file: str
    reason: str
    detail: str


@dataclass
class ImportReport:
    """What an import did."""

    store: str
    files: int = 0
    committed: int = 0
    present: int = 0
    """Files whose samples were in the store already."""
    duplicates: int = 0
    """Files with the tokens and the states of another one."""
    tokens: int = 0
    refused: list[Refused] = field(default_factory=list)
    rows_predicted: int = 0
    hits: int = 0
    """Of these, rows whose most likely next token is the sample's."""
    proof_note: str = ""
    """Why no token was predicted, where none was."""

    @property
    def passed(self) -> bool:
        return not self.refused

    @property
    def message(self) -> str:
        good = self.committed + self.present + self.duplicates
        return f"{good} of {self.files} files are in {self.store}, {len(self.refused)} refused"

    def add(self, chunk: "ImportReport") -> None:
        """Take a chunk's counts into account."""
        for name in ("committed", "duplicates", "tokens", "rows_predicted", "hits"):
            setattr(self, name, getattr(self, name) + getattr(chunk, name))
        self.refused += chunk.refused


@dataclass(frozen=True, eq=False)
class Planned:
    """A file whose token ids could be read."""

    found: Found
    key: str
    num_tokens: int


def identity_of(
    of: Format, files: Sequence[Found], checkpoint: Checkpoint, aux: Sequence[int] | None = None
) -> Identity:
    """Identity of the store that the files become.

    Element type and side of the final norm are those of most of the first files that can be read.

    Raises:
        HandoffError: none can be read, or the format's depths do not fit the model.
    """
    depths = of.needed_depths(checkpoint.num_layers, aux)
    kinds: list[tuple[str, bool]] = []
    for example in _readable(of, files):
        kinds.append((str(example.states_LTH.dtype).removeprefix("torch."), example.is_normed))
        if len(kinds) == 16:
            break
    kinds = [kind for kind in kinds if kind[0] in ("bfloat16", "float32")]
    if not kinds:
        raise HandoffError("no file holds bfloat16 or float32 states that can be read, so there is nothing to import")
    dtype, normed = max(dict.fromkeys(kinds), key=kinds.count)
    numerics = {IMPORTED_FROM: of.name} | ({LAST_IS_NORMED: True} if normed else {})
    layers = Layers(ids=depths, convention="input")
    return checkpoint.identity(layers, "bfloat16" if dtype == "bfloat16" else "float32", numerics=numerics)


def _readable(of: Format, files: Iterable[Found]) -> Iterator[Example]:
    for found in files:
        if found.problem is None:
            try:
                yield of.load(found)
            except UnreadableSample:
                continue


class Intake:
    """One import: plans, and audits and commits chunk by chunk."""

    def __init__(self, of: Format, store: Store, examiner: Examiner, norm: FinalNorm | None, head: Head | None) -> None:
        """Import into an open store.

        Args:
            of: the format of the files.
            store: of :func:`identity_of`.
            examiner: of the run; learns what sizes are usual.
            norm: the model's final norm; None leaves out whether the states went through it.
            head: of the model, to predict tokens with; None leaves that out.
        """
        self.format, self.store = of, store
        self._examiner, self._norm, self._head = examiner, norm, head
        self._committed: dict[str, tuple[str, tuple[str, ...]]] = {}
        """Key -> (file, digests) of what this import committed."""

    def plan(self, files: Sequence[Found], report: ImportReport) -> list[Planned]:
        """Read all token ids, and refuse files without; returns those whose samples the store lacks."""
        planned = []
        for found in files:
            try:
                if found.problem is not None:
                    raise UnreadableSample("unlisted", found.problem)
                ids_T = self.format.input_ids(found)
                if not len(ids_T):
                    raise UnreadableSample("shape", "it has no tokens")
            except UnreadableSample as error:
                report.refused.append(Refused(from_home(found.path), error.reason, error.detail))
                continue
            planned.append(Planned(found, self.store.identity.key(ids_T.numpy()), len(ids_T)))
        report.files = len(files)
        missing = set(self.store.missing((each.key, each.num_tokens) for each in planned))
        present = [each for each in planned if each.key not in missing]
        report.present = len(present)
        self.store.record(self._new_sources(present))
        return [each for each in planned if each.key in missing]

    def _new_sources(self, present: Iterable[Planned]) -> Iterator[SourceRecord]:
        """Sources that an import which was interrupted did not come to record."""
        for each in present:
            known = self.store.manifest.sources.get(each.found.source_id)
            if known is not None and known.key == each.key:
                continue
            try:
                example = self.format.load(each.found)
            except UnreadableSample:  # the sample is there, by another file
                continue
            yield SourceRecord(example.source_id, each.key, example.loss_mask_T.numpy() != 0)

    def chunks(self, planned: Sequence[Planned], chunk_tokens: int) -> Iterator[list[Planned]]:
        """Files in batches of about this many tokens, in their order."""
        batch: list[Planned] = []
        tokens = 0
        for each in planned:
            if batch and tokens + each.num_tokens > chunk_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(each)
            tokens += each.num_tokens
        if batch:
            yield batch

    def require_room(self, chunks: Sequence[Sequence[Planned]], force: bool = False) -> None:
        """Raise NoSpace if the samples of these files may not fit into the store."""
        tokens = [sum(each.num_tokens for each in chunk) for chunk in chunks]
        files = sum(len(chunk) for chunk in chunks)
        preflight(self.store, sum(tokens), files, chunk_tokens=max(tokens, default=0), force=force)

    def take(self, chunk: Sequence[Planned]) -> ImportReport:
        """Audit a chunk's files, commit the good ones and quarantine the samples of the others."""
        report = ImportReport(self.store.url)
        waiting = list(chunk)
        while waiting:
            leaders: dict[str, Planned] = {}
            waiting, before = [], waiting
            for each in before:
                if leaders.setdefault(each.key, each) is not each:
                    waiting.append(each)  # the same tokens: looked at when the first is in the store, or refused
            self._take_distinct(leaders.values(), report)
        return report

    def _take_distinct(self, files: Iterable[Planned], report: ImportReport) -> None:
        samples: dict[str, tuple[Planned, Example]] = {}
        receipts: dict[str, list[Receipt]] = {}
        for each in files:
            try:
                example = self.format.load(each.found)
                self._check(each, example, report)
                receipt = self._receipt(each, example)
                if each.key in self._committed:
                    self._add_source(each, example, receipt, report)
                    continue
            except UnreadableSample as error:
                self._refuse(each, error.reason, error.detail, report)
                continue
            samples[each.key], receipts[each.key] = (each, example), [self._stage(each, example, receipt)]
        planned = [PlannedSample(key, each.num_tokens, ()) for key, (each, _) in samples.items()]
        ids_digests = {key: digest_ids(example.input_ids_T.numpy()) for key, (_, example) in samples.items()}
        verdicts = self._examiner.examine(planned, receipts, ids_digests)
        self._commit([v for v in verdicts if v.accepted], samples, report)
        for verdict in verdicts:
            if not verdict.accepted:
                self._refuse(samples[verdict.key][0], verdict.reason or "", verdict.detail, report, verdict)

    def _commit(
        self, verdicts: Sequence[Verdict], samples: dict[str, tuple[Planned, Example]], report: ImportReport
    ) -> None:
        staged, sources = [], []
        for verdict in verdicts:
            each, example = samples[verdict.key]
            (receipt,) = verdict.receipts
            mask_T = example.loss_mask_T.numpy() != 0
            capture = {"digests": receipt.digests, "rms": receipt.rms, IMPORTED_FROM: self.format.name}
            staged.append(
                StagedSample(
                    each.key, each.num_tokens, receipt.objects or {}, mask_T, None, (example.source_id,), capture
                )
            )
            sources.append(SourceRecord(example.source_id, each.key, mask_T))
            self._committed[each.key] = from_home(each.found.path), receipt.digests
        self.store.commit(staged)
        self.store.record(sources)
        report.committed += len(staged)
        report.tokens += sum(sample.num_tokens for sample in staged)

    def _add_source(self, each: Planned, example: Example, receipt: Receipt, report: ImportReport) -> None:
        file, digests = self._committed[each.key]
        if receipt.digests != digests:
            raise UnreadableSample("other_states", f"it has the tokens of {file}, but other states")
        self.store.record([SourceRecord(example.source_id, each.key, example.loss_mask_T.numpy() != 0)])
        report.duplicates += 1

    def _refuse(
        self, each: Planned, reason: str, detail: str, report: ImportReport, verdict: Verdict | None = None
    ) -> None:
        file = from_home(each.found.path)
        report.refused.append(Refused(file, reason, detail))
        if each.key not in self._committed:
            evidence = [receipt.to_evidence() for receipt in verdict.receipts] if verdict else None
            self.store.quarantine(each.key, [each.found.source_id or file], reason, f"{file}: {detail}", evidence)

    def _check(self, each: Planned, example: Example, report: ImportReport) -> None:
        """Raise UnreadableSample if the final state is on the wrong side of the norm, or the rows are shifted."""
        identity, last_TH = self.store.identity, example.states_LTH[-1]
        if example.is_normed != identity.last_is_normed:
            raise UnreadableSample(
                "final_norm",
                f"it says that its final state is {_side(example.is_normed)} the final norm, the others' is "
                f"{_side(identity.last_is_normed)} it",
            )
        fits = tuple(example.states_LTH.shape) == identity.shape(each.num_tokens)
        if not fits or not torch.isfinite(last_TH.float()).all():
            return  # told with its figures by the judgement
        contradicts = self._contradicts(last_TH, example.is_normed)
        ids_T = example.input_ids_T.numpy().astype(np.int32)
        told = None if self._head is None else self._predict(last_TH, ids_T, example.is_normed)
        if told is not None:
            report.rows_predicted += told.rows
            report.hits += told.hits.get(0, 0)
        other: Predicted | None = None
        if told is not None and told.rows and (contradicts or not clearly_more(told.hits[0], 0)):
            other = self._predict(last_TH, ids_T, not example.is_normed)
        if contradicts or (told and other and clearly_more(other.hits[0], told.hits[0])):
            raise UnreadableSample("final_norm", self._wrong_side(last_TH, example.is_normed, told, other))
        if told is not None and told.shift:
            raise UnreadableSample("shifted", told.describe_shift())

    def _contradicts(self, last_TH: torch.Tensor, is_normed: bool) -> bool:
        if self._norm is None:
            return False
        share = self._norm.normed_rows(last_TH) / len(last_TH)
        return share < 0.5 if is_normed else share > 0.9

    def _predict(self, last_TH: torch.Tensor, ids_T: npt.NDArray[np.int32], is_normed: bool) -> Predicted:
        assert self._head is not None
        return predict(self._head, last_TH, ids_T, None, margin(self.store.identity), normed=is_normed)

    def _wrong_side(
        self, last_TH: torch.Tensor, is_normed: bool, told: Predicted | None, other: Predicted | None
    ) -> str:
        text = f"the final state is {_side(not is_normed)} the final norm, and should be {_side(is_normed)} it"
        if self._norm is not None:
            like = self._norm.normed_rows(last_TH)
            text += f": {like} of {len(last_TH)} rows have the norm's size"
        if told is not None and other is not None:
            right, wrong = other.hits[0], told.hits[0]
            text += f"; taken so, {right} of {other.rows} rows predict their next token, {wrong} as it should be"
        return text

    def _receipt(self, each: Planned, example: Example) -> Receipt:
        """What a rank would have said of these states."""
        states_LTH, identity = example.states_LTH, self.store.identity
        facts = Receipt(
            key=each.key,
            rank=0,
            world_size=1,
            shape=tuple(states_LTH.shape),
            dtype=str(states_LTH.dtype).removeprefix("torch."),
            ids_digest=digest_ids(example.input_ids_T.numpy()),
            digests=(),
            rms=(),
            nonfinite=(),
            zero_rows=(),
        )
        if facts.shape != identity.shape(each.num_tokens) or facts.dtype != identity.dtype:
            return facts
        ids_T = example.input_ids_T.numpy().astype(np.int32)
        rows_TL = np.stack([digest.row_digests(rows_TH).numpy() for rows_TH in states_LTH.contiguous()], axis=1)
        values_LTH = states_LTH.float()
        rms_TL = values_LTH.double().square().mean(dim=2).sqrt().T.numpy()
        bad_TL = (~torch.isfinite(values_LTH)).sum(dim=2).T.numpy()
        # Once a row is NaN or infinite, every deeper state of it is: the stream only ever adds.
        healed_TL = (bad_TL > 0) & ~np.minimum.accumulate((bad_TL > 0)[:, ::-1], axis=1)[:, ::-1]
        digests = tuple(digest.sample_digest(digests_T) for digests_T in rows_TL.T)
        return replace(
            facts,
            digests=digests,
            staged_digests=digests,
            rms=_figures(np.sqrt(np.square(rms_TL).mean(axis=0))),
            median_rms=_figures(np.median(rms_TL, axis=0)),
            nonfinite=_counts(bad_TL),
            healed_rows=_counts(healed_TL),
            zero_rows=_counts(rms_TL == 0),
            repeated_rows=tuple(digest.repeated_rows(digests_T, ids_T) for digests_T in rows_TL.T),
            carried_rows=(0, *_counts(rows_TL[:, 1:] == rows_TL[:, :-1])),
            profile=profile_of(rms_TL),
        )

    def _stage(self, each: Planned, example: Example, receipt: Receipt) -> Receipt:
        """The receipt with the objects that were staged; of misshapen states nothing is."""
        if not receipt.digests:
            return receipt
        states_LTH = example.states_LTH.contiguous()
        bits_LTH = states_LTH.view(torch.uint16) if states_LTH.dtype == torch.bfloat16 else states_LTH
        objects = stage_states(
            self.store.staging(), each.key, self.store.spec, bits_LTH.numpy(), example.input_ids_T.numpy()
        )
        return replace(receipt, objects=objects)


def _side(is_normed: bool) -> str:
    return "after" if is_normed else "before"


def _counts(rows_TL: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(n) for n in rows_TL.sum(axis=0))


def _figures(values_L: npt.NDArray[Any]) -> tuple[float, ...]:
    return tuple(float(x) for x in values_L)
