"""Which faults may pass, so that the same again is worth a try, and how often and when it is tried."""

from typing import Any

from tasks.vocabulary import StagingFailure


class PassingFault(RuntimeError):
    """Something outside the data failed, such as a process; the same again may succeed."""


def may_pass(_task: Any, _run: Any, state: Any) -> bool:
    """Prefect's condition for a retry: the storage or the engine failed. A wrong shape or value stays what it is."""
    fault = state.data
    if isinstance(fault, StagingFailure):
        return not fault.lasting
    return isinstance(fault, PassingFault | OSError)


#: Options of tasks whose faults may pass; the waits are drawn out by up to a half, so that chunks do not come back at
#: the same moment.
RETRIES: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [2, 15, 60],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": may_pass,
}
