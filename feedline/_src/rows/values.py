"""Converts users' values and records to NumPy arrays, and refuses any value that would be lost silently."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.rows.spec import Leaf, RowSpec

Array = npt.NDArray[Any]


# --- values ---


def as_array(name: str, value: Any) -> Array:
    """Convert a value to an array.

    Raises:
      ValueError: it is a masked array with masked values (`np.asarray` would drop the mask), or a column of a
        table with missing values (`np.asarray` would turn them into NaN, and integers beside them into floats).
      TypeError: NumPy cannot make an array of it.

    Example:
      >>> as_array("x", np.ma.masked_array([1, 2], mask=[False, False])).tolist()
      [1, 2]
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        count = np.count_nonzero(np.ma.getmaskarray(value))
        raise ValueError(
            f"{name}: a batch has no mask, and {count} of these {value.size} values are masked; choose values "
            "for them, array.filled(0) for example, and pass the mask as a leaf of its own if the model needs it"
        )
    if not isinstance(value, np.ndarray) and (missing := _missing_in(value)):
        raise ValueError(
            f"{name}: every row must have a value, and {missing} of this {type(value).__name__} "
            f"{'is' if missing == 1 else 'are'} missing; fill them with column.fillna(0) in pandas or "
            "fill_null(0) in Arrow and Polars, and pass column.isna() or is_null() as another leaf if the model "
            "needs it"
        )
    try:
        return np.asarray(value)
    except Exception as error:  # of any type: for example, a tensor may be on a GPU or require a gradient
        raise TypeError(
            f"{name}: numpy.asarray failed on this {type(value).__name__} with {type(error).__name__}: {error}; "
            "make it a NumPy array before feedline gets it"
        ) from error


def as_record_leaf(name: str, value: Any) -> Any:
    """Convert a record's leaf to an array if it is a number, a list of numbers, or an object that NumPy converts.

    Any other value is returned unchanged. If it has no dtype, like text, `RowSpec.of` refuses it later.

    Raises:
      ValueError: a value is masked, or a list is ragged or has elements that are not numbers.
      TypeError: NumPy cannot make an array of it.

    Example:
      >>> as_record_leaf("ids", [[1, 2], [3, 4]]).shape
      (2, 2)
    """
    if is_list(value):
        return _of_list(name, value)
    converts = hasattr(value, "__array__") or hasattr(value, "__array_interface__")  # the latter: Pillow images
    if isinstance(value, int | float | complex) or (converts and not isinstance(value, np.generic)):
        return as_array(name, value)
    return value


def is_list(value: Any) -> bool:
    """Whether a value is a list. For JAX, each element of a list is a leaf; in a record, a list is one array."""
    return isinstance(value, list)


def is_in_memory(value: Any) -> bool:
    """Whether a value is an array or a column of a table, and can be converted to NumPy without reading a file.

    A method `__array__` alone is not enough: for arrays of HDF5, Zarr and netCDF, it reads the whole array.
    """
    return isinstance(value, np.ndarray) or hasattr(value, "__dlpack__") or hasattr(value, "to_numpy")


def is_batched(value: Any) -> bool:
    """Whether a value is a Grain dataset whose last or second to last transformation is `batch()`."""
    if not type(value).__module__.startswith("grain."):
        return False
    return any(type(step).__name__.startswith("Batch") for step in [value, *getattr(value, "parents", ())[:1]])


def is_table(value: Any) -> bool:
    """Whether a value is a table of pandas, Polars or Arrow. For a table, `table[i]` is not row i."""
    return hasattr(value, "columns") and (hasattr(value, "to_numpy") or hasattr(value, "to_pandas"))


def _missing_in(value: Any) -> int:
    """The number of missing values in a column of pandas, Arrow or Polars. NaN in a NumPy dtype does not count."""
    if callable(getattr(value, "isna", None)):
        if is_table(value):
            return sum(_missing_in(column) for _, column in value.items())
        return 0 if isinstance(value.dtype, np.dtype) else int(np.sum(value.isna()))
    count = getattr(value, "null_count", 0)
    return int(np.asarray(count() if callable(count) else count).sum())


