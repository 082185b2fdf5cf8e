"""The engine and the capture worker: states are staged as files, and small receipts come back.

The way of a row, from the device to a receipt, by module:

* ``engine`` asks vLLM for samples; ``capture`` is what its workers are given in addition.
* ``step`` reads what one engine step computed, and ``witness`` looks at it a second time.
* ``transfer`` brings the rows to host memory, on a GPU into memory shared with ``assembly_process``.
* ``assembly`` holds what follows: ``assemble`` makes samples of rows, with those that ``prefix_rows`` holds for them,
  and ``writer`` stages samples.
* ``receipts`` go straight to the flow's process.

Before all that, ``checks``, ``preflight`` and ``devices`` say whether an engine can start here.
"""
