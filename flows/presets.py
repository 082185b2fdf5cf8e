"""A step of ``prefect deploy``: the values of a preset, as parameters of a deployment."""

from typing import Any

from flows.config import Extraction


def load(name: str) -> dict[str, dict[str, Any]]:
    """Read and check a preset.

    Args:
        name: of the preset, or the path of a YAML file.

    Returns:
        ``{"extraction": values}``, with defaults filled in, so that the form in the UI shows them.

    Raises:
        ConfigError: no such preset, or values that are refused.
    """
    return {"extraction": Extraction.load(name).model_dump(mode="json")}
