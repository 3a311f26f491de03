"""The reward server over real connections: what it answers to good requests, bad ones, and too many."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from openrlhf.agents.reward_http import HttpRewardSource
from openrlhf.agents.reward_values import RewardFailure, RewardResult
from openrlhf.config import ConfigError
from openrlhf.serve import app
from openrlhf.serve.model import RewardModel
from openrlhf.serve.server import listen
from openrlhf.utils.errors import RunError
from tests.serve_room import MEAN, STD, Client, Held, ask, load, make_reward_model, plain_scores, serving

TEXTS = [
    "hello world",
    "<|im_start|>user\nwhat is 1 + 2 ?<|im_end|>\n<|im_start|>assistant\nthe answer is 3 .<|im_end|>",
    "one two three four five red green blue",
    "<|im_start|>user\nthink about it<|im_end|>\n<|im_start|>assistant\nstep by",
    "3",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("served") / "rm")


@pytest.fixture(scope="module")
def model(folder: Path) -> RewardModel:
    return load(folder)


@pytest.fixture(scope="module")
def expected(folder: Path, model: RewardModel) -> list[float]:
    return plain_scores(folder, TEXTS, model.tokenizer)


@pytest.mark.parametrize("packed", [True, False])
def test_scores_are_those_of_transformers_whether_texts_come_together_or_alone(packed, folder, expected) -> None:
    made = load(folder, ds={"packing_samples": packed})
    assert made.padded != packed

    async def talk(client: Client) -> list[Any]:
        together = await client.post({"query": TEXTS, "prompts": TEXTS, "labels": [None, 1, "a", {"b": 2}, [3]]})
        return [together, *await asyncio.gather(*[client.post({"query": [text]}) for text in TEXTS])]

    (status, together), *alone = ask(lambda: made, talk)
    assert status == 200 and set(together) == {"rewards", "scores", "extra_logs"} and together["extra_logs"] == {}
    assert together["rewards"] == together["scores"] == pytest.approx(expected, abs=1e-5)
    assert [body["rewards"][0] for _, body in alone] == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.1


def test_normalised_rewards_come_with_the_raw_scores(folder, expected) -> None:
    _, body = ask(lambda: load(folder, normalize=True), lambda client: client.post({"query": TEXTS}))
    assert body["rewards"] == pytest.approx([(score - MEAN) / STD for score in expected], abs=1e-5)
    assert body["extra_logs"] == {"raw_score": pytest.approx(expected, abs=1e-5)}


def test_the_client_of_rl_reads_the_rewards_of_this_server_and_a_text_that_is_refused_fails_alone(model, expected):
    async def talk(client: Client) -> list[Any]:
        source = HttpRewardSource([f"{client.url}/get_reward"], max_retries=1)
        await source.start()
        try:
            return await asyncio.gather(*[source.score(text, "a prompt", None) for text in [*TEXTS, "a " * 99]])
        finally:
            await source.close()

    *good, long = ask(lambda: model, talk)
    assert [outcome.reward for outcome in good] == pytest.approx(expected, abs=1e-5)
    assert isinstance(good[0], RewardResult) and isinstance(long, RewardFailure)
    assert "query[0] has 100 tokens, more than the 64 of --data.max_len" in long.reason


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "the body is no JSON: "),
    (b"\xff\xfe\xfd", 400, "the body is no JSON: "),
    (b"[" * 100_000, 400, "the body is no JSON: "),
    (b"", 400, "the body is no JSON: "),
    (["a"], 422, 'the body must be an object with "query", a list of texts'),
    ({"queries": ["a"]}, 422, 'the body must be an object with "query", a list of texts'),
    ({"query": "a text"}, 422, '"query" must be a list of one text or more, found text'),
    ({"query": []}, 422, '"query" must be a list of one text or more, found a list of 0'),
    ({"query": None}, 422, '"query" must be a list of one text or more, found null'),
    ({"query": ["a", 5]}, 422, "query[1] must be text, found a number"),
    ({"query": ["a", True]}, 422, "query[1] must be text, found true or false"),
    ({"query": [["a"]]}, 422, "query[0] must be text, found a list of 1"),
    ({"query": ["a"], "prompts": ["a", "b"]}, 422, '"prompts" must be a list as long as "query" (1), found a list of'),
    ({"query": ["a"], "labels": "b"}, 422, '"labels" must be a list as long as "query" (1), found text'),
    ({"query": ["a", ""]}, 422, "query[1] is empty; "),
    ({"query": [" \n\t"]}, 422, "query[0] is empty; "),
    (b'{"query": ["a", "b\\ud800"]}', 422, "query[1] holds half of a surrogate pair"),
    ({"query": ["a", "a " * 99]}, 422, "query[1] has 100 tokens, more than the 64 of --data.max_len"),
]


def test_every_bad_request_is_refused_in_one_sentence_and_the_next_good_one_is_answered(model, expected) -> None:
    async def talk(client: Client) -> list[Any]:
        answers = []
        for body, _, _ in BAD:
            answers += [await client.post(body), await client.post({"query": TEXTS[:1]})]
        assert client.server.gate.bytes == client.server.gate.texts == 0
        return answers

    answers = ask(lambda: model, talk)
    for (body, status, sentence), (found, said), good in zip(BAD, answers[::2], answers[1::2], strict=True):
        assert (found, list(said)) == (status, ["detail"]), body
        assert said["detail"].startswith(sentence) and "\n" not in said["detail"]
        assert good[0] == 200 and good[1]["rewards"] == pytest.approx(expected[:1], abs=1e-5)


def test_only_who_knows_the_key_gets_rewards(model, tmp_path, expected) -> None:
    (tmp_path / "key").write_text("open-sesame\n")
    headers = [{}, *({"Authorization": value} for value in ("Bearer no", "Basic open-sesame", "Bearer open-sesame"))]

    async def talk(client: Client) -> list[Any]:
        return [await client.post({"query": TEXTS[:1]}, headers=header) for header in headers]

    *refused, (status, body) = ask(lambda: model, talk, api_key_file=str(tmp_path / "key"))
    assert (status, body["rewards"]) == (200, pytest.approx(expected[:1], abs=1e-5))
    assert [status for status, _ in refused] == [401] * 3
    assert [body["detail"].partition(";")[0] for _, body in refused] == ["no key was sent"] + ["the key is another"] * 2


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_told_so_and_not_cut_off(chunked, model) -> None:
    body = json.dumps({"query": ["a" * 3 * 2**20]}).encode()

    async def pieces():
        for start in range(0, len(body), 2**16):
            yield body[start : start + 2**16]

    async def talk(client: Client) -> tuple[int, Any]:
        if not chunked:
            return await client.post(body)
        async with client.session.post(f"{client.url}/get_reward", data=pieces()) as response:
            return response.status, await response.json()

    status, said = ask(lambda: model, talk, max_body_mb=1)
    assert status == 413 and "--max_body_mb" in said["detail"]


def test_more_texts_than_may_wait_are_told_to_come_again_and_a_request_that_never_fits_to_be_smaller(model) -> None:
    held = Held(model)

    async def talk(client: Client) -> list[Any]:
        first = asyncio.ensure_future(client.post({"query": ["a", "b", "c"]}))
        await asyncio.to_thread(held.began.wait, 30)
        url = f"{client.url}/get_reward"
        async with client.session.post(url, json={"query": ["d", "e"]}) as response:
            busy = response.status, response.headers["Retry-After"], (await response.json())["detail"]
        large = await client.post({"query": ["a"] * 5})
        one_more = asyncio.ensure_future(client.post({"query": ["d"]}))
        while client.server.gate.texts < 4:
            await asyncio.sleep(0.01)
        held.door.set()
        return [busy, large, await first, await one_more, await client.post({"query": ["d", "e"]})]

    busy, large, *answered = ask(lambda: held, talk, max_waiting_texts=4)
    assert busy == (503, "1", "3 texts wait already, and --max_waiting_texts is 4; try again")
    assert large[0] == 413 and "5 texts are more than the 4 of --max_waiting_texts" in large[1]["detail"]
    assert [status for status, _ in answered] == [200] * 3


def test_while_the_model_is_loaded_the_server_says_so_and_then_it_answers(model) -> None:
    door = threading.Event()

    async def main() -> list[Any]:
        async with serving(lambda: model if door.wait(30) else None) as client:
            early = [await client.get("/health"), await client.post({"query": ["a"]})]
            metrics = (await client.get("/metrics"))[1]
            door.set()
            await client.until_ready()
            assert "openrlhf_reward_ready 0.0" in metrics
            return [*early, await client.get("/health"), await client.post({"query": ["a"]})]

    health, refused, healthy, answered = asyncio.run(main())
    assert health == (503, '{"status":"loading"}') and healthy == (200, '{"status":"ok"}')
    assert refused == (503, {"detail": "the model is being loaded"}) and answered[0] == 200


def test_a_server_that_is_told_to_stop_answers_what_it_accepted_and_nothing_new(model, expected) -> None:
    held = Held(model)

    async def main() -> tuple[Any, ...]:
        async with serving(lambda: held) as client:
            await client.until_ready()
            accepted = asyncio.ensure_future(client.post({"query": TEXTS}))
            await asyncio.to_thread(held.began.wait, 30)
            client.server.handle_exit(signal.SIGTERM, None)
            late, health = await client.post({"query": ["a"]}), await client.get("/health")
            assert not accepted.done()
            held.door.set()
            return late, health, await accepted

    late, health, (status, body) = asyncio.run(main())
    assert late == (503, {"detail": "the server is stopping"}) and health == (503, '{"status":"stopping"}')
    assert status == 200 and body["rewards"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_forward_that_outlasts_the_deadline_or_a_second_signal_costs_its_requests_alone(signals, model) -> None:
    held = Held(model)

    async def main() -> tuple[int, Any]:
        async with serving(lambda: held, stop_timeout=0.01 if signals == 1 else 1000.0) as client:
            await client.until_ready()
            accepted = asyncio.ensure_future(client.post({"query": TEXTS}))
            await asyncio.to_thread(held.began.wait, 30)
            for _ in range(signals):
                client.server.handle_exit(signal.SIGTERM, None)
            answer = await accepted
            held.door.set()
            return answer

    assert asyncio.run(main()) == (503, {"detail": "the server is stopping"})


@pytest.mark.parametrize("stopping", [True, False])
def test_a_body_that_does_not_come_to_its_end_is_told_so(stopping: bool, model, monkeypatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_S", 30.0 if stopping else 0.05)

    async def main() -> bytes:
        async with serving(lambda: model) as client:
            await client.until_ready()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
            writer.write(b"POST /get_reward HTTP/1.1\r\nHost: here\r\nContent-Length: 100\r\n\r\n{")
            while not client.server.gate.requests:
                await asyncio.sleep(0.01)
            if stopping:
                client.server.handle_exit(signal.SIGTERM, None)
            answer = await reader.read()
            writer.close()
            return answer

    status, sentence = (b"503", b"the server is stopping") if stopping else (b"408", b"the body did not come within")
    answer = asyncio.run(main())
    assert answer.startswith(b"HTTP/1.1 " + status) and sentence in answer


def test_what_a_client_that_has_hung_up_asked_for_leaves_the_queue(model) -> None:
    held = Held(model)

    async def talk(client: Client) -> str:
        with pytest.raises(TimeoutError):
            await client.post({"query": ["a"] * 3}, timeout=aiohttp.ClientTimeout(0.2))
        while client.server.gate.texts:
            await asyncio.sleep(0.01)
        held.door.set()
        assert (await client.post({"query": ["a"]}))[0] == 200
        return (await client.get("/metrics"))[1]

    metrics = ask(lambda: held, talk)
    assert 'openrlhf_reward_requests_total{status="499"} 1.0' in metrics


def test_a_model_that_breaks_ends_the_server_with_the_reason_after_its_answer(model) -> None:
    class Broken(Held):
        def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
            raise RuntimeError("CUDA error: device-side assert triggered")

    async def talk(client: Client) -> tuple[int, Any]:
        return await client.post({"query": ["a"]})

    answers: list[tuple[int, Any]] = []

    async def keep(client: Client) -> None:
        answers.append(await talk(client))

    with pytest.raises(RunError, match="it began with RuntimeError: CUDA error: device-side assert triggered"):
        ask(lambda: Broken(model), keep)
    assert answers[0][0] == 500 and "could not score it (RuntimeError: CUDA error" in answers[0][1]["detail"]


def test_metrics_count_requests_by_status_and_what_was_scored(model) -> None:
    async def talk(client: Client) -> str:
        await client.post({"query": TEXTS})
        await client.post({"query": [""]})
        return (await client.get("/metrics"))[1]

    lines = dict(line.rsplit(" ", 1) for line in ask(lambda: model, talk).splitlines() if not line.startswith("#"))
    tokens = sum(len(model.encode(text)) for text in TEXTS)
    wanted = {
        'requests_total{status="200"}': 1,
        'requests_total{status="422"}': 1,
        "texts_total": len(TEXTS),
        "tokens_total": tokens,
        "request_seconds_count": 2,
        "batch_texts_sum": len(TEXTS),
        "batch_tokens_sum": tokens,
        "forward_seconds_count": 1,
        "failed_forwards_total": 0,
        "waiting_texts": 0,
        "ready": 1,
    }
    assert {name: float(lines[f"openrlhf_reward_{name}"]) for name in wanted} == wanted


def test_a_score_that_is_no_number_is_an_error_and_never_json(model) -> None:
    head = model.model.score.weight
    broken = dataclasses.replace(model)
    kept = head.data.clone()
    head.data.fill_(float("nan"))
    try:
        status, said = ask(lambda: broken, lambda client: client.post({"query": TEXTS}))
    finally:
        head.data.copy_(kept)
    assert (status, said) == (500, {"detail": "query[0]: the model's score is nan, which is no reward"})


def test_an_address_that_cannot_be_had_is_refused_in_one_sentence() -> None:
    with listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port)
    wanted = f"--host 127.0.0.1 --port {port}: cannot listen there (Address already in use); take another."
    assert str(caught.value) == wanted
    with pytest.raises(ConfigError, match="--host no.such.host.invalid --port 5000: cannot listen there"):
        listen("no.such.host.invalid", 5000)


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_sentence(folder, tmp_path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())

    async def main() -> None:
        async with serving(lambda: load(tmp_path)):
            pass

    with pytest.raises(ConfigError, match="no tokenizer can be loaded from"):
        asyncio.run(main())
