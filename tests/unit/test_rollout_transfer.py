"""Weights on their way to an engine: what a checksum notices, how buckets are cut, and what a receipt refuses."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf.rollout import transfer
from openrlhf.rollout.integrity import Receipt, TransferError, checksum
from openrlhf.rollout.transfer import Exchange, buckets, write_bucket

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def _random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def _swapped(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[[1, 5]] = changed[[5, 1]]
    return changed


def _with(tensor: torch.Tensor, index: int, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two elements swapped": _swapped,
    "neighbours swapped": lambda t: torch.cat([t[1:2], t[:1], t[2:]]),
    "all moved by one": lambda t: t.roll(1),
    "moved by one word": lambda t: t.roll(8),
    "reversed": lambda t: t.flip(0),
    "first half and second half swapped": lambda t: t.roll(len(t) // 2),
    "one sign": lambda t: _with(t, 7, -float(t[7])),
    "every sign": lambda t: -t,
    "doubled": lambda t: t * 2,
    "zeros": torch.zeros_like,
    "last element lost": lambda t: t[:-1],
    "last element zero": lambda t: _with(t, -1, 0.0),
    "other shape": lambda t: t.view(1, -1),
}


@pytest.mark.parametrize("size", [1001, 1024])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_a_tensor_changes_its_checksum(change: str, dtype: torch.dtype, size: int) -> None:
    tensor = _random((size,), dtype)
    changed = CHANGES[change](tensor)

    assert changed.shape != tensor.shape or not torch.equal(changed, tensor), "the case changes nothing"
    assert checksum(changed) != checksum(tensor)


@pytest.mark.parametrize("factor", [2.0, 0.5, -1.0])
def test_a_change_of_a_whole_large_tensor_does_not_cancel_out(factor: float) -> None:
    # A sum of words weighted by odd numbers misses each of these at this size.
    tensor = _random((2048, 1024)).abs()

    assert checksum(tensor * factor) != checksum(tensor)


@pytest.mark.parametrize("index", [0, 2**16 - 1, 2**16, 200_000, -1])
def test_a_single_bit_is_noticed_wherever_it_stands(index: int) -> None:
    tensor = torch.zeros(300_001, dtype=torch.int8)

    assert checksum(_with(tensor, index, 1)) != checksum(tensor)


def test_zeros_of_other_sizes_and_dtypes_have_other_checksums() -> None:
    tensors = [torch.zeros(n, dtype=d) for n in (0, 1, 2, 8, 9) for d in (*FLOATS, torch.int8, torch.int32)]

    assert len({checksum(tensor) for tensor in tensors}) == len(tensors)


def test_the_same_bytes_as_another_dtype_are_not_the_same() -> None:
    tensor = _random((64,))

    assert checksum(tensor.view(torch.int32)) != checksum(tensor)
    assert checksum(tensor.bfloat16()) != checksum(tensor)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (4, 6), (2, 3, 5), (1000, 333)], ids=str)
def test_the_place_in_memory_does_not_matter(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = _random(shape, dtype)
    expected = checksum(tensor)
    # Starts at any byte of a larger one, as a slice of a fused weight does.
    for offset in (1, 2, 3):
        larger = torch.cat([_random((offset,), dtype), tensor.flatten()])
        assert checksum(larger[offset:].view(shape)) == expected
    if len(shape) > 1:
        spread = torch.stack([tensor, tensor], dim=-1)[..., 0]
        turned = tensor.transpose(0, 1).contiguous().transpose(0, 1)
        assert not spread.is_contiguous() and checksum(spread) == expected
        assert not turned.is_contiguous() and checksum(turned) == expected
    assert checksum(tensor.clone().requires_grad_(dtype.is_floating_point)) == expected


def test_a_checksum_is_a_number_that_travels_as_json() -> None:
    sums = [checksum(_random((n,))) for n in range(1, 50)]

    assert all(isinstance(value, int) and 0 <= value < 2**64 for value in sums)
    assert max(sums) > 2**60


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8], ids=str)
def test_what_is_read_from_a_bucket_has_the_checksums_of_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [(3,), (5, 7), (), (1,), (4, 4), (0,)]
    tensors = {f"w{number}": _random(shape, dtype) for number, shape in enumerate(shapes)}

    bucket = write_bucket(tmp_path, 3, tensors)

    read = load_file(bucket.path)
    assert bucket.checksums == {name: checksum(tensor) for name, tensor in read.items()}
    assert bucket.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert Path(bucket.path).parent == tmp_path and "3" in Path(bucket.path).name
    Receipt().accept(_sums(read), bucket.checksums)


def test_a_transposed_weight_is_written_as_it_is_read(tmp_path: Path) -> None:
    weight = _random((6, 4)).t()

    bucket = write_bucket(tmp_path, 0, {"w": weight})

    assert torch.equal(load_file(bucket.path)["w"], weight)
    assert bucket.checksums == {"w": checksum(weight)}


def _names(groups: list[dict[str, torch.Tensor]]) -> list[list[str]]:
    return [list(group) for group in groups]


def test_buckets_are_filled_up_to_the_limit_in_order() -> None:
    stream = [(name, torch.zeros(10)) for name in "abcdefg"]

    # 40 bytes each.
    assert _names(list(buckets(stream, torch.float32, max_bytes=120))) == [["a", "b", "c"], ["d", "e", "f"], ["g"]]
    assert _names(list(buckets(stream, torch.float32, max_bytes=119))) == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]
    assert _names(list(buckets(stream, torch.float32))) == [list("abcdefg")]
    assert list(buckets([], torch.float32)) == []


def test_a_tensor_above_the_limit_stands_alone() -> None:
    stream = [("a", torch.zeros(10)), ("large", torch.zeros(100)), ("b", torch.zeros(10)), ("c", torch.zeros(10))]

    assert _names(list(buckets(stream, torch.float32, max_bytes=100))) == [["a"], ["large"], ["b", "c"]]


def test_the_limit_counts_bytes_as_the_engine_holds_them() -> None:
    stream = [(name, torch.zeros(10)) for name in "abcd"]

    assert _names(list(buckets(stream, torch.bfloat16, max_bytes=40))) == [["a", "b"], ["c", "d"]]


def test_floats_are_cast_to_the_dtype_of_the_engine_and_other_tensors_are_not() -> None:
    weight, steps = _random((4,)), torch.arange(3)

    (group,) = buckets([("w", weight), ("steps", steps)], torch.bfloat16)

    assert torch.equal(group["w"], weight.bfloat16()) and group["w"].dtype == torch.bfloat16
    assert torch.equal(group["steps"], steps) and group["steps"].dtype == torch.int64


def test_a_bucket_holds_copies_since_a_gathered_tensor_does_not_last() -> None:
    buffer = torch.zeros(4)

    def gathered():
        for value, name in enumerate("abc", start=1):
            yield name, torch.nn.Parameter(buffer.fill_(value), requires_grad=False)

    (group,) = buckets(gathered(), torch.float32)

    assert {name: tensor.tolist() for name, tensor in group.items()} == {
        "a": [1.0] * 4, "b": [2.0] * 4, "c": [3.0] * 4,
    }  # fmt: skip


def test_one_bucket_at_a_time_is_asked_of_the_trainer() -> None:
    asked: list[str] = []

    def gathered():
        for name in "abcd":
            asked.append(name)
            yield name, torch.zeros(10)

    stream = buckets(gathered(), torch.float32, max_bytes=40)
    next(stream)

    # The one that did not fit any more had to be seen.
    assert asked == ["a", "b"]


def test_a_trainer_that_offers_a_tensor_twice_is_refused() -> None:
    stream = [("a", torch.zeros(1)), ("b", torch.zeros(1)), ("a", torch.zeros(1))]

    with pytest.raises(TransferError, match="offered a twice"):
        list(buckets(stream, torch.float32))


@pytest.fixture
def sent() -> dict[str, torch.Tensor]:
    return {name: _random((4, 3)) + number for number, name in enumerate(["q", "k", "v"])}


def _sums(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def _without(entries: dict, *names: str) -> dict:
    return {name: value for name, value in entries.items() if name not in names}


def test_a_whole_update_is_accepted_in_any_number_of_buckets(sent: dict[str, torch.Tensor]) -> None:
    for groups in (["qkv"], ["q", "kv"], ["v", "q", "k"]):
        receipt = Receipt()
        for group in groups:
            part = {name: sent[name] for name in group}
            receipt.accept(_sums(part), _sums(part))
        receipt.complete(_sums(sent))


def test_a_bucket_without_an_announced_tensor_is_refused(sent: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TransferError, match=r"missing \['k'\], not announced none"):
        Receipt().accept(_sums(_without(sent, "k")), _sums(sent))


def test_a_bucket_with_an_unannounced_tensor_is_refused(sent: dict[str, torch.Tensor]) -> None:
    with pytest.raises(TransferError, match=r"missing none, not announced \['k'\]"):
        Receipt().accept(_sums(sent), _sums(_without(sent, "k")))


@pytest.mark.parametrize("value", ["same", "other"])
def test_a_tensor_that_comes_twice_is_refused(sent: dict[str, torch.Tensor], value: str) -> None:
    receipt = Receipt()
    receipt.accept(_sums(sent), _sums(sent))
    again = {"k": sent["k"] if value == "same" else sent["k"] + 1}

    with pytest.raises(TransferError, match="k was received twice"):
        receipt.accept(_sums(again), _sums(again))


def test_a_stale_tensor_is_refused(sent: dict[str, torch.Tensor]) -> None:
    old = sent | {"v": sent["v"] - 1e-6}

    with pytest.raises(TransferError, match="weight v arrived with checksum .* stale or damaged"):
        Receipt().accept(_sums(old), _sums(sent))


def test_two_tensors_with_swapped_contents_are_refused(sent: dict[str, torch.Tensor]) -> None:
    swapped = sent | {"q": sent["k"], "k": sent["q"]}

    with pytest.raises(TransferError, match="weight q arrived"):
        Receipt().accept(_sums(swapped), _sums(sent))


def test_a_manifest_with_more_than_came_is_refused(sent: dict[str, torch.Tensor]) -> None:
    receipt = Receipt()
    receipt.accept(_sums(_without(sent, "q")), _sums(_without(sent, "q")))

    with pytest.raises(TransferError, match=r"never received \['q'\], unknown to the trainer none, stale none"):
        receipt.complete(_sums(sent))


def test_a_manifest_with_less_than_came_is_refused(sent: dict[str, torch.Tensor]) -> None:
    receipt = Receipt()
    receipt.accept(_sums(sent), _sums(sent))

    with pytest.raises(TransferError, match=r"never received none, unknown to the trainer \['q'\], stale none"):
        receipt.complete(_sums(_without(sent, "q")))


def test_a_manifest_with_other_contents_is_refused(sent: dict[str, torch.Tensor]) -> None:
    receipt = Receipt()
    receipt.accept(_sums(sent), _sums(sent))

    with pytest.raises(TransferError, match=r"stale \['k'\]"):
        receipt.complete(_sums(sent | {"k": sent["k"] + 1}))


def test_the_manifest_of_an_empty_model_closes_nothing_that_received_something(sent: dict[str, torch.Tensor]) -> None:
    receipt = Receipt()
    receipt.accept(_sums(sent), _sums(sent))

    with pytest.raises(TransferError, match="unknown to the trainer"):
        receipt.complete({})


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Shared memory and a disk of this test alone; ``free`` is what the shared memory has left."""
    roots = SimpleNamespace(shared=tmp_path / "shm", disk=tmp_path / "tmp", free=1000)
    roots.shared.mkdir()
    roots.disk.mkdir()
    monkeypatch.setattr(transfer, "SHARED_MEMORY", roots.shared)
    monkeypatch.setattr(transfer, "_MARGIN_BYTES", 0)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(roots.disk))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=roots.free))
    return roots


