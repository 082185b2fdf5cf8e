"""Apply ``infra/automations.yaml`` to the server at ``PREFECT_API_URL``: create what is new, update the rest.

.. code-block:: bash

    .venv/bin/python -m infra.automations
"""

from pathlib import Path

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore

FILE = Path(__file__).with_suffix(".yaml")


def load(file: Path = FILE) -> list[AutomationCore]:
    """The automations of a file."""
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [AutomationCore.model_validate(values) for values in document["automations"]]


def apply(automations: list[AutomationCore]) -> None:
    """Bring the server's automations of these names to what is given."""
    with get_client(sync_client=True) as client:
        for automation in automations:
            present = client.read_automations_by_name(automation.name)
            for each in present:
                client.update_automation(each.id, automation)
            if not present:
                client.create_automation(automation)


if __name__ == "__main__":
    apply(load())
