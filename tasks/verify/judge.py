"""Judge one sample by the receipts of all ranks, before it is committed.

Each check takes what was planned and what every rank says it holds, and returns one sentence with the figures if
they do not agree. A sample is accepted when no check has anything to say; the first that has names the reason.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tasks.verify.agreement import coverage, differences, odd_ranks
from tasks.verify.bands import Outside
from tasks.verify.config import Audit
from tasks.verify.diagnose import Expected, explain
from tasks.vocabulary import Identity, PlannedSample, Proof, Receipt, Verdict


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
    proof: Proof | None = None
    """What r_L says of the sampled token; None where r_L is not captured."""
    outside: Sequence[Outside] = ()
    """Depths at which the states are larger or smaller than is usual in this run."""

    def by_depth(self, counts: Sequence[int]) -> dict[int, int]:
        """Depth -> count, where it is not 0."""
        return {depth: n for depth, n in zip(self.identity.depths, counts, strict=False) if n}


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
    """Every rank holds [L, T, H], or its share of the rows."""
    expected = case.identity.shape(case.planned.num_tokens)
    wrong = [r for r in case.receipts if r.rows is None and tuple(r.shape) != expected]
    if not wrong:
        return None
    held = "; ".join(f"rank {r.rank} holds {list(r.shape)}" for r in wrong)
    likely = explain(
        [tuple(wrong[0].shape)],
        Expected(
            num_depths=len(case.identity.depths),
            hidden_size=case.identity.hidden_size,
            lengths=(case.planned.num_tokens,),
            tensor_parallel_size=case.world_size,
            num_layers=case.identity.num_layers,
        ),
    )
    return f"{held}, expected {list(expected)}: {likely}"


def dtype(case: Case) -> str | None:
    """Every rank holds the configured element type."""
    wrong = [f"rank {r.rank} holds {r.dtype}" for r in case.receipts if r.dtype != case.identity.dtype]
    return f"{'; '.join(wrong)}, expected {case.identity.dtype}" if wrong else None


def token_ids(case: Case) -> str | None:
    """The rows are those of this sample's tokens, in their order."""
    wrong = [r.rank for r in case.receipts if r.ids_digest != case.ids_digest]
    return f"ranks {wrong} hold rows of other tokens than the sample's" if wrong else None


def rows(case: Case) -> str | None:
    """Where ranks share the rows, every row is on exactly one of them."""
    shares = [share for r in case.receipts if r.rows is not None for share in r.rows]
    if not shares:
        return None
    if any(r.rows is None for r in case.receipts):
        return "some ranks hold all rows and others a share"
    problem = coverage(shares, case.planned.num_tokens)
    return f"the ranks' rows do not cover the sample once: {problem}" if problem else None


def finite(case: Case) -> str | None:
    """No element became NaN or infinite in the capture."""
    if not any(n for r in case.receipts for n in r.nonfinite):
        return None
    depths = case.by_depth([max(ns) for ns in zip(*(r.nonfinite for r in case.receipts), strict=False)])
    signs = []
    if any(any(r.unlike_rows or ()) for r in case.receipts):
        signs.append("the decoder layers were given other values")
    if any(any(r.healed_rows) for r in case.receipts):
        signs.append("deeper states of the same rows are finite")
    if len({tuple(r.nonfinite) for r in case.receipts}) > 1:
        signs.append("the ranks differ")
    return f"a capture fault left NaN or infinite elements, by depth: {depths}; {', '.join(signs)}" if signs else None


def model_finite(case: Case) -> str | None:
    """The model itself computed no NaN or infinity."""
    counts = case.by_depth(case.receipts[0].nonfinite)
    if not counts:
        return None
    return (
        f"the model itself computed NaN or infinite elements, by depth: {counts}; all ranks hold the same and every "
        "deeper state of the rows has them too. Look at the engine's kernels and dtype, not at the capture"
    )


def zero_rows(case: Case) -> str | None:
    """No row is all zero, as rows of padding and of unwritten memory are."""
    depths = case.identity.depths
    counts = {depths[d]: n for r in case.receipts for d, n in enumerate(r.zero_rows) if n > case.audit.max_zero_rows}
    return f"all-zero rows by depth: {counts}" if counts else None


