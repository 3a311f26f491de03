"""Weights into a real engine: its log-probs are those of plain transformers, and nothing but a whole update is used."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from openrlhf.data.packed_batch import pack_rows
from openrlhf.models.forward import score_tokens
from openrlhf.rollout.integrity import TransferError
from openrlhf.rollout.vllm_receiver import CpuExecutor
from tests.integration.engine_room import FAULTS, MAX_LENGTH, PROMPT, Room, Update, never_sent, rewrite, swapped

EXACT, FAR = 1e-5, 0.05
ROOMS = {
    "tied, biases": {"architecture": "qwen2", "tie": True},
    # One dense layer and one of experts, and a vocabulary that the engine pads.
    "untied, experts": {
        "architecture": "qwen2_moe", "tie": False, "vocab": 500, "mlp_only_layers": [0], "num_experts": 3,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip
# Weights that the engine holds as one.
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip
LONG_PROMPT = [3 + (7 * place) % 300 for place in range(200)]


@pytest.fixture(scope="module", params=ROOMS)
def room(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("room"), **ROOMS[request.param])
    yield room
    room.close()


@pytest.fixture(autouse=True)
def in_step(room: Room) -> Iterator[None]:
    """Every test starts and ends with an engine that holds the model's weights."""
    assert room.gap(room.sample()[0]) < EXACT
    yield
    room.send(room.whole())


def test_a_started_engine_has_the_log_probs_of_plain_transformers(room: Room) -> None:
    prompts = [PROMPT, PROMPT[:1], LONG_PROMPT]

    for temperature in (0.6, 1.0, 1.7):
        samples = room.sample(prompts, temperature=temperature, tokens=16)
        assert [len(sample.tokens) for sample in samples] == [16] * 3
        assert max(room.gap(sample, temperature) for sample in samples) < EXACT


def test_engine_and_trainer_mean_the_same_distribution_by_a_temperature(room: Room) -> None:
    (sample,) = room.sample(temperature=0.6, tokens=16)
    mask = torch.tensor([False] * len(sample.prompt) + [True] * len(sample.tokens))
    batch = pack_rows([sample.prompt + sample.tokens], [mask])

    with torch.no_grad():
        scores = score_tokens(room.model, batch, temperature=0.6)

    ratio = (scores.logprobs[mask] - torch.tensor(sample.logprobs)).exp()
    assert ratio.tolist() == pytest.approx([1.0] * 16, abs=EXACT)
    # Log-probs of another temperature, or divided afterwards, would be far away.
    assert room.gap(sample, 1.0) > FAR
    assert (room.distributions(sample, 1.0) / 0.6 - room.distributions(sample, 0.6)).abs().max() > FAR


def test_a_nucleus_bounds_what_is_sampled_and_renormalises_its_log_probs(room: Room) -> None:
    for sample in room.sample([PROMPT, LONG_PROMPT], top_p=0.9, temperature=0.6, tokens=16):
        for row, token, found in zip(room.distributions(sample, 0.6), sample.tokens, sample.logprobs, strict=True):
            ranked, ids = row.exp().sort(descending=True)
            nucleus = ids[: int((ranked.cumsum(0) < 0.9).sum()) + 1]
            assert token in nucleus
            assert found == pytest.approx(float(row[token] - row[nucleus].logsumexp(0)), abs=1e-4)


@pytest.mark.parametrize("max_bytes", [2**30, 200_000, 1], ids=["one bucket", "some buckets", "a bucket a tensor"])
def test_an_engine_follows_the_trainer_through_a_transfer(room: Room, max_bytes: int) -> None:
    room.change()
    before = room.engine.weight_version
    assert room.gap(room.sample()[0]) > FAR
    update = room.whole(max_bytes)
    counts = {2**30: 1, 200_000: len(update.buckets), 1: len(room.tensors())}
    assert len(update.buckets) == counts[max_bytes] and (max_bytes > 1e6 or len(update.buckets) > 3)

    room.send(update, version=before + 7)

    assert max(room.gap(s) for s in room.sample([PROMPT, LONG_PROMPT, [9]], tokens=16)) < EXACT
    assert room.engine.weight_version == before + 7


