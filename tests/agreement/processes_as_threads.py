"""A coordination service for processes that are threads here."""

import threading


class Service:
    """What a coordination service is to a few processes, which are threads here."""

    def __init__(self, processes):
        self.processes = processes
        self._values = {}
        self._changed = threading.Condition()

    def of(self, process):
        member = type("Member", (Service,), {"process": process})(self.processes)
        member._values, member._changed = self._values, self._changed
        return member

    def set(self, key, value):
        with self._changed:
            first = key not in self._values
            self._values.setdefault(key, value)
            self._changed.notify_all()
            return first

    def get(self, key, timeout_s):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, min(timeout_s, 60)):
                raise TimeoutError
            return self._values[key]

    def increment(self, key, by=1):
        with self._changed:
            self._values[key] = self._values.get(key, 0) + by
            return self._values[key]

    def dir(self, prefix):
        with self._changed:
            return {key: value for key, value in self._values.items() if key.startswith(prefix.rstrip("/") + "/")}

    def delete(self, key):
        with self._changed:
            for gone in [one for one in self._values if f"{one}/".startswith(key.rstrip("/") + "/")]:
                del self._values[gone]
