"""The hand-off: a store written in the files of another project's trainer, and such files taken into a store.

* :mod:`tasks.handoff.formats` knows the formats by name; each has a module of its own.
* :mod:`tasks.handoff.export` plans, writes, checks and resumes an export.
* :mod:`tasks.handoff.intake` audits existing files and commits the good ones to a store.

A trainer that reads a store through :class:`tasks.store.eagle.EagleDataset` needs none of it.
"""
