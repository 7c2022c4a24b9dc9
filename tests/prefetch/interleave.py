"""Threads that take turns, one queue operation at a time, in an order that the test decides."""

import itertools
import queue
import threading
from collections import deque


class Deadlock(AssertionError):
    """Somebody waits, and nobody is left who could wake them."""


class _Abandoned(BaseException):
    """Ends the threads of a run that failed."""


class Turns:
    """Runs functions on threads of their own; exactly one goes on at a time, until its next `step`.

    Args:
      choose: maps the list of names of threads that can go on to one of them.
    """

    def __init__(self, choose):
        self._choose = choose
        self._parked = queue.SimpleQueue()  # an entry for each thread that parked or ended
        self._mine = threading.local()
        self._can_go_on = {}  # {name of a thread that has not ended: function that tells whether it can go on}
        self._go = {}
        self._results = {}
        self._abandoned = False

    def run(self, **functions):
        """{name: what the function returned}. Raises what a function raises, or `Deadlock` if none can go on."""
        for name, function in functions.items():
            self._can_go_on[name], self._go[name] = (lambda: True), queue.SimpleQueue()
            threading.Thread(target=self._act, args=(name, function), daemon=True).start()
        for _ in functions:
            self._parked.get()
        try:
            while self._can_go_on:
                able = [name for name, can in self._can_go_on.items() if can()]
                if not able:
                    raise Deadlock(f"{sorted(self._can_go_on)} wait for ever")
                self._go[self._choose(able)].put(None)
                self._parked.get()
                for result in self._results.values():
                    if isinstance(result, BaseException):
                        raise result
        finally:
            self._abandoned = True
            for name in self._can_go_on:
                self._go[name].put(None)
        return self._results

    def step(self, can_go_on=lambda: True):
        """Called by a thread before each operation: wait for its turn, which comes only if it `can_go_on`."""
        name = getattr(self._mine, "name", None)
        if name is not None:  # a thread of `run`: others take no turns
            self._can_go_on[name] = can_go_on
            self._park(name)

    def _act(self, name, function):
        self._mine.name = name
        try:
            self._park(name)
            result = function()
        except _Abandoned:
            return
        except BaseException as error:  # noqa: BLE001  raised by `run`
            result = error
        self._results[name] = result
        del self._can_go_on[name]
        self._parked.put(None)

    def _park(self, name):
        self._parked.put(None)
        self._go[name].get()
        if self._abandoned:
            raise _Abandoned


class Queue:
    """Like `queue.SimpleQueue`, but each `put` or `get` is a turn."""

    def __init__(self, turns):
        self._turns = turns
        self.items = deque()

    def put(self, item):
        self._turns.step()
        self.items.append(item)

    def get(self, timeout=None):
        self._turns.step(lambda: bool(self.items))
        return self.items.popleft()

    def get_nowait(self):
        self._turns.step()
        if not self.items:
            raise queue.Empty
        return self.items.popleft()

    def qsize(self):
        return len(self.items)


def all_orders(check):
    """Call `check(choose)` once for every order in which turns can be taken; return the number of orders."""
    choices = []  # for each turn: (which of the threads that could go on was chosen, how many could)
    for count in itertools.count(1):
        turn = itertools.count()

        def choose(able, turn=turn):
            at = next(turn)
            if at == len(choices):
                choices.append((0, len(able)))
            return able[choices[at][0]]

        check(choose)
        while choices and choices[-1][0] + 1 == choices[-1][1]:
            choices.pop()
        if not choices:
            return count
        choices[-1] = (choices[-1][0] + 1, choices[-1][1])
    raise AssertionError("unreachable")
