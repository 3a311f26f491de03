"""Reward servers, real ones on this machine: what is sent, what answers mean, and how failing servers are met."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from openrlhf.agents import reward_http
from openrlhf.agents.reward import PythonRewardSource, RewardFailure, RewardResult
from openrlhf.agents.reward_http import HttpRewardSource, make_reward_source, parse_urls
from openrlhf.config.errors import ConfigError

Handler = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_http, "FIRST_WAIT_S", 0.01)


class Server:
    """Answers with what ``handler`` makes of a request: JSON, or a response as it is. Keeps the requests."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[dict[str, Any]] = []

    async def __aenter__(self) -> Server:
        async def answer(request: web.Request) -> web.StreamResponse:
            body = await request.json()
            self.requests.append(body)
            made = self._handler(body)
            if isinstance(made, Awaitable):
                made = await made
            return made if isinstance(made, web.StreamResponse) else web.json_response(made)

        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_post("/get_reward", answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/get_reward"
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._runner.cleanup()


def ask(
    handlers: Handler | list[Handler], labels: list[Any], *, query: str = "question answer", **options: Any
) -> tuple[list[Any], list[Server]]:
    """Scores one sample for each label, all at once; every handler is a server."""

    async def main() -> tuple[list[Any], list[Server]]:
        async with asyncio.timeout(30), contextlib.AsyncExitStack() as stack:
            made = [handlers] if callable(handlers) else handlers
            servers = [await stack.enter_async_context(Server(handler)) for handler in made]
            source = HttpRewardSource([server.url for server in servers], **{"max_retries": 0, **options})
            await source.start()
            try:
                outcomes = await asyncio.gather(*[source.score(query, "question", label) for label in labels])
            finally:
                await source.close()
            return outcomes, servers

    return asyncio.run(main())


def labels_as_rewards(body: dict[str, Any]) -> dict[str, Any]:
    return {"rewards": body["labels"]}


def unused_url() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}/get_reward"


def test_samples_that_come_together_share_a_request_of_the_documented_form() -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        return {"rewards": body["labels"], "scores": [0.0, None, 1.0], "extra_logs": {"a": [1, 2, 3], "b": 4}}

    outcomes, (server,) = ask(answer, [0.5, 0.25, 2])
    assert server.requests == [
        {"query": ["question answer"] * 3, "prompts": ["question"] * 3, "labels": [0.5, 0.25, 2]}
    ]
    assert outcomes == [
        RewardResult(0.5, 0.0, {"a": 1.0, "b": 4.0}),
        RewardResult(0.25, 0.25, {"a": 2.0, "b": 4.0}),
        RewardResult(2.0, 1.0, {"a": 3.0, "b": 4.0}),
    ]


def test_many_samples_are_shared_out_over_requests_and_none_is_lost() -> None:
    outcomes, (server,) = ask(labels_as_rewards, [float(n) for n in range(300)])
    assert [outcome.reward for outcome in outcomes] == [float(n) for n in range(300)]
    assert max(len(body["query"]) for body in server.requests) <= reward_http.MAX_SAMPLES
    assert len(server.requests) <= 8


def test_long_texts_arrive_whole_and_do_not_share_a_request() -> None:
    query = "<pad>" * 2000 + "word</s>" * 50_000 + "</s>" * 2000
    outcomes, (server,) = ask(labels_as_rewards, [1.0, 2.0], query=query)
    assert [outcome.reward for outcome in outcomes] == [1.0, 2.0]
    assert [body["query"] for body in server.requests] == [[query], [query]]


@pytest.mark.parametrize("label", [None, "text", {"answer": [1, 2]}, "Grüße", 3.5])
def test_labels_keep_their_json_type(label: Any) -> None:
    _, (server,) = ask(lambda body: {"rewards": [1.0]}, [label])
    assert server.requests[0]["labels"] == [label]


USELESS: list[tuple[Handler, str]] = [
    (lambda _: {"rewards": [1.0, 2.0]}, "'rewards': expected 1 values, one for each query, found 2"),
    (lambda _: {"rewards": []}, "found 0"),
    (lambda _: {"rewards": ["high"]}, "'rewards' holds 'high', not a number"),
    (lambda _: {"reward": [1.0]}, "no 'rewards' in what was returned, only ['reward']"),
    (lambda _: {"rewards": [1.0], "scores": [1.0, 0.0]}, "'scores': expected 1 values"),
    (lambda _: [1.0], "a JSON object with 'rewards' is expected, found '[1.0]'"),
    (
        lambda _: web.Response(text="<html>\n <body>Bad  gateway</body></html>", content_type="text/html"),
        "answered with no JSON: '<html> <body>Bad gateway</body></html>'",
    ),
    (lambda _: web.Response(text=""), "answered with no JSON: nothing"),
    (lambda _: web.Response(status=500, text="out of memory"), "answered with status 500: 'out of memory'"),
    (lambda _: web.Response(status=413), "answered with status 413: nothing"),
    (lambda _: web.Response(status=302, headers={"Location": "/login"}), "answered with status 302"),
]


