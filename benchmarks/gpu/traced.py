"""The share of the time of host-to-device copies that overlaps compute, read from a profiler's trace.

On a GPU the plane of a device has a line for each stream. A copy is an event named MemcpyH2D; a kernel or a CUDA
graph is an event with its own name (from XLA's source: xla/backends/profiler/gpu/cupti_collector.cc and
cupti_buffer_events.cc). A CPU shows no copies: there the calls that place batches are compared with the events of
XLA's threads. That tests this module, and says nothing about overlap.
"""

import tempfile
from pathlib import Path

import jax


def traced(run):
    """Call `run()` under the profiler. Returns the result of `hidden` for its trace."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's frames would slow the loop down
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        return hidden(jax.profiler.ProfileData.from_file(str(path)).planes, jax.default_backend())


def hidden(planes, platform):
    """{"transfers", "transfer_s", "compute_s", "hidden_s", "share"}, summed over devices.

    Only the time between a device's first and last compute counts: other copies cannot overlap compute.
    `share` is None if the trace has no copy.
    """
    transfers, transfer_ns, compute_ns, hidden_ns = 0, 0.0, 0.0, 0.0
    for copies, compute in _of_devices(planes, platform):
        if not compute:
            continue
        first, last = min(start for start, _ in compute), max(end for _, end in compute)
        copies = [(max(start, first), min(end, last)) for start, end in copies if start < last and end > first]
        transfers += len(copies)
        transfer_ns += length(copies)
        compute_ns += length(compute)
        hidden_ns += length(copies) + length(compute) - length(copies + compute)
    if not compute_ns:
        raise RuntimeError(
            f"a trace must hold the compute of the devices, and this one holds none of {platform}'s; "
            "check that the profiler's library (CUPTI for CUDA) is installed and permitted"
        )
    return {
        "transfers": transfers,
        "transfer_s": transfer_ns / 1e9,
        "compute_s": compute_ns / 1e9,
        "hidden_s": hidden_ns / 1e9,
        "share": hidden_ns / transfer_ns if transfer_ns else None,
    }


def length(spans):
    """The length of the union of (start, end) spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _of_devices(planes, platform):
    """(copies, compute) as (start, end) in ns, for each GPU; for the host if it runs on CPUs."""
    for plane in planes:
        if platform == "gpu" and plane.name.startswith("/device:GPU"):
            events = [event for line in plane.lines if line.name.startswith("Stream") for event in line.events]
            # Memset, MemcpyD2H and similar events are neither
            yield (
                [_span(event) for event in events if event.name == "MemcpyH2D"],
                [_span(event) for event in events if not event.name.startswith("Mem")],
            )
        if platform == "cpu" and plane.name == "/host:CPU":
            lines = [(line.name, list(line.events)) for line in plane.lines]
            yield (
                [_span(event) for _, events in lines for event in events if event.name == "DevicePutWithSharding"],
                [_span(event) for name, events in lines if name.startswith("tf_XLA") for event in events],
            )


def _span(event):
    return event.start_ns, event.start_ns + event.duration_ns