def test_the_order_of_the_weights_does_not_matter(room: Room) -> None:
    room.change()
    whole = room.whole(1)

    room.send(Update(whole.buckets[::-1], whole.manifest))

    assert room.gap(room.sample()[0]) < EXACT


def _named(room: Room, fault: Callable, name: str) -> str:
    """What the message has to say of a fault of one tensor."""
    if fault is never_sent:
        # The engine knows its own layers alone.
        layer = re.sub(r"\.experts\.\d+\.\w+$", ".experts.routed_experts", name.rpartition(".")[0])
        layer = re.sub(r"\w+$", lambda last: FUSED.get(last[0], last[0]), layer)
        return re.escape(f"layer {layer} ")
    if fault is swapped:
        tensors = room.tensors()
        return "|".join(re.escape(other) for other in tensors if tensors[other].shape == tensors[name].shape)
    return re.escape(name)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_any_single_tensor_is_caught_and_named(room: Room, fault: Callable) -> None:
    room.change()
    version = room.engine.weight_version
    tried = 0
    for name in room.tensors():
        update = fault(room, name)
        if update is None:
            continue
        with pytest.raises(TransferError, match=_named(room, fault, name)):
            room.send(update, version + 1)
        with pytest.raises(TransferError, match="must not be sampled from"):
            room.sample()
        tried += 1

    assert tried > len(room.tensors()) // 2
    assert room.engine.weight_version == version
    room.send(room.whole(), version + 1)
    assert room.gap(room.sample()[0]) < EXACT
    assert room.engine.weight_version == version + 1


def test_after_each_fault_one_whole_update_makes_the_engine_right_again(room: Room) -> None:
    for name in room.tensors():
        room.change()
        with pytest.raises(TransferError):
            room.send(never_sent(room, name))
        room.send(room.whole())
        assert room.gap(room.sample(tokens=2)[0]) < EXACT, name


def _unknown_weight(room: Room) -> Update:
    whole, more = room.whole(), room.pack({"model.layers.9.surplus.weight": torch.ones(3)})
    return Update(whole.buckets + more, {**whole.manifest, **more[0].checksums})


def _other_shape(room: Room) -> Update:
    packed = room.pack({**room.tensors(), "model.norm.weight": torch.ones(5)})
    return Update(packed, packed[0].checksums)


def _cut_file(room: Room) -> Update:
    update = room.whole()
    path = Path(update.buckets[0].path)
    path.write_bytes(path.read_bytes()[:-100])
    return update


def _no_file(room: Room) -> Update:
    update = room.whole()
    Path(update.buckets[0].path).unlink()
    return update


def _other_dtype(room: Room) -> Update:
    update = room.whole()
    rewrite(update.buckets[0], lambda held: {name: tensor.bfloat16() for name, tensor in held.items()})
    return update


def _no_bucket(room: Room) -> Update:
    return Update([], room.whole().manifest)


def _empty_model(room: Room) -> Update:
    return Update([], {})


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_unknown_weight, "layers.9"),
        (_other_shape, "could not be loaded"),
        (_cut_file, "could not be loaded"),
        (_no_file, "could not be loaded.*bucket-"),
        (_other_dtype, "arrived with checksum"),
        (_no_bucket, "never received"),
        (_empty_model, "received 0 of"),
    ],
)  # fmt: skip
def test_an_update_that_cannot_be_loaded_fails_and_the_next_one_succeeds(
    room: Room, fault: Callable[[Room], Update], said: str
) -> None:
    room.change()

    with pytest.raises(TransferError, match=said):
        room.send(fault(room))
    with pytest.raises(TransferError, match="must not be sampled from"):
        room.sample()

    room.send(room.whole())
    assert room.gap(room.sample()[0]) < EXACT


@pytest.mark.parametrize("buckets_sent", [0, 3])
def test_an_update_that_the_sender_left_half_done_does_not_stand_in_the_way_of_the_next(
    room: Room, buckets_sent: int
) -> None:
    room.change()
    update = room.whole(100_000)

    async def give_up() -> None:
        await room.engine.begin_update()
        for bucket in update.buckets[:buckets_sent]:
            await room.engine.load_bucket(bucket.payload, bucket.checksums)

    room.run(give_up())
    with pytest.raises(TransferError, match="must not be sampled from"):
        room.sample()

    room.send(update)
    assert room.gap(room.sample()[0]) < EXACT


