"""Seeds that do not collide: one number for each place in a run."""

from __future__ import annotations

import numpy as np


def derive_seed(*place: int) -> int:
    """Returns: a seed below 2**63 for a place in a run, such as (run seed, group, sample).

    Sums and products of such numbers collide, and neighbouring seeds give related streams in some generators.
    """
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(1))
