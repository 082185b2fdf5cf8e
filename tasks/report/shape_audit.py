"""The audit table of a chunk: what was expected of each sample, what came, and what became of it."""

from collections.abc import Mapping, Sequence

from tasks.vocabulary import Identity, PlannedSample, Receipt, Verdict

Row = dict[str, str]


def audit_rows(
    samples: Sequence[PlannedSample],
    verdicts: Sequence[Verdict],
    sources: Mapping[str, str],
    identity: Identity,
    limit: int,
    *,
    retried: bool = False,
) -> list[Row]:
    """Rows for a table: a line with totals, then refused samples, near ties, and the others, the longest first.

    Args:
        samples: what was planned.
        verdicts: one for each, in any order.
        sources: key -> source id.
        identity: of the store.
        limit: most rows without the line with totals.
        retried: whether this was the second attempt.
    """
    planned = {sample.key: sample for sample in samples}
    ordered = sorted(verdicts, key=lambda v: (v.accepted, _certainty(v), -planned[v.key].num_tokens, v.key))
    rows = [_row(v, planned[v.key], sources[v.key], identity, retried) for v in ordered[:limit]]
    return [_total(samples, verdicts, len(rows)), *rows]


def _certainty(verdict: Verdict) -> int:
    return 1 if verdict.proof is not None and verdict.proof.outcome == "proved" else 0


def _row(verdict: Verdict, sample: PlannedSample, source: str, identity: Identity, retried: bool) -> Row:
    receipts = verdict.receipts
    staged = next((r for r in receipts if r.objects is not None), receipts[0] if receipts else None)
    refused = "quarantined" if retried else "quarantined, retried alone"
    return {
        "sample": verdict.key[:12],
        "source": source,
        "expected": str(list(identity.shape(sample.num_tokens))),
        "shape": "-" if staged is None else str(list(staged.shape)),
        "dtype": "-" if staged is None else staged.dtype,
        "RMS": "-" if staged is None else _by_depth(identity.depths, staged.rms),
        "finite": "-" if not receipts else "no" if any(any(r.nonfinite) for r in receipts) else "yes",
        "TP agreement": _agreement(receipts),
        "reused": "-" if staged is None else reused(staged.reused_from),
        "proof": "-" if verdict.proof is None else verdict.proof.outcome,
        "action": "committed" if verdict.accepted else f"{refused}: {verdict.reason}: {verdict.detail}",
    }


def _total(samples: Sequence[PlannedSample], verdicts: Sequence[Verdict], shown: int) -> Row:
    accepted = sum(v.accepted for v in verdicts)
    proved = sum(v.proof is not None and v.proof.outcome == "proved" for v in verdicts)
    near = sum(v.proof is not None and v.proof.outcome == "near tie" for v in verdicts)
    tokens = sum(sample.num_tokens for sample in samples)
    return {
        "sample": f"total {len(verdicts)}",
        "source": f"{shown} shown",
        "expected": f"{tokens:,} tokens",
        "shape": "",
        "dtype": "",
        "RMS": "",
        "finite": "",
        "TP agreement": "",
        "reused": f"{sum(rows for v in verdicts for r in v.receipts[:1] for rows in r.reused_from.values()):,} rows",
        "proof": f"{proved} proved, {near} near ties",
        "action": f"{accepted} committed, {len(verdicts) - accepted} quarantined",
    }


def reused(rows_from: Mapping[str, int]) -> str:
    """Rows that were computed for other samples, and for which."""
    return ", ".join(f"{rows} rows of {key[:12]}" for key, rows in rows_from.items()) or "none"


def _by_depth(depths: Sequence[int], values: Sequence[float]) -> str:
    return " · ".join(f"r_{depth} {value:.3g}" for depth, value in zip(depths, values, strict=False))


def _agreement(receipts: Sequence[Receipt]) -> str:
    if not receipts:
        return "-"
    digests = {r.digests for r in receipts if r.rows is None}
    return f"{len(receipts)}/{receipts[0].world_size} equal" if len(digests) <= 1 else "no"
