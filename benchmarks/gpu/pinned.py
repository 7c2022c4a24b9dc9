"""Host memory that a GPU reads directly: registered once with CUDA, and given to JAX by DLPack without a copy.

A slab is page-aligned memory, registered by `cudaHostRegister` while it lives. Each shard of a batch is a view of
it, which `jax.dlpack.from_dlpack` takes as an array of the memory kind "pinned_host" (since jax 0.10.2). The
arrays of the shards make one global array, and `jax.device_put` sends that to the devices. A view keeps its slab
until JAX calls its deleter, which is when no array and no transfer needs the memory.

On a CPU the same path runs with memory that nobody registers, to check everything but the speed.
"""

import contextlib
import ctypes
import functools
import glob
import mmap
import os
import site

import jax
import numpy as np
from shared.rounds import alternate, compared

from gpu.transfer import _rate, _spec

_CPU, _CUDA_HOST = 1, 3  # kinds of devices in DLPack
_UNSIGNED = 1  # its code of unsigned integers
_SLABS = 6  # as many as transfers that a case has in progress, and as it makes beforehand


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor: a tensor, and what its consumer calls when it needs the memory no more."""


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

in_use = {}
"""By address of its DLManagedTensor: what a view keeps alive as long as JAX may read it."""


@_Deleter
def _delete(managed):
    in_use.pop(ctypes.addressof(managed.contents), None)  # in any thread; ctypes takes the interpreter's lock


class Slab:
    """Page-aligned host memory, registered with CUDA if `device` is a GPU. Let go of it when nothing uses it."""

    def __init__(self, size, device):
        self._mapped = mmap.mmap(-1, size)
        self.memory = np.frombuffer(self._mapped, np.uint8)
        self.memory[...] = 1  # allocates its pages
        self._cuda = None
        if device.platform == "gpu":
            self._cuda = _cuda_runtime()
            _check(self._cuda.cudaHostRegister(ctypes.c_void_p(self.address), ctypes.c_size_t(size), 0))

    @property
    def address(self):
        return self.memory.ctypes.data

    def __del__(self):
        if self._cuda is not None:
            self._cuda.cudaHostUnregister(ctypes.c_void_p(self.address))


class View:
    """uint8 [shape] in a slab, from `offset` on, as DLPack's protocol gives it to JAX for one device."""

    def __init__(self, slab, offset, shape, device):
        self._slab, self._offset, self._shape = slab, offset, shape
        self._device = (_CUDA_HOST if device.platform == "gpu" else _CPU, device.local_hardware_id or 0)

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, **_):
        shape = (ctypes.c_int64 * len(self._shape))(*self._shape)
        address = self._slab.address + self._offset
        tensor = _Tensor(address, *self._device, len(shape), _DataType(_UNSIGNED, 8, 1), shape, None, 0)
        managed = _Managed(tensor, None, _delete)
        in_use[ctypes.addressof(managed)] = (managed, shape, self._slab)
        return _new_capsule(ctypes.addressof(managed), b"dltensor", None)


def global_array(slab, leaf):
    """The batch in a slab as a global array in host memory: one view a shard, no copy."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    size = shard[0] * shard[1]
    devices = leaf.sharding.mesh.devices.flat
    arrays = [jax.dlpack.from_dlpack(View(slab, i * size, shard, device)) for i, device in enumerate(devices)]
    kind = "pinned_host" if devices[0].platform == "gpu" else devices[0].default_memory().kind
    sharding = leaf.sharding.with_memory_kind(kind)
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def pinned_cases(scale):
    """Registered slabs by DLPack, beside copies from JAX's own pinned memory, the limit."""
    return {f"{mb:g} MB": functools.partial(_measured, mb, scale) for mb in scale.sizes_mb}


def _measured(mb, scale):
    (leaf,) = _spec(mb, 1, len(jax.devices()))
    size = leaf.shape[0] * leaf.shape[1]
    try:
        slabs = [Slab(size, jax.devices()[0]) for _ in range(_SLABS)]
        jax.block_until_ready(global_array(slabs[0], leaf))
    except (OSError, TypeError, AttributeError, jax.errors.JaxRuntimeError) as error:
        return {"mb": mb, "unavailable": f"{type(error).__name__}: {error}"}
    turn = iter(range(1 << 62))
    limit = jax.device_put(np.full(leaf.shape, 1, np.uint8), leaf.sharding.with_memory_kind("pinned_host"))
    entrants = {
        "dlpack": functools.partial(
            _rate,
            lambda: slabs[next(turn) % _SLABS],
            lambda slab: jax.device_put(global_array(slab, leaf), leaf.sharding),
            size,
        ),
        "pinned": functools.partial(_rate, lambda: limit, lambda x: jax.device_put(x, leaf.sharding), size),
    }
    alternate(entrants, 1, 0)
    rates = compared(alternate(entrants, scale.rounds, scale.seconds), "pinned")
    return {"mb": size / 1e6, "leaves": 1, "devices": leaf.sharding.num_devices, "bytes_per_s": rates}


@functools.cache
def _cuda_runtime():
    """CUDA's runtime library: that of the wheels which jax uses, or the system's."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    wheels = (os.path.join(folder, "nvidia", "*", "lib", "libcudart.so*") for folder in folders)
    found = [path for pattern in wheels for path in glob.glob(pattern)]
    for name in [*sorted(found), "libcudart.so", "libcudart.so.13", "libcudart.so.12"]:
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise OSError("there is no libcudart.so, which registers host memory; install jax[cuda]")


def _check(code):
    if code:
        raise OSError(f"cudaHostRegister failed with CUDA's error {code}")
