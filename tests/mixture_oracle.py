"""Finds the row at each position of a mixture by Tijdeman's rule and counters, in loops over single rows."""

from fractions import Fraction

import numpy as np

from feedline._src.order.epoch import rows_at


def places(counts):
    """The source at each place of a block."""
    total, sources = sum(counts), [i for i, count in enumerate(counts) if count]
    margin = Fraction(1, max(1, 2 * len(sources) - 2))
    taken, found = dict.fromkeys(sources, 0), []
    for place in range(1, total + 1):
        due = [i for i in sources if Fraction(counts[i], total) * place - taken[i] >= margin]
        chosen = min(due, key=lambda i: ((taken[i] + 1 - margin) / Fraction(counts[i], total), i))
        taken[chosen] += 1
        found.append(chosen)
    return found


def run(lengths, orders, phases, end, most):
    """The first `most` rows of a run: (epoch of the mixture, source, epoch of the source, row of the source).

    Args:
      phases: [(first position, the number of rows of each source in a block)].
    """
    taken, found, epoch = [0] * len(lengths), [], 0
    blocks = [places(counts) for _, counts in phases]
    while len(found) < most:
        position, at_begin = 0, list(taken)
        while len(found) < most:
            phase = max(i for i, (start, _) in enumerate(phases) if start <= position)
            block = blocks[phase]
            source = block[(position - phases[phase][0]) % len(block)]
            own_epoch, own_position = divmod(taken[source], lengths[source])
            row = rows_at(orders[source], lengths[source], own_epoch, np.array([own_position]))[0]
            found.append((epoch, source, own_epoch, int(row)))
            taken[source] += 1
            position += 1
            given = [now - before for now, before in zip(taken, at_begin, strict=True)]
            exhausted = [count >= length for count, length in zip(given, lengths, strict=True)]
            if (end == "first_exhausted" and any(exhausted)) or (end == "all_exhausted" and all(exhausted)):
                break
        epoch += 1
    return found