@pytest.mark.parametrize(("handler", "message"), USELESS)
def test_an_answer_that_gives_no_reward_is_one_reason_that_names_the_server(handler: Handler, message: str) -> None:
    (outcome,), (server,) = ask(handler, [1.0])
    assert isinstance(outcome, RewardFailure)
    assert outcome.reason.startswith(f"reward server {server.url} answered")
    assert message in outcome.reason
    assert "\n" not in outcome.reason


def test_nan_fails_its_own_sample_alone() -> None:
    def answer(body: dict[str, Any]) -> web.Response:
        return web.Response(text=json.dumps({"rewards": [float("nan"), 1.0]}))

    outcomes, _ = ask(answer, [0, 1])
    assert outcomes == [RewardFailure("the reward is nan"), RewardResult(1.0, 1.0)]


def test_one_sample_that_a_server_cannot_take_does_not_take_the_others_along() -> None:
    def answer(body: dict[str, Any]) -> Any:
        return web.Response(status=500) if "bad" in body["labels"] else {"rewards": [1.0] * len(body["labels"])}

    outcomes, _ = ask(answer, ["good", "bad", "good"], max_retries=2)
    assert [isinstance(outcome, RewardResult) for outcome in outcomes] == [True, False, True]
    assert outcomes[1].reason.endswith("answered with status 500: nothing (in 3 tries)")


def test_a_server_that_recovers_is_asked_again() -> None:
    answers = [web.Response(status=503), web.Response(status=503), {"rewards": [0.5]}]
    (outcome,), (server,) = ask(lambda _: answers.pop(0), [1.0], max_retries=2)
    assert outcome == RewardResult(0.5, 0.5)
    assert len(server.requests) == 3


def test_a_server_that_does_not_answer_is_left_after_the_time_out() -> None:
    (outcome,), (server,) = ask(lambda _: asyncio.sleep(20), [1.0], timeout=0.2)
    assert outcome.reason == f"reward server {server.url} gave no reward; given up after 0.2 s (--reward.timeout)"
    (outcome,), (server,) = ask(lambda _: asyncio.sleep(20), [1.0], timeout=0.2, max_retries=1)
    assert outcome.reason.startswith(f"reward server {server.url} took longer than 0.2 s (--reward.timeout)")


def test_a_server_that_hangs_up_is_a_failure() -> None:
    async def hang_up(request: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        source = HttpRewardSource([url], max_retries=1)
        await source.start()
        try:
            return await source.score("q", "p", None), url
        finally:
            await source.close()
            server.close()

    outcome, url = asyncio.run(main())
    assert outcome.reason.startswith(f"reward server {url} cannot be asked: Server")
    assert outcome.reason.endswith("(in 2 tries)")


async def score_in_turn(urls: list[str], count: int, **options: Any) -> list[Any]:
    source = HttpRewardSource(urls, **options)
    await source.start()
    try:
        return [await source.score("q", "p", float(number)) for number in range(count)]
    finally:
        await source.close()


def test_servers_are_used_in_turn() -> None:
    async def main() -> list[int]:
        async with Server(labels_as_rewards) as first, Server(labels_as_rewards) as second:
            await score_in_turn([first.url, second.url], 6)
            return [len(first.requests), len(second.requests)]

    assert asyncio.run(main()) == [3, 3]


def test_a_failing_server_rests_and_the_others_do_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_http, "FIRST_WAIT_S", 5.0)
    monkeypatch.setattr(HttpRewardSource, "_wait", lambda self, tried: 0.0)

    async def main() -> tuple[list[Any], int]:
        async with Server(lambda _: web.Response(status=500)) as bad, Server(labels_as_rewards) as good:
            return await score_in_turn([bad.url, good.url], 8, max_retries=1), len(bad.requests)

    outcomes, asked = asyncio.run(main())
    assert [outcome.reward for outcome in outcomes] == [float(n) for n in range(8)]
    assert asked == 1


def test_one_server_that_is_down_at_the_start_is_no_hindrance() -> None:
    async def main() -> list[Any]:
        async with Server(labels_as_rewards) as good:
            return await score_in_turn([unused_url(), good.url], 4, max_retries=2)

    assert [outcome.reward for outcome in asyncio.run(main())] == [0.0, 1.0, 2.0, 3.0]


