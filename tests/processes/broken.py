"""Cases that fail, for the tests of the launch itself."""

import threading

import jax

from .cases import case
from .values import PerProcess


@case()
def fails_on_one(here):
    if jax.process_index() == 1:
        raise ArithmeticError("as it was told to")


@case()
def disagrees(here):
    return {"process": jax.process_index()}


@case()
def works(here):
    local = [device in jax.local_devices() for device in here.devices]
    return {"processes": jax.process_count(), "local": PerProcess(local)}


@case()
def hangs_on_one(here):
    if jax.process_index() == 1:
        threading.Event().wait()


@case()
def comes_after(here):
    return 5
