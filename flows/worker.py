"""What a flow run that a Prefect worker started owes to that worker."""

import os
import signal
from functools import cache

from tasks.processes import when_gone


@cache
def end_with_worker() -> None:
    """End this run, as if it were told to, when the worker that started it is gone.

    Nobody could cancel the run any more, and the next worker on this machine would start a second engine beside it. A
    run that a person started is left alone.
    """
    # Set by Prefect in processes that it starts for one flow run each.
    if "PREFECT__FLOW_RUN_ID" in os.environ:
        # Prefect reports the run as Crashed at this signal, and the flow's context managers shut the engine down.
        when_gone(os.getppid(), lambda: os.kill(os.getpid(), signal.SIGTERM))
