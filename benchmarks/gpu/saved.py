"""The file with the results of gpu.py: runs of single parts on the same machine are merged into it."""

import dataclasses
import json
import os

from gpu.apart import WHOLE, matches

_SAME = (
    "processor", "cores", "system", "python", "jax", "jaxlib", "numpy", "grain", "feedline", "columns", "platform",
    "device_kind", "devices", "runtime", "driver", "environment",
)  # fmt: skip
"""What must be the same in all parts of a file. Load, clocks and the link's state vary from minute to minute."""


class OtherResult(ValueError):
    """The file holds something that this run's parts must not be mixed with."""


def opened(path, machine, scale):
    """The result in the file, with this run's sizes and machine; without a file, one without parts.

    Raises:
      OtherResult: the file is another machine's, has other versions or sizes, or is no result of gpu.py.
    """
    sizes = json.loads(json.dumps(dataclasses.asdict(scale)))
    if not path.exists():
        return {"benchmark": "gpu", "machine": machine, "scale": sizes, "sections": {}}
    try:
        old = json.loads(path.read_text())
        known = old["benchmark"] == "gpu" and "scale" in old
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise OtherResult(f"{path} is no result of this version of gpu.py; give a new file for --out")
    differ = [
        f"{name} was {old['machine'].get(name)!r} and is {machine[name]!r}"
        for name in _SAME
        if old["machine"].get(name) != machine[name]
    ]
    differ += [
        f"the size {name} was {old['scale'].get(name)!r} and is {sizes.get(name)!r}"
        for name in sorted({*sizes, *old["scale"]})
        if old["scale"].get(name) != sizes.get(name)
    ]
    if differ:
        raise OtherResult(
            f"all parts of a file must be measured on the same machine with the same versions and sizes, but for "
            f"{path}: {'; '.join(differ)}. Give a new file for --out"
        )
    return old


def begun(old, chosen):
    """The section of a part that is measured again: without its cases, or without those that are chosen."""
    if old is None:
        return {"results": [], "errors": {}, "skipped": {}}
    kept = {
        state: {case: why for case, why in old[state].items() if not matches(case, chosen) and case != WHOLE}
        for state in ("errors", "skipped")
    }
    return {"results": [each for each in old["results"] if not matches(each["case"], chosen)], **kept}


def add(section, kind, case, value):
    """Add what `apart.section` yields."""
    if kind == "results":
        section["results"].append(value)
    else:
        section[kind][case] = value


def save(path, result):
    """Replace the file, so that a run that is ended meanwhile does not lose what earlier ones measured."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result))
    os.replace(partial, path)