def test_the_exchange_folder_is_private_in_shared_memory_and_removed_at_the_end(roots: SimpleNamespace) -> None:
    with Exchange() as first, Exchange() as second:
        folders = [first.folder(1000), second.folder(1000)]
        assert folders[0] != folders[1] and folders[0].parent == folders[1].parent == roots.shared
        assert first.folder(10) == folders[0]
        assert folders[0].stat().st_mode & 0o077 == 0
        save_file({"w": torch.zeros(2)}, folders[0] / "w.safetensors")
    assert list(roots.shared.iterdir()) == []


def test_a_bucket_that_has_no_room_in_shared_memory_goes_to_the_disk(roots: SimpleNamespace) -> None:
    with Exchange() as exchange:
        assert exchange.folder(1000).parent == roots.shared
        assert exchange.folder(1001).parent == roots.disk
    roots.shared.rmdir()
    with Exchange() as exchange:
        assert exchange.folder(10).parent == roots.disk


_KILLED = """
import sys, os, signal, tempfile
from pathlib import Path
from openrlhf.rollout import transfer
transfer.SHARED_MEMORY = Path(sys.argv[1])
tempfile.gettempdir = lambda: sys.argv[2]
folder = transfer.Exchange().folder(10)
(folder / "bucket-0.safetensors").touch()
print(folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_killed_processes_are_removed_and_others_are_kept(roots: SimpleNamespace) -> None:
    command = [sys.executable, "-c", _KILLED, str(roots.shared), str(roots.disk)]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    dead = Path(killed.stdout.strip())
    assert dead.is_dir(), killed.stderr
    foreign = [roots.shared / "openrlhf-weights-notes", roots.shared / "elsewhere-1"]
    for folder in foreign:
        folder.mkdir()
    with Exchange() as live:
        kept = live.folder(10)
        with Exchange() as exchange:
            made = exchange.folder(10)
            assert not dead.exists()
            assert all(folder.is_dir() for folder in (kept, made, *foreign))


def test_a_folder_is_safe_from_other_runs_while_it_is_made(
    roots: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.flock

    def another_run_starts(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        Exchange()
        lock(*arguments)

    exchange = Exchange()
    monkeypatch.setattr(fcntl, "flock", another_run_starts)

    assert exchange.folder(10).is_dir()
    Exchange()
    assert exchange.folder(10).is_dir()
    exchange.close()