def test_no_server_at_the_start_is_one_sentence() -> None:
    url = unused_url()
    with pytest.raises(ConfigError, match="--reward.remote_url: no reward server takes connections") as caught:
        asyncio.run(score_in_turn([url], 1, patience=0.05))
    assert url in str(caught.value)


def test_closing_ends_samples_under_way_as_failures() -> None:
    async def main() -> Any:
        async with Server(lambda _: asyncio.sleep(20)) as server:
            source = HttpRewardSource([server.url], max_retries=0)
            await source.start()
            task = asyncio.create_task(source.score("q", "p", None))
            while not server.requests:
                await asyncio.sleep(0.01)
            await source.close()
            return await task

    assert asyncio.run(main()) == RewardFailure("the reward source was closed")


def test_a_label_that_is_no_json_is_a_failure() -> None:
    (outcome,), _ = ask(labels_as_rewards, [object()])
    assert "a label cannot be sent as JSON" in outcome.reason


def test_addresses_come_as_a_list_or_with_commas() -> None:
    expected = ["http://a:1/r", "https://b/r"]
    assert parse_urls("http://a:1/r, https://b/r") == expected
    assert parse_urls(expected) == expected


@pytest.mark.parametrize(
    "given", ["http://", "ftp://a/r", "http://a:port/r", "http://a:1/r,reward.py", "", ["http://[a"]]
)
def test_what_is_no_address_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="^--reward.remote_url"):
        parse_urls(given)


def test_the_kind_of_source_follows_from_the_flag() -> None:
    assert isinstance(make_reward_source("http://a:1/r,http://b:1/r"), HttpRewardSource)
    assert isinstance(make_reward_source("folder/reward.py"), PythonRewardSource)
    with pytest.raises(ConfigError, match="is no address"):
        make_reward_source("http://a:1/r,reward.py")
    with pytest.raises(ConfigError, match="takes one Python file, found 2"):
        make_reward_source(["a.py", "b.py"])


def busy_first(times: int, *, after: str = "0") -> Handler:
    """Has no room for so many requests, and then gives labels as rewards."""
    left = [times]

    def answer(body: dict[str, Any]) -> Any:
        left[0] -= 1
        full = web.Response(status=503, headers={"Retry-After": after}, text="full")
        return full if left[0] >= 0 else labels_as_rewards(body)

    return answer


def test_a_server_without_room_is_asked_again_when_it_said_and_that_is_no_failed_try() -> None:
    outcomes, (server,) = ask(busy_first(5), [1.0, 2.0], max_retries=0)
    assert [outcome.reward for outcome in outcomes] == [1.0, 2.0]
    assert len(server.requests) == 6 and all(len(body["query"]) == 2 for body in server.requests)


def test_where_one_server_has_no_room_the_next_one_is_asked_at_once() -> None:
    outcomes, (full, free) = ask([busy_first(99, after="30"), labels_as_rewards], [1.0], max_retries=0)
    assert outcomes[0].reward == 1.0 and len(full.requests) == len(free.requests) == 1


@pytest.mark.parametrize("after", ["30", "0"])
def test_a_server_that_never_has_room_fails_the_sample_once_its_time_is_over(after: str) -> None:
    (outcome,), _ = ask(busy_first(10_000, after=after), [1.0], max_retries=0, timeout=0.3)
    assert isinstance(outcome, RewardFailure) and "answered with status 503: 'full'" in outcome.reason


def test_waiting_for_room_does_not_add_to_the_time_that_all_tries_of_a_sample_have() -> None:
    full = [True] * 3

    def answer(_: dict[str, Any]) -> Any:
        return web.Response(status=503, headers={"Retry-After": "0"}) if full and full.pop() else asyncio.sleep(20)

    # The tries that hang have a second each, and begin after some waiting.
    (outcome,), (server,) = ask(answer, [1.0], max_retries=1, timeout=1.0)
    assert outcome.reason == (
        f"reward server {server.url} took longer than 1 s (--reward.timeout); given up after 2 s "
        "(--reward.timeout x (1 + --reward.max_retries))"
    )
    assert len(server.requests) == 5


def test_a_key_is_sent_to_every_server() -> None:
    seen = []

    async def main() -> Any:
        async def answer(request: web.Request) -> web.Response:
            seen.append(request.headers.get("Authorization"))
            return web.json_response({"rewards": [1.0]})

        app = web.Application()
        app.router.add_post("/get_reward", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        source = make_reward_source(f"http://127.0.0.1:{runner.addresses[0][1]}/get_reward", key="sesame")
        await source.start()
        try:
            return await source.score("a query", "a prompt", None)
        finally:
            await source.close()
            await runner.cleanup()

    assert asyncio.run(main()).reward == 1.0 and seen == ["Bearer sesame"]
