"""The audit of a store as a table, as text for a terminal, and as one HTML file that opens offline."""

import html
from collections.abc import Sequence

from rich.table import Table

from tasks.report.picture import Profiles, data_uri, draw
from tasks.report.shape_audit import Row, reused
from tasks.verify.audit import Audited, AuditReport

MOST_ROWS = 500
LISTED = 50  # problems that a terminal shows

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 100rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; width: 100% }
th, td { border: 1px solid #ddd; padding: .3rem .5rem; text-align: left; vertical-align: top }
th { background: #f3f3f3; position: sticky; top: 0 }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
tr.bad td { background: #fdecea }
img { max-width: 100% }
.passed { color: #1b6e2b } .failed { color: #a4201a }
"""


def profiles_of(report: AuditReport) -> Profiles:
    """What the picture of the store shows."""
    profiles = Profiles(report.identity.depths)
    for sample in report.samples:
        if sample.profile is not None and sample.finite:
            profiles.add_profile(sample.profile)
    return profiles


def picture(report: AuditReport) -> str | None:
    """The picture as a data address; None where there is nothing to draw."""
    profiles = profiles_of(report)
    return data_uri(draw(profiles, report.store.rstrip("/").rsplit("/", 1)[-1])) if profiles.kept else None


def rows(report: AuditReport, limit: int = MOST_ROWS) -> list[Row]:
    """Rows for a table: a line with totals, then the samples, worst first."""
    ordered = sorted(report.samples, key=lambda s: (not s.problems, _proved(s), -s.num_tokens, s.key))
    return [_total(report, min(limit, len(ordered))), *(_row(sample, report) for sample in ordered[:limit])]


def _proved(sample: Audited) -> bool:
    return sample.proof is not None and sample.proof.outcome == "proved"


def _row(sample: Audited, report: AuditReport) -> Row:
    row = {
        "sample": sample.key[:12],
        "source": ", ".join(sample.sources),
        "expected": str(list(report.identity.shape(sample.num_tokens))),
        "shape": str(list(sample.shape)) if sample.shape else "-",
        "dtype": sample.dtype or "-",
        "RMS": " · ".join(f"r_{k} {x:.3g}" for k, x in zip(report.identity.depths, sample.rms, strict=False)) or "-",
        "finite": "-" if sample.finite is None else "yes" if sample.finite else "no",
        "TP agreement": "-" if sample.ranks is None else f"{sample.ranks}/{sample.ranks} equal",
        "reused": reused(sample.reused),
        "proof": "-" if sample.proof is None else sample.proof.outcome,
        "next tokens": f"{sample.hits.get(0, 0)}/{sample.predicted}" if sample.predicted else "-",
    }
    if report.reference:
        worst = max(sample.parity, key=lambda p: p.worst_error, default=None)
        row[f"error against {report.reference}"] = "-" if worst is None else f"{worst.worst_error:.2g}"
    row["verdict"] = "; ".join(str(p) for p in sample.problems) or "good"
    return row


def _total(report: AuditReport, shown: int) -> Row:
    row = dict.fromkeys(_row(Audited("", (), 0), report), "")
    tokens = sum(sample.num_tokens for sample in report.samples)
    return row | {
        "sample": f"total {len(report.samples)}",
        "source": f"{shown} shown",
        "expected": f"{tokens:,} tokens",
        "reused": f"{sum(rows for s in report.samples for rows in s.reused.values()):,} rows",
        "proof": f"{report.proofs('proved')} proved, {report.proofs('near tie')} near ties",
        "next tokens": _percent(report.accuracy()),
        "verdict": f"{len(report.samples) - len(report.failed)} good, {len(report.failed)} bad",
    }


def lines(report: AuditReport) -> list[tuple[str, str]]:
    """What there is to say of the store as a whole, as names and values."""
    proofs = ", ".join(f"{report.proofs(o)} {o}" for o in ("proved", "near tie", "failed"))
    identity = report.identity
    states = ", ".join(f"r_{depth}" for depth in identity.depths) + f" of {identity.num_layers} layers"
    found = [
        ("store", report.store),
        ("model", f"{identity.architecture}, {identity.model}"),
        ("states", f"{states}, hidden size {identity.hidden_size}, {identity.dtype}"),
        ("samples", f"{len(report.samples)}, {sum(s.num_tokens for s in report.samples):,} tokens"),
        ("problems", f"{len(report.failed)} samples"),
        *(("problem of the store", problem) for problem in report.store_problems),
        ("sampled tokens", report.proof_note or proofs),
    ]
    if report.rows_predicted:
        shifted = ", ".join(f"{s:+d}: {_percent(report.accuracy(s))}" for s in (-1, 1))
        found.append(
            (
                "next-token accuracy",
                f"{_percent(report.accuracy())} of {report.rows_predicted:,} rows (rows shifted by {shifted})",
            )
        )
    if report.reference and report.tolerance is not None:
        compared = sum(bool(s.parity) for s in report.samples)
        limit = f"median row {report.tolerance.median:g}, worst row {report.tolerance.worst:g}"
        found.append((f"reference {report.reference}", f"{compared} samples, relative error of a row up to {limit}"))
        found += [("", str(worst)) for depth in identity.depths if (worst := report.worst(depth)) is not None]
    found.append(("quarantined", f"{len(report.quarantined)} samples"))
    return found


def terminal(report: AuditReport) -> Table:
    """The audit for a terminal."""
    table = Table(title=f"Audit: {'passed' if report.passed else 'failed'}", title_justify="left", show_header=False)
    for name, value in lines(report):
        table.add_row(name, value)
    for sample in report.failed[:LISTED]:
        table.add_row(sample.key[:12], "\n".join(str(problem) for problem in sample.problems))
    if len(report.failed) > LISTED:
        table.add_row("", f"and {len(report.failed) - LISTED} more; see the HTML report")
    return table


def page(report: AuditReport) -> str:
    """One HTML document with everything in it; nothing is fetched."""
    verdict = "passed" if report.passed else "failed"
    image = picture(report)
    body = [
        f"<h1>Audit of {_text(report.store)}: <span class={verdict}>{verdict}</span></h1>",
        _table([{"": name, " ": value} for name, value in lines(report)], header=False),
    ]
    if image is not None:
        body += ["<h2>Row RMS over token position</h2>", f'<img alt="row RMS over token position" src="{image}">']
    body += ["<h2>Samples, worst first</h2>", _table(rows(report))]
    if report.quarantined:
        kept = [
            {"sample": q["key"][:12], "sources": ", ".join(q["sources"]), "reason": q["reason"], "detail": q["detail"]}
            for q in report.quarantined[:MOST_ROWS]
        ]
        body += ["<h2>Quarantined: not in the store</h2>", _table(kept)]
    head = f'<meta charset="utf-8"><title>Audit of {_text(report.store)}</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _table(entries: Sequence[Row], *, header: bool = True) -> str:
    head = "<tr>" + "".join(f"<th>{_text(name)}</th>" for name in entries[0]) + "</tr>" if header and entries else ""
    return f"<table>{head}{''.join(_line(entry) for entry in entries)}</table>"


def _line(entry: Row) -> str:
    bad = ' class="bad"' if entry.get("verdict", "good") != "good" and not entry["sample"].startswith("total") else ""
    return f"<tr{bad}>" + "".join(f"<td>{_text(value)}</td>" for value in entry.values()) + "</tr>"


def _text(value: str) -> str:
    return html.escape(str(value))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}%"
