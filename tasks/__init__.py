"""The rooms a sample walks through, in order: tokenize, plan, extract, verify, store, report.

Beside the way stand two more: ``fleet`` has many nodes walk it at once, and ``handoff`` gives what is stored to other
projects' trainers, and takes in what they have.

What the rooms hand to each other is defined beside them: :mod:`tasks.vocabulary` (identity, chunk, receipt, verdict),
:mod:`tasks.samples` (the table of tokenized samples), :mod:`tasks.layers` (depths), :mod:`tasks.model` (what a
checkpoint's files say of it), :mod:`tasks.digest` (what two holders of the same states agree on) and
:mod:`tasks.prefixes` (names of what samples begin with).
"""
