"""Whole matrices out of the flat parts that ZeRO deals to the ranks: each is put together on one rank, and goes back.

A matrix that lies on one rank stays there. The others travel twice, in the number format of the computation, and the
work is shared out among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from openrlhf.backends.fragments import true_shape


@dataclass(frozen=True)
class Matrix:
    """A weight of which each rank holds a stretch of the flattened elements.

    Attributes:
        shape: of the whole.
        offset: where this rank's stretch starts in its flat tensor.
        parts: for each rank, where in the whole its stretch starts and how long it is; 0 long where it has none.
        owner: the rank that puts it together.
    """

    shape: tuple[int, ...]
    offset: int
    parts: tuple[tuple[int, int], ...]
    owner: int

    @property
    def alone(self) -> bool:
        """One rank holds all of it."""
        return sum(size > 0 for _, size in self.parts) == 1


# Of a matrix on this rank: start in the whole, elements, start in the flat tensor.
_Stretch = tuple[int, int, int]


def matrices_of(engine: Any, is_muon: list[bool]) -> dict[torch.Tensor, list[Matrix]]:
    """Collective. Args: engine: DeepSpeed's. is_muon: for each of the optimizer's parameter groups.

    Returns: by the flat tensor that the optimizer moves, the matrices that have a part of it on any rank, in the same
        order on all ranks; empty without ZeRO, which moves whole weights.
    """
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return {}
    found = list(_zero3_groups(engine, is_muon) if stage == 3 else _flat_groups(engine, is_muon))
    own = [[stretch for _, stretch in group] for _, group in found]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {
        flat: [
            _matrix(shape, stretch[2], [ranks[index][place] for ranks in every], place)
            for place, (shape, stretch) in enumerate(group)
        ]
        for index, (flat, group) in enumerate(found)
    }


def _matrix(shape: tuple[int, ...], offset: int, stretches: list[_Stretch], place: int) -> Matrix:
    parts = tuple((start, size) for start, size, _ in stretches)
    largest = max(size for _, size in parts)
    holders = [rank for rank, (_, size) in enumerate(parts) if size == largest]
    return Matrix(shape, offset, parts, holders[place % len(holders)])


def _flat_groups(engine: Any, is_muon: list[bool]) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    """Stages 1 and 2: all weights of a group end to end, cut into equal parts."""
    zero = engine.optimizer
    for index, muon in enumerate(is_muon):
        if not muon:
            continue
        group = []
        for parameter in zero.bit16_groups[index] if hasattr(zero, "bit16_groups") else zero.bf16_groups[index]:
            mapping = parameter._hp_mapping
            stretch = (0, 0, 0)
            if mapping is not None:
                place = mapping.lp_fragment_address
                stretch = (place.start, place.numel, mapping.hp_fragment_address.start)
            group.append((tuple(parameter.shape), stretch))
        yield zero.optimizer.param_groups[index]["params"][0], group


def _zero3_groups(engine: Any, is_muon: list[bool]) -> Iterator[tuple[torch.Tensor, list[Any]]]:
    """Stage 3: each weight cut into equal parts, the last one filled up beyond the end."""
    zero = engine.optimizer
    for index, parameters in enumerate(zero.fp16_groups):
        if not is_muon[zero.sub_group_to_group_id[index]]:
            continue
        group, offset = [], 0
        for parameter in parameters:
            size = parameter.partition_numel()
            start = size * dist.get_rank(parameter.ds_process_group)
            group.append((tuple(true_shape(parameter)), (start, max(min(size, parameter.ds_numel - start), 0), offset)))
            offset += size
        yield zero.fp32_partitioned_groups_flat[index], group


def orthogonalized_parts(
    matrices: list[Matrix],
    update: torch.Tensor,
    orthogonalize: Callable[[torch.Tensor], torch.Tensor],
    *,
    compute: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """Collective: consume all of it.

    Args:
        matrices: those of one flat tensor.
        update: flat, this rank's part of all of them.
        orthogonalize: from a whole matrix to another one of its shape in ``compute``.
        device: where matrices travel and are computed.

    Yields: each matrix of which this rank has a part, and that part, flat, of the result.
    """
    rank = dist.get_rank()
    shared = [matrix for matrix in matrices if not matrix.alone]
    for matrix in matrices:
        if matrix.alone and matrix.owner == rank:
            whole = _own_part(matrix, update, rank).to(device).view(matrix.shape)
            yield matrix, orthogonalize(whole).flatten()
    ranks = dist.get_world_size()
    # About one matrix for each rank at a time: no more memory than that, and all ranks have work.
    parts = update.to(device, compute) if shared else update
    for first in range(0, len(shared), ranks):
        yield from _exchanged(shared[first : first + ranks], parts, orthogonalize, rank)


def _own_part(matrix: Matrix, update: torch.Tensor, rank: int) -> torch.Tensor:
    return update.narrow(0, matrix.offset, matrix.parts[rank][1])


def _exchanged(
    matrices: list[Matrix], update: torch.Tensor, orthogonalize: Callable[[torch.Tensor], torch.Tensor], rank: int
) -> Iterator[tuple[Matrix, torch.Tensor]]:
    """There and back: parts to the owners of the matrices, and parts of the results to where they came from."""
    ranks = range(dist.get_world_size())
    # What this rank sends to each owner, and what each rank sends to this one: the way back has the two swapped.
    theirs = [[matrix for matrix in matrices if matrix.owner == owner] for owner in ranks]
    mine = theirs[rank]
    sent = [_own_part(matrix, update, rank) for group in theirs for matrix in group]
    sizes_out = [sum(matrix.parts[rank][1] for matrix in group) for group in theirs]
    sizes_in = [sum(matrix.parts[source][1] for matrix in mine) for source in ranks]
    received = _all_to_all(torch.cat(sent), sizes_out, sizes_in)
    wholes = [update.new_empty(matrix.shape).flatten() for matrix in mine]
    place = 0
    for source in ranks:
        for matrix, whole in zip(mine, wholes, strict=True):
            start, size = matrix.parts[source]
            whole[start : start + size] = received[place : place + size]
            place += size
    results = [orthogonalize(w.view(m.shape)).flatten() for m, w in zip(mine, wholes, strict=True)]
    back = [
        result[matrix.parts[target][0] : sum(matrix.parts[target])]
        for target in ranks
        for matrix, result in zip(mine, results, strict=True)
    ]
    returned = _all_to_all(torch.cat(back) if back else update.new_empty(0), sizes_in, sizes_out)
    place = 0
    for group in theirs:
        for matrix in group:
            size = matrix.parts[rank][1]
            if size:
                yield matrix, returned[place : place + size]
            place += size


def _all_to_all(values: torch.Tensor, sizes_out: list[int], sizes_in: list[int]) -> torch.Tensor:
    received = values.new_empty(sum(sizes_in))
    dist.all_to_all_single(received, values, sizes_in, sizes_out)
    return received
