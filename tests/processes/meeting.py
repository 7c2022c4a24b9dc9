"""In a case, the processes can wait for each other, and share a text."""

import collections

from feedline._src.agreement.coordination import coordination

PATIENCE_S = 120
_met = collections.Counter()


def meet(name):
    """Wait until every process has called this as often with this name. Returns at once in a single process."""
    service = coordination()
    if service is None:
        return
    _met[name] += 1
    key = f"meeting/{name}/{_met[name]}"
    service.set(f"{key}/{service.process}", "")
    for process in range(service.processes):
        service.get(f"{key}/{process}", PATIENCE_S)


def shared(name, value):
    """The same text in all processes: that of the process that calls first with this name."""
    service = coordination()
    if service is None:
        return value
    service.set(f"shared/{name}", value)
    return service.get(f"shared/{name}", PATIENCE_S)
