"""The rooms a sample walks through, in order: tokenize, plan, extract, verify, store, report.

What the rooms hand to each other is defined beside them: :mod:`tasks.vocabulary` (identity, chunk,
receipt, verdict), :mod:`tasks.samples` (the table of tokenized samples), :mod:`tasks.layers` (depths)
and :mod:`tasks.model` (what a checkpoint's files say of it).
"""
