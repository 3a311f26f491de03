"""Who trains what: rows into updates, updates into micro-batches that weigh the same on every rank."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def split_updates(num_samples: int, batch_size: int) -> list[int]:
    """Sizes of the ceil(num_samples / batch_size) updates that ``num_samples`` make.

    Sizes differ by at most one, so that no update is a small and noisy remainder, and nothing is dropped.

    Returns:
        The sizes in order; empty for no samples.
    """
    if batch_size < 1:
        raise ValueError(f"a batch has at least one sample, not {batch_size}")
    if num_samples < 0:
        raise ValueError(f"the number of samples cannot be {num_samples}")
    updates = math.ceil(num_samples / batch_size)
    if updates == 0:
        return []
    small, larger = divmod(num_samples, updates)
    return [small + 1] * larger + [small] * (updates - larger)


def plan_micro_batches(
    lengths: Sequence[int],
    world_size: int,
    *,
    micro_batch_size: int | None = None,
    max_tokens: int | None = None,
) -> list[list[list[int]]]:
    """Deals the rows of one update to ranks and micro-batches.

    Every row appears exactly once. All ranks get the same number of micro-batches; where rows run out, a micro-batch
    is an empty list (the rank then runs an empty batch). Tokens are balanced over the ranks and over the micro-batches
    of a rank. The plan is a function of its arguments alone, so that each rank can compute it for itself.

    Args:
        lengths: tokens of each row.
        world_size: ranks that share the update.
        micro_batch_size: at most so many rows in a micro-batch; ranks then differ by at most one row.
        max_tokens: at most so many tokens in a micro-batch; a longer row has a micro-batch to itself.

    Returns:
        [rank][micro-batch][row], rows as positions in ``lengths``, ascending.
    """
    if world_size < 1:
        raise ValueError(f"an update needs at least one rank, not {world_size}")
    if micro_batch_size is None and max_tokens is None:
        raise ValueError("micro-batches need a limit: micro_batch_size, max_tokens, or both")
    for name, limit in (("micro_batch_size", micro_batch_size), ("max_tokens", max_tokens)):
        if limit is not None and limit < 1:
            raise ValueError(f"{name} must be at least 1, not {limit}")
    if max_tokens is None:
        plan = _plan_by_rows(lengths, world_size, micro_batch_size)
    else:
        plan = _plan_by_tokens(lengths, world_size, max_tokens, micro_batch_size or len(lengths) or 1)
    return [[sorted(micro) for micro in rank] for rank in plan]


def _plan_by_rows(lengths: Sequence[int], world_size: int, micro_batch_size: int) -> list[list[list[int]]]:
    ranks = _balance(list(range(len(lengths))), lengths, world_size)
    micro_batches = max(math.ceil(len(rows) / micro_batch_size) for rows in ranks)
    return [_balance(rows, lengths, micro_batches) for rows in ranks]


def _plan_by_tokens(lengths: Sequence[int], world_size: int, max_tokens: int, max_rows: int) -> list[list[list[int]]]:
    bins = _first_fit(lengths, max_tokens, max_rows)
    per_rank = math.ceil(len(bins) / world_size)
    spread = _balance(list(range(len(lengths))), lengths, per_rank * world_size, even_rows=False)
    if all(len(rows) <= max_rows and (len(rows) == 1 or _tokens(rows, lengths) <= max_tokens) for rows in spread):
        bins = spread
    else:
        bins += [[] for _ in range(per_rank * world_size - len(bins))]
        _fill_empty(bins, lengths)
    totals = [_tokens(rows, lengths) for rows in bins]
    return [[bins[index] for index in share] for share in _balance(list(range(len(bins))), totals, world_size)]


def _first_fit(lengths: Sequence[int], max_tokens: int, max_rows: int) -> list[list[int]]:
    """First-fit decreasing: how few micro-batches the limits allow, near enough."""
    bins: list[list[int]] = []
    totals: list[int] = []
    for row in _longest_first(range(len(lengths)), lengths):
        for index, total in enumerate(totals):
            if total + lengths[row] <= max_tokens and len(bins[index]) < max_rows:
                bins[index].append(row)
                totals[index] += lengths[row]
                break
        else:
            bins.append([row])
            totals.append(lengths[row])
    return bins


def _balance(rows: Sequence[int], lengths: Sequence[int], parts: int, *, even_rows: bool = True) -> list[list[int]]:
    """Deals ``rows`` to ``parts``, longest first, each to the part with the fewest tokens so far.

    With ``even_rows`` no two parts differ by more than one row, which bounds memory and compute together.
    """
    floor, larger_left = divmod(len(rows), parts) if parts else (0, 0)
    dealt: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, 0, part) for part in range(parts)]
    for row in _longest_first(rows, lengths):
        tokens, count, part = heapq.heappop(heap)
        dealt[part].append(row)
        count += 1
        if even_rows and count > floor:
            larger_left -= 1
            if larger_left == 0:
                heap = [entry for entry in heap if entry[1] < floor]
                heapq.heapify(heap)
        elif not even_rows or count < floor or larger_left > 0:
            heapq.heappush(heap, (tokens + lengths[row], count, part))
    return dealt


def _fill_empty(bins: list[list[int]], lengths: Sequence[int]) -> None:
    """Splits the heaviest micro-batches so that none stays empty while another holds two rows."""
    for target in bins:
        if target:
            continue
        source = max(bins, key=lambda rows: (len(rows) > 1, _tokens(rows, lengths)))
        if len(source) < 2:
            return
        halves = _balance(source, lengths, 2)
        source[:] = halves[0]
        target[:] = halves[1]


def _longest_first(rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))


def _tokens(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[row] for row in rows)
