"""Judge one sample by the receipts of all ranks, before it is committed.

Each check takes what was planned and what every rank says it holds, and returns one sentence with the figures if
they do not agree. A sample is accepted when no check has anything to say; the first that has names the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.verify.config import Audit
from tasks.vocabulary import Identity, PlannedSample, Receipt, Verdict


@dataclass(frozen=True)
class Case:
    """One sample to judge."""

    identity: Identity
    planned: PlannedSample
    ids_digest: str
    """:func:`tasks.vocabulary.digest_ids` over the planned token ids."""
    world_size: int
    """Ranks that must have sent a receipt."""
    receipts: Sequence[Receipt]
    audit: Audit


def ranks(case: Case) -> str | None:
    """Every rank of the engine has sent exactly one receipt, and it is this sample's."""
    found = sorted(r.rank for r in case.receipts)
    if found != list(range(case.world_size)):
        return f"receipts came from ranks {found}, expected {list(range(case.world_size))}"
    strange = {r.key for r in case.receipts} - {case.planned.key}
    return f"receipts are of other samples: {sorted(strange)}" if strange else None


def capture(case: Case) -> str | None:
    """No rank reports a fault of its own."""
    faults = [f"rank {r.rank}: {r.error}" for r in case.receipts if r.error]
    return "; ".join(faults) or None


def shape(case: Case) -> str | None:
    """Every rank holds [L, T, H]."""
    expected = case.identity.shape(case.planned.num_tokens)
    wrong = [f"rank {r.rank} holds {list(r.shape)}" for r in case.receipts if tuple(r.shape) != expected]
    return f"{'; '.join(wrong)}, expected {list(expected)}" if wrong else None


def dtype(case: Case) -> str | None:
    """Every rank holds the configured element type."""
    wrong = [f"rank {r.rank} holds {r.dtype}" for r in case.receipts if r.dtype != case.identity.dtype]
    return f"{'; '.join(wrong)}, expected {case.identity.dtype}" if wrong else None


def token_ids(case: Case) -> str | None:
    """The rows are those of this sample's tokens, in their order."""
    wrong = [r.rank for r in case.receipts if r.ids_digest != case.ids_digest]
    return f"ranks {wrong} hold rows of other tokens than the sample's" if wrong else None


def finite(case: Case) -> str | None:
    """No element is NaN or infinite."""
    depths = case.identity.depths
    counts = {depths[d]: n for r in case.receipts for d, n in enumerate(r.nonfinite) if n}
    return f"NaN or infinite elements by depth: {counts}" if counts else None


def zero_rows(case: Case) -> str | None:
    """No row is all zero, as rows of padding and of unwritten memory are."""
    depths = case.identity.depths
    counts = {depths[d]: n for r in case.receipts for d, n in enumerate(r.zero_rows) if n > case.audit.max_zero_rows}
    return f"all-zero rows by depth: {counts}" if counts else None


def agreement(case: Case) -> str | None:
    """All ranks computed the same states, bit for bit."""
    by_digest: dict[tuple[str, ...], list[int]] = {}
    for receipt in case.receipts:
        by_digest.setdefault(tuple(receipt.digests), []).append(receipt.rank)
    if len(by_digest) == 1:
        return None
    groups = sorted(by_digest.values(), key=len)
    return f"ranks disagree on the states: {' against '.join(str(g) for g in groups)}"


def arrival(case: Case) -> str | None:
    """The states that were staged are those that the device computed."""
    staged = [r for r in case.receipts if r.objects is not None]
    if len(staged) != 1:
        return f"staged by ranks {[r.rank for r in staged]}, expected exactly one"
    receipt, depths = staged[0], case.identity.depths
    computed, arrived = receipt.digests, receipt.staged_digests or ()
    wrong = [depths[d] for d in range(len(depths)) if len(arrived) <= d or arrived[d] != computed[d]]
    return f"states changed between device and writer at depths {wrong}" if wrong else None


def distinct_depths(case: Case) -> str | None:
    """No two depths hold the same states."""
    depths, receipt = case.identity.depths, case.receipts[0]
    same = [
        (depths[a], depths[b])
        for a in range(len(depths))
        for b in range(a + 1, len(depths))
        if receipt.digests[a] == receipt.digests[b]
    ]
    return f"depths hold the same states: {same}" if same else None


CHECKS: tuple[Callable[[Case], str | None], ...] = (
    ranks,
    capture,
    shape,
    dtype,
    token_ids,
    finite,
    zero_rows,
    agreement,
    arrival,
    distinct_depths,
)


def judge(case: Case) -> Verdict:
    """Run all checks in order; the first that fails names the reason."""
    for check in CHECKS:
        detail = check(case)
        if detail is not None:
            return Verdict(case.planned.key, False, check.__name__, detail, tuple(case.receipts))
    return Verdict(case.planned.key, True, receipts=tuple(case.receipts))
