"""The project's logger: on a terminal by the command line, in the Prefect UI by ``PREFECT_LOGGING_EXTRA_LOGGERS``."""

import logging

logger = logging.getLogger("layertap")
logger.setLevel(logging.INFO)  # Prefect gives the loggers it is told of its handlers, but no level
