"""The Ray Serve application on real Ray: two replicas of a toy, one of which is stopped and killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import anabranch
from toy_text import ToyFolders, toy_model

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

from ray import serve  # noqa: E402

from anabranch.integrations.ray_serve import Asked, Config, Replica, build, routing_key  # noqa: E402
from anabranch.serve.settings import Settings  # noqa: E402

CHAT = "/v1/chat/completions"
ROWS = 2


def talk(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


class Cluster:
    """The application at work, and what it is expected to answer."""

    def __init__(self, url: str, model: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=300)
        self.config: dict[str, Any] = {
            "model": model,
            "loading": {"drafter": "none"},
            "replicas": 2,
            "settings": {"rows": ROWS, "queue": 64, "drain_seconds": 10},
        }
        self.reference = anabranch.load(model, drafter="none")

    def ask(self, text: str, **headers: str) -> httpx.Response:
        return self.client.post(CHAT, json=talk(text), headers=headers)

    def expected(self, text: str) -> str:
        return self.reference.chat(talk(text)["messages"], max_new_tokens=12, ignore_eos=True).text

    def check(self, text: str, response: httpx.Response) -> None:
        assert response.status_code == 200, response.text
        assert [each["message"]["content"] for each in response.json()["choices"]] == [self.expected(text)]

    def process(self, text: str) -> int:
        """The process that a conversation is routed to."""
        return int(self.ask(text).headers["x-anabranch-replica"].rpartition(":")[2])

    def two(self) -> tuple[list[str], list[str], int]:
        """Conversations of one replica, those of the other, and the process of the first."""
        texts = [f"talk {number}" for number in range(16)]
        homes = {text: self.process(text) for text in texts}
        first = homes[texts[0]]
        return [t for t in texts if homes[t] == first], [t for t in texts if homes[t] != first], first


@pytest.fixture(scope="module")
def cluster(local_ray: None, toys: ToyFolders) -> Iterator[Cluster]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    made = Cluster(f"http://127.0.0.1:{port}", str(toys.model))
    serve.run(build(made.config))
    yield made
    made.reference.close()
    made.client.close()
    serve.shutdown()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("the condition did not become true")


def test_answers_are_the_models_and_conversations_keep_their_replica(cluster: Cluster) -> None:
    mine, others, _ = cluster.two()
    assert mine
    assert others
    for text in (mine[0], others[0]):
        cluster.check(text, cluster.ask(text))
        longer = talk(text)
        longer["messages"] += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        homes = [cluster.client.post(CHAT, json=each).headers["x-anabranch-replica"] for each in (talk(text), longer)]
        assert homes[0] == homes[1]
    sessions = {cluster.ask(text, **{"x-session-id": "s"}).headers["x-anabranch-replica"] for text in (*mine, *others)}
    assert len(sessions) == 1
    assert cluster.client.post(CHAT, json={**talk("a"), "top_p": 7}).status_code == 400
    assert cluster.client.get("/v1/models").json()["data"][0]["id"] == "model"


def test_a_replica_that_is_killed_under_load(cluster: Cluster) -> None:
    """What it had not begun to answer is answered by the other, once; a stream that had begun ends with an error."""
    mine, others, process = cluster.two()
    body = {**talk(mine[0]), "stream": True, "max_tokens": 60}
    with cluster.client.stream("POST", CHAT, json=body) as streamed, ThreadPoolExecutor(16) as pool:
        lines = streamed.iter_lines()
        begun = next(line for line in lines if line)
        os.kill(process, signal.SIGSTOP)  # it takes requests and answers none
        asked: dict[str, Future[httpx.Response]] = {}
        try:
            asked = {text: pool.submit(cluster.ask, text) for text in (*mine, *others)}
            for text in others:
                cluster.check(text, asked[text].result())
            time.sleep(0.5)
            waiting = [text for text in mine if not asked[text].done()]
        finally:
            os.kill(process, signal.SIGKILL)
        assert len(waiting) >= 1
        for text in mine:
            response = asked[text].result()
            cluster.check(text, response)
            if text in waiting:
                assert not response.headers["x-anabranch-replica"].endswith(f":{process}")
        events = [json.loads(line.removeprefix("data: ")) for line in (begun, *lines) if line.startswith("data: {")]
    # all of the short text may have been sent before the replica was stopped
    last = events[-1]
    assert "error" in last or last["choices"][0]["finish_reason"] == "length"
    assert sum("error" in event or event["choices"][0]["finish_reason"] is not None for event in events) == 1
    until(lambda: len({cluster.process(f"again {number}") for number in range(12)}) == 2)  # Ray has replaced it


def test_an_update_under_load_loses_nothing(cluster: Cluster) -> None:
    changed = {**cluster.config, "settings": {**cluster.config["settings"], "names": ["new"]}}
    done = False

    def asking(text: str) -> int:
        count = 0
        while not done or count < 3:
            cluster.check(text, cluster.ask(text))
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(asking, f"update {number}") for number in range(4)]
        serve.run(build(changed))
        done = True
        assert min(each.result() for each in asked) >= 3
    assert cluster.client.get("/v1/models").json()["data"][0]["id"] == "new"


def test_replicas_follow_the_queue(cluster: Cluster) -> None:
    more = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 1,
        "upscale_delay_s": 0.2,
        "downscale_delay_s": 1,
    }
    serve.run(build({**cluster.config, "replicas": {**more, "metrics_interval_s": 0.1, "look_back_period_s": 0.3}}))
    until(lambda: len({cluster.process(f"few {number}") for number in range(8)}) == 1)
    homes: set[str] = set()

    def asking(text: str) -> None:
        limit = time.monotonic() + 300
        while len(homes) < 2 and time.monotonic() < limit:
            homes.add(cluster.ask(text).headers["x-anabranch-replica"])

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(asking, [f"many {number}" for number in range(12)]))
    assert len(homes) == 2


def test_a_replica_that_cannot_decode_is_unhealthy() -> None:
    async def scenario() -> None:
        replica = Replica.__new__(Replica)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("anabranch.api.load", lambda **_: toy_model())
            await replica.__init__({}, Settings())  # type: ignore[misc]
        replica.check_health()
        scheduler = replica._model.scheduler
        scheduler.tick = None  # a defect of the program
        body = json.dumps(talk("a")).encode()
        headers = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
        scope = {"method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "headers": headers}
        parts = [part async for part in replica.answer(Asked(scope, body))]
        assert parts[0][0]["status"] == 500
        with pytest.raises(RuntimeError, match="decoding ended"):
            replica.check_health()
        await replica.__del__()

    asyncio.run(scenario())


def test_keys_are_those_of_conversations() -> None:
    def key(headers: dict[str, str] | None = None, **fields: Any) -> str:
        return routing_key(headers or {}, json.dumps(fields).encode())

    user, system = {"role": "user", "content": "a"}, {"role": "system", "content": "s"}
    turns = [system, user]
    assert key(messages=turns) == key(messages=[*turns, {"role": "assistant", "content": "b"}, user], temperature=1)
    assert key(messages=turns) != key(messages=[user])
    assert key(messages=[user], system="x") != key(messages=[user], system="y")
    billing = [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "x"}]
    assert key(messages=[user], system=billing) == key(messages=[user], system=[billing[1]])
    assert key(prompt="a" * 2000) == key(prompt="a" * 3000) != key(prompt="b")
    assert key(prompt=[1, 2]) != key(prompt=[1, 3])
    assert key({"x-session-id": "s"}, prompt="a") == "s"
    assert key(prompt_cache_key="c", input="a") == "c"
    for wrong in (b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": [{}, 3]}', b'{"system": 3}', b"\xff"):
        assert isinstance(routing_key({}, wrong), str)


def test_mistakes_in_the_configuration_are_named() -> None:
    with pytest.raises(ValueError, match="modle"):
        build({"modle": "default"})
    with pytest.raises(ValueError, match="rows"):
        Config(settings={"rows": "many"})  # type: ignore[arg-type]