def _of_list(name: str, value: list[Any]) -> Array:
    try:
        array = np.asarray(value)
        found = (
            f"a list of {type(_first(value)).__name__} with dtype {array.dtype}" if array.size else "an empty list"
        )
        if array.dtype.kind in "biufc" and array.size and np.ndim(_first(value)) == 0:
            return array
    except ValueError:
        found = "lists of different lengths"
    raise ValueError(
        f"{name}: a list in a record must form an array of numbers, got {found}; pad to one length, stack "
        "arrays (numpy.stack), or use a tuple where each element is a leaf of its own"
    )


def _first(value: Any) -> Any:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    return value


# --- records: trees of values, from which batches are made ---


def as_arrays(record: Any) -> Any:
    """Convert the leaves of a record to arrays, because Python numbers and lists have no dtype or shape.

    Raises:
      ValueError, TypeError: a leaf cannot be an array, or a value is masked.
    """

    def converted(path: Any, value: Any) -> Any:
        return as_record_leaf(f"batch{jax.tree_util.keystr(path)}", value)

    return jax.tree_util.tree_map_with_path(converted, record, is_leaf=is_list)


def digest_of(record: Any) -> str:
    """A digest of the bytes of a record's leaves."""
    hashed = hashlib.sha256()
    for value in jax.tree_util.tree_leaves(record):
        hashed.update(np.ascontiguousarray(value).tobytes())
    return hashed.hexdigest()[:32]


def write_record(record: Any, spec: RowSpec, targets: list[Any], i: int) -> None:
    """Write each leaf of a record to index i of its target.

    Raises:
      ValueError: the record's tree, shapes or dtypes differ from `spec`, or one of its values is masked.
      TypeError: a leaf cannot become an array.
      OverflowError: a Python number does not fit into the dtype.
    """
    values, treedef = jax.tree_util.tree_flatten(record)
    if treedef != spec.treedef:  # perhaps only because a leaf is a list: for JAX, its elements are leaves
        values, treedef = jax.tree_util.tree_flatten(record, is_leaf=is_list)
        if treedef != spec.treedef:
            raise ValueError(f"its tree is {treedef}, but {spec.treedef} in the first record")
    for value, target, leaf in zip(values, targets, spec.leaves, strict=True):
        is_array = type(value) is np.ndarray or type(value) is leaf.dtype.type
        fits = is_array and value.shape == leaf.shape and value.dtype == leaf.dtype
        target[i] = value if fits else _converted(value, leaf)


def _converted(value: Any, leaf: Leaf) -> Array:
    """Convert a leaf of a record to an array. Python numbers and lists get the dtype of `leaf`."""
    array = np.asarray(as_record_leaf(leaf.name, value))
    plain = isinstance(value, int | float | list) and np.can_cast(array.dtype, leaf.dtype, "same_kind")
    if array.shape != leaf.shape or not (plain or array.dtype == leaf.dtype):
        raise ValueError(
            f"{leaf.name} is {array.dtype}{list(array.shape)}, but {leaf.dtype}{list(leaf.shape)} in the "
            "first record; crop, pad or convert it in a map"
        )
    with np.errstate(over="ignore"):  # overflow is checked below for all dtypes; only NumPy's own would warn of it
        converted = np.asarray(value, leaf.dtype)
    if jax.numpy.issubdtype(leaf.dtype, np.integer):
        lost = converted.astype(array.dtype) != array
    else:  # floats may be rounded
        lost = np.isfinite(array) & ~np.isfinite(converted)
    if lost.any():
        raise ValueError(f"{leaf.name}: {value} does not fit {leaf.dtype}, the first record's dtype")
    return converted