def test_no_update_begins_while_a_request_is_running(room: Room) -> None:
    async def both() -> None:
        running = asyncio.create_task(room._sample(PROMPT, 1, 1.0, 1.0, MAX_LENGTH - 10))
        await asyncio.sleep(0.05)
        try:
            with pytest.raises(TransferError, match="while 1 requests were running"):
                await room.engine.begin_update()
        finally:
            running.cancel()
            await asyncio.wait([running])

    room.run(both())

    # A request that was cancelled is not running any more.
    room.change()
    room.send(room.whole())
    assert room.gap(room.sample()[0]) < EXACT


def test_cached_prefixes_of_older_weights_are_forgotten(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        assert room.gap(room.sample([LONG_PROMPT])[0]) < EXACT
        room.change()
        room.send(room.whole())
        assert room.gap(room.sample([LONG_PROMPT])[0]) < EXACT

    # The prompt is really cached: kept, the cache would be far off.
    async def keep() -> bool:
        return True

    with monkeypatch.context() as patch:
        patch.setattr(room.engine._engine, "reset_prefix_cache", keep)
        room.change()
        room.send(room.whole())
    assert room.gap(room.sample([LONG_PROMPT])[0]) > FAR


def test_a_cache_is_searched_for_older_weights_only_where_something_was_sampled_with_them(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    reset = room.engine._engine.reset_prefix_cache

    async def counted() -> bool:
        asked.append("reset")
        return await reset()

    monkeypatch.setattr(room.engine._engine, "reset_prefix_cache", counted)
    room.sample([LONG_PROMPT])
    for found in (1, 1):
        room.change()
        room.send(room.whole())
        assert len(asked) == found
    assert room.gap(room.sample([LONG_PROMPT])[0]) < EXACT
    room.change()
    room.send(room.whole())
    assert len(asked) == 2 and room.gap(room.sample([LONG_PROMPT])[0]) < EXACT


def test_a_seed_makes_a_sample_repeatable_whatever_stands_beside_it(room: Room) -> None:
    others = [[20 + n, 30 + n, 40] * (n + 1) for n in range(10)]
    (alone,) = room.sample(seeds=[7], temperature=1.0, tokens=32)
    (again,) = room.sample(seeds=[7], temperature=1.0, tokens=32)
    among = room.sample(
        [*others[:6], PROMPT, *others[6:]], seeds=[*range(6), 7, None, 7, 8, 9], temperature=1.0, tokens=32
    )
    same_seed = room.sample([PROMPT] * 3, seeds=[7, 7, 8], temperature=1.0, tokens=32)

    assert alone.tokens == again.tokens == among[6].tokens == same_seed[0].tokens == same_seed[1].tokens
    assert alone.logprobs == pytest.approx(among[6].logprobs, abs=EXACT)
    assert alone.tokens != same_seed[2].tokens
    assert max(room.gap(sample, 1.0) for sample in among) < EXACT


def test_an_engine_on_a_cpu_gives_its_cores_away_while_no_message_comes(
    room: Room, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import zmq
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert room.engine._engine.vllm_config.parallel_config.distributed_executor_backend is CpuExecutor
    monkeypatch.setattr(SpinCondition, "__init__", SpinCondition.__init__)
    found: list[float] = []

    def reader(_: MultiprocExecutor) -> None:
        with zmq.Context() as context:
            condition = SpinCondition(is_reader=True, context=context, notify_address=f"ipc://{tmp_path}/notify")
            found.append(condition.busy_loop_s)
            for socket in (
                condition.local_notify_socket,
                condition.read_cancel_socket,
                condition.write_cancel_socket,
            ):
                socket.close()

    monkeypatch.setattr(MultiprocExecutor, "_init_executor", reader)
    executor = object.__new__(CpuExecutor)
    MultiprocExecutor._init_executor(executor)
    executor._init_executor()
    # vLLM's own, so that the test says when there is nothing left to change, and ours.
    assert found[0] >= 1 and found[1] <= 0.01
