"""Computes medians and ratios of a benchmark of peers, from the samples of its rounds. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shared.rounds import paired

PAIR = ("feedline_records", "grain_records_best")
"""feedline and Grain over the same records; adjacent in ENTRANTS, so that a round measures them in succession."""
ENTRANTS = (
    "limit", "gather", "feedline", "numpy", "grain_batches", *PAIR, "grain_records", "spdl", "jax_dataloader",
    "torch_batched", "torch_usual", "tf_data_gather", "tf_data_slices", "mosaic_streaming", "litdata",
)  # fmt: skip
Rates = dict[str, dict[int, float]]
"""{entrant: {round: rows per second}}."""

_GLOBAL_JUMP = 0.5
"""The least `jump` that counts as a full shuffle, whose jump is about 1. See `Task.report`."""


def standings(samples: Sequence[Mapping[str, Any]], row_bytes: int) -> dict[str, Any]:
    """Medians and ratios for one size of rows."""
    rates = rates_of(samples, row_bytes)
    return {
        "entrants": ranked(rates, "feedline", of_limit="limit", of_gather="gather"),
        "pair": _ratio(rates, *PAIR),
    }


def rates_of(samples: Sequence[Mapping[str, Any]], row_bytes: int) -> Rates:
    """{entrant: {round: rows per second}} for one size of rows."""
    rates: Rates = {}
    for sample in samples:
        if sample["row_bytes"] == row_bytes:
            rates.setdefault(sample["entrant"], {})[sample["round"]] = sample["rows_per_s"]
    return rates


def ranked(rates: Rates, ours: str, **limits: str) -> dict[str, dict[str, Any]]:
    """{entrant: {"median_rows_per_s", "feedline_over", a ratio to each of `limits`}}, fastest first.

    Ratios are those of `shared.rounds.paired`, None if a rate is missing.
    """
    medians = {name: statistics.median(of.values()) for name, of in rates.items()}
    return {
        name: {
            "median_rows_per_s": medians[name],
            **{key: _ratio(rates, name, limit) for key, limit in limits.items()},
            "feedline_over": _ratio(rates, ours, name),
        }
        for name in sorted(medians, key=lambda name: -medians[name])
    }


def _ratio(rates: Rates, over: str, under: str) -> dict[str, Any] | None:
    return paired(rates.get(over, {}), rates.get(under, {}))


def table(result: Mapping[str, Any], row_bytes: int) -> str:
    """The standings for one row size, as text."""
    found = result["standings"][str(row_bytes)]
    checks = [check for check in result["checks"] if check["row_bytes"] == row_bytes]
    wrong = {check["entrant"] for check in checks if not check["right"]}
    local = {check["entrant"] for check in checks if check["jump"] < _GLOBAL_JUMP}
    lines = [
        f"\nrows of {row_bytes} B",
        f"{'':<20} {'M rows/s':>9} {'GB/s':>7}  {'÷ np.take':<20}  {'÷ fastest gather':<20}  feedline ÷ it",
    ]
    for name, entrant in found["entrants"].items():
        rate = entrant["median_rows_per_s"]
        lines.append(
            f"{name:<20} {rate / 1e6:>9.3f} {rate * row_bytes / 1e9:>7.2f}  {shown(entrant['of_limit']):<20}  "
            f"{shown(entrant['of_gather']):<20}  "
            f"{shown(entrant['feedline_over']):<22}"
            f"{'  WRONG ROWS' if name in wrong else ''}{'  shuffles nearby rows only' if name in local else ''}"
        )
    lines += [f"{name:<20} not measured: {why}" for name, why in result["failures"].items()]
    lines.append(f"{PAIR[0]} ÷ {PAIR[1]}, round by round: {shown(found['pair'])}")
    return "\n".join(lines)


def shown(ratio: Mapping[str, Any] | None) -> str:
    """A ratio and its interval, as text."""
    return "–" if ratio is None else f"{ratio['ratio']:.3g} [{ratio['low']:.3g}, {ratio['high']:.3g}]"
