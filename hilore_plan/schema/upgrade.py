"""Steps from one schema version to the next: pure functions on plain JSON data.

`UPGRADES["hilore.plan"][1]` would turn the data of a `hilore.plan/1` into that of a `hilore.plan/2`. A step sets the
new `schema` itself. There is one version of each document so far, so the table is empty; docs/files.md
has the procedure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Data = dict[str, Any]
Step = Callable[[Data], Data]

UPGRADES: Mapping[str, Mapping[int, Step]] = {"hilore.profile": {}, "hilore.plan": {}, "hilore.bench": {}}


def upgraded(
    data: Data, kind: str, version: int, current: int, steps: Mapping[str, Mapping[int, Step]] = UPGRADES
) -> Data:
    """The data of a `kind`/`version` document as that of a `kind`/`current` one.

    Raises:
        KeyError: if a step is missing, which would be a fault of ours.
    """
    for step in range(version, current):
        data = steps[kind][step](data)
    return data
