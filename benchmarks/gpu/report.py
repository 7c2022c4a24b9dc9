"""Judges the parts that gpu.py measured, and prints them: {name: what its file holds}."""

from gpu.steps import AHEAD


def verdicts(parts):
    """[{"claim", "least" or "most", "found": the worst figure, "holds"}].

    `found` is None if nothing was measured, and `holds` is None without it, and on CPUs, where nothing is judged.
    """
    transfer, overlap, utilisation, trained, watched = (
        parts.get(name, {"results": []})["results"]
        for name in ("transfer", "overlap", "utilisation", "modes", "memory")
    )
    sent = [each for each in transfer if each["leaves"] == 1 and each["mb"] >= 15.9]
    least = [
        ("transfer from slabs ÷ from pinned memory", 0.9, [e["bytes_per_s"]["staged"]["of_limit"] for e in sent])
    ]
    for ahead in AHEAD:
        shares = [e["share"] for e in overlap if (e["prefetch"], e["ahead"]) == (2, ahead)]
        roomy = [e for e in utilisation if e["ahead"] == ahead and e["headroom"] >= 0.1]
        least += [
            (f"share hidden at prefetch 2, {ahead} ahead", 0.95, [share for share in shares if share is not None]),
            (f"AU at prefetch 2, {ahead} ahead", 0.99, [e["au"]["2"] for e in roomy]),
        ]
    in_bfloat16 = [e["of_matmul"] for e in trained if e.get("compute") == "bfloat16"]
    least.append(("MLP step ÷ bf16 matmul rate", 0.6, in_bfloat16))
    judged = any((found["machine"] or {}).get("platform") == "gpu" for found in parts.values())
    found = [
        {
            "claim": claim,
            "least": bound,
            "found": min(figures, default=None),
            "holds": min(figures) >= bound if figures and judged else None,
        }
        for claim, bound, figures in least
    ]
    grown = max((len(each["growths"]) for each in watched), default=None)
    holds = grown == 0 if grown is not None and judged else None
    return [*found, {"claim": "kinds of memory that grow", "most": 0, "found": grown, "holds": holds}]


def report(parts):
    """Print the parts, and all verdicts."""
    for name, found in parts.items():
        machine = found["machine"] or dict.fromkeys(("devices", "device_kind", "jax", "processor"), "unknown")
        print(
            f"\n{name}: {len(found['results'])} cases in {found['wall_s']:.0f} s, on {machine['devices']} × ",
            end="",
        )
        print(f"{machine['device_kind']}, jax {machine['jax']}, {machine['processor']}")
        if name == "modes" and machine["devices"] == 1:
            print(
                "  there is one device: jit_multi and pmap run on it, too, and differ from jit_single by overhead"
            )
        for each in found["results"]:
            for line in _lines(each):
                print(f"  {each['case']:<30} {line}")
        for state in ("skipped", "errors"):
            for case, why in found[state].items():
                print(f"  {case:<30} {state.upper()}: {why}")
    print()
    for each in verdicts(parts):
        word = {True: "holds", False: "REFUTED", None: "not judged"}[each["holds"]]
        found = "–" if each["found"] is None else f"{each['found']:.3g}"
        bound = f"at least {each['least']}" if "least" in each else f"at most {each['most']}"
        print(f"{each['claim']:<42} {found:>6}, claimed {bound}: {word}")


def _lines(each):
    if "unavailable" in each:
        return [f"not available: {each['unavailable']}"]
    if "share" in each:
        seen = "no transfer seen" if each["share"] is None else f"{each['share']:.3f} hidden"
        return [f"{seen}: {each['transfers']} transfers, {each['transfer_s'] * 1e3:.1f} ms"]
    if "au" in each:
        au = ", ".join(f"{of:.3f} at {depth}" for depth, of in each["au"].items())
        return [f"headroom {each['headroom']:.0%}; AU {au}"]
    if "compute" in each:
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in each["flops_per_s"].items())
        share, step_ms = each["of_matmul"], each["step_ms"]
        return [f"{share:.3f} of the faster matrix product, step {step_ms:.2f} ms; TFLOP/s: {rates}"]
    if "doubled" in each:
        return [_mode(each), _mode(each["doubled"])]
    if "largest" in each:
        most = each["largest"]
        return [
            f"by the compiler, {most['rows']:,} rows or {most['depth']:,} layers in {_gib(each['limit_bytes'])}"
        ]
    if "on" in each:
        return [_practice(each)]
    if "growths" in each:
        return [*each["report"].splitlines(), f"{len(each['growths'])} kinds of memory grow"]
    ways = each["bytes_per_s"].items()
    return [", ".join(f"{way} {of['median'] / 1e9:.2f} GB/s ({of['of_limit']:.2f})" for way, of in ways)]


def _mode(found):
    needs = f"{found['rows']:,} rows, {_gib(found['compiled_bytes']['total'])} by the compiler"
    if "error" in found:
        return f"{needs}: {found['error']}"
    return (
        f"{needs}, peak {_gib(found['peak_bytes'])} by the {found['peak_from']}; step {found['step_ms']:.2f} ms, "
        f"fed {found['fed_step_ms']:.2f} ms; {found['of_matmul']:.3f} of the layer's product in float32; "
        f"compiled in {found['compile_s']:.1f} s"
    )


def _practice(each):
    on, off = each["on"], each["off"]
    memory = " and ".join(_gib(of["compiled_bytes"]["total"]) for of in (on, off))
    low, high = each["ratios"][0], each["ratios"][-1]
    return (
        f"{each['workload']}: {on['step_ms']:.2f} ms on, {off['step_ms']:.2f} ms off, ratio {each['ratio']:.2f} "
        f"[{low:.2f}, {high:.2f}]; {memory} by the compiler; compiled in {on['compile_s']:.1f} and "
        f"{off['compile_s']:.1f} s"
    )


def _gib(size):
    return f"{size / 2**30:.3g} GiB"