def repeated_rows(case: Case) -> str | None:
    """No row is that of another token."""
    counts = case.by_depth(case.receipts[0].repeated_rows)
    return f"rows that repeat another token's, by depth: {counts}" if counts else None


def agreement(case: Case) -> str | None:
    """All ranks computed the same states, bit for bit."""
    if any(r.rows is not None for r in case.receipts) or len({tuple(r.digests) for r in case.receipts}) == 1:
        return None
    odd = odd_ranks(case.receipts)
    who = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} against the others" if odd else "no majority"
    measured = "; ".join(str(d) for d in differences(case.receipts, case.identity.depths))
    return f"ranks disagree on the states ({who})" + (f": {measured}" if measured else "")


def written(case: Case) -> str | None:
    """Every row was written in host memory: none still holds the poison that marks it until then."""
    for receipt in case.receipts:
        if counts := case.by_depth(receipt.unwritten_rows or ()):
            return f"rows that were never written in host memory, by depth: {counts}"
    return None


def arrival(case: Case) -> str | None:
    """The states that were staged are those that the device computed."""
    staged = [r for r in case.receipts if r.objects is not None]
    if any(r.rows is not None for r in case.receipts):
        return None if len(staged) == case.world_size else f"staged by {len(staged)} of {case.world_size} ranks"
    if len(staged) != 1:
        return f"staged by ranks {[r.rank for r in staged]}, expected exactly one"
    receipt, depths = staged[0], case.identity.depths
    computed, arrived = receipt.digests, receipt.staged_digests or ()
    wrong = [depths[d] for d in range(len(depths)) if len(arrived) <= d or arrived[d] != computed[d]]
    if not wrong:
        return None
    counts = case.by_depth(receipt.changed_rows or ())
    return f"states changed between device and writer at depths {wrong}, rows by depth: {counts}"


def distinct_depths(case: Case) -> str | None:
    """No two depths hold the same states, and no row is the same at two depths that follow each other."""
    depths, receipt = case.identity.depths, case.receipts[0]
    same = [
        (depths[a], depths[b])
        for a in range(len(depths))
        for b in range(a + 1, len(depths))
        if receipt.digests[a] == receipt.digests[b]
    ]
    if same:
        return f"depths hold the same states: {same}"
    counts = case.by_depth(receipt.carried_rows)
    return f"rows equal to those at the depth captured before, by depth: {counts}" if counts else None


def witness(case: Case) -> str | None:
    """What was captured at each depth is what the decoder layer there was itself given."""
    found = []
    for receipt in case.receipts:
        if counts := case.by_depth(receipt.unlike_rows or ()):
            found.append(f"rank {receipt.rank}: {counts}")
    if not found:
        return None
    return (
        f"rows differ from what the decoder layers were given, by depth ({'; '.join(found)} of "
        f"{case.planned.num_tokens}): another layer, another request's or step's rows, a residual that was not added, "
        "or a norm that was applied"
    )


def next_token(case: Case) -> str | None:
    """r_L at the last token gives the token that the engine sampled."""
    if case.proof is None or case.proof.outcome != "failed":
        return None
    p = case.proof
    return (
        f"r_{case.identity.num_layers} at the last token gives token {p.computed}, but the engine sampled {p.sampled}, "
        f"whose logit is {p.gap:.3g} lower (near ties end at {p.margin:.3g})"
    )


def usual_size(case: Case) -> str | None:
    """The states are about as large as those of the run's other samples."""
    return "; ".join(str(o) for o in case.outside) or None


CHECKS: tuple[Callable[[Case], str | None], ...] = (
    ranks,
    capture,
    shape,
    dtype,
    rows,
    token_ids,
    finite,
    model_finite,
    zero_rows,
    repeated_rows,
    agreement,
    written,
    arrival,
    distinct_depths,
    witness,
    next_token,
    usual_size,
)
"""In the order in which they are asked: a fault that several would find is named by the first."""


def judge(case: Case) -> Verdict:
    """Run all checks in order; the first that fails names the reason."""
    receipts = tuple(case.receipts)
    for check in CHECKS:
        detail = check(case)
        if detail is not None:
            return Verdict(case.planned.key, False, check.__name__, detail, receipts, case.proof)
    return Verdict(case.planned.key, True, receipts=receipts, proof=case.proof)
