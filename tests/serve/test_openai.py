"""OpenAI's completions and chat completions: the texts of ``model.generate`` at the same settings and seeds."""

from __future__ import annotations

from typing import Any

import pytest
from served import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TALK = [{"role": "user", "content": "the thing"}]


def chunks_of(events: list[Any]) -> list[Any]:
    return [data for _, data in events]


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [choice for data in chunks_of(events) for choice in data["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" if "delta" in choice else choice["text"] for choice in choices)


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_p": 0.8, "top_k": 40, "min_p": 0.01},
    {"temperature": 1, "seed": 5, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": {"3": 2.0}},
    {"temperature": 0, "repetition_penalty": 1.3, "ignore_eos": True, "min_tokens": 4},
]
# the names of Python's options where they differ
OURS = {"min_tokens": "min_new_tokens"}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_text_is_that_of_generate(server: Server, settings: dict[str, Any]) -> None:
    options = {OURS.get(name, name): value for name, value in settings.items()}
    if "logit_bias" in options:
        options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
    expected = server.reference.generate("the thing", max_new_tokens=20, **options)
    body = {"prompt": "the thing", "max_tokens": 20, **settings}
    (choice,) = server.ask(COMPLETIONS, **body)["choices"]
    assert choice["text"] == expected.text
    assert choice["finish_reason"] == expected.finish_reason
    assert text_of(server.events(COMPLETIONS, **body)) == expected.text

    expected = server.reference.chat(TALK, max_new_tokens=20, **options)
    body = {"messages": TALK, "max_completion_tokens": 20, **settings}
    found = server.ask(CHAT, **body)
    assert found["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_ids)
    assert found["usage"]["completion_tokens"] == len(expected.token_ids)
    assert text_of(server.events(CHAT, **body)) == expected.text


def test_samples_and_several_prompts(server: Server) -> None:
    prompts = ["the thing", "a river"]
    body: dict[str, Any] = {"prompt": prompts, "n": 2, "temperature": 1, "seed": 7, "max_tokens": 8}
    expected = server.reference.generate(prompts, n=2, temperature=1.0, seed=7, max_new_tokens=8)
    texts = [result.text for samples in expected for result in samples]
    found = server.ask(COMPLETIONS, **body)
    assert [choice["text"] for choice in found["choices"]] == texts
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    events = server.events(COMPLETIONS, **body)
    assert [text_of(events, index) for index in range(4)] == texts
    ids = [server.reference.tokenizer.encode(prompt) for prompt in prompts]
    assert [choice["text"] for choice in server.ask(COMPLETIONS, **{**body, "prompt": ids})["choices"]] == texts
    one = server.ask(COMPLETIONS, **{**body, "prompt": ids[0]})["choices"]
    assert [choice["text"] for choice in one] == texts[:2]


def test_an_unset_seed_is_random_and_an_unset_temperature_is_one(server: Server) -> None:
    body = {"prompt": "the thing", "max_tokens": 16}
    texts = {server.ask(COMPLETIONS, **body)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


def test_stop_strings_end_the_text(server: Server) -> None:
    whole = server.reference.generate("the thing", max_new_tokens=20).text
    stop = next(letter for letter in whole[3:] if letter.isascii() and letter.isalnum())
    expected = server.reference.generate("the thing", max_new_tokens=20, stop=stop)
    for given in (stop, [stop]):
        body = {"prompt": "the thing", "max_tokens": 20, "temperature": 0, "stop": given}
        (choice,) = server.ask(COMPLETIONS, **body)["choices"]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected.text, "stop", stop)
        events = server.events(COMPLETIONS, **body)
        assert text_of(events) == expected.text
        assert events[-1][1]["choices"][0]["stop_reason"] == stop


def test_usage_and_statistics(server: Server) -> None:
    body: dict[str, Any] = {"messages": TALK, "temperature": 0, "max_tokens": 12}
    found = server.ask(CHAT, **body)
    usage, speculation = found["usage"], found["metrics"]["speculative_decoding"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert sum(speculation["acceptance_histogram"]) == speculation["num_spec_steps"]
    assert speculation["mean_acceptance_length"] == pytest.approx(
        usage["completion_tokens"] / speculation["num_spec_steps"], abs=1e-3
    )
    assert "usage" not in server.events(CHAT, **body)[-1][1]
    *chunks, last = chunks_of(server.events(CHAT, **body, stream_options={"include_usage": True}))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], usage["completion_tokens"])
    assert all(chunk["usage"] is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(server.events(CHAT, **body, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == usage["completion_tokens"]


def test_a_prompt_that_begins_alike_is_read_from_a_cache(server: Server) -> None:
    body = {"prompt": "a long beginning that two requests share: first", "temperature": 0, "max_tokens": 4}
    server.ask(COMPLETIONS, **body)
    again = server.ask(COMPLETIONS, **{**body, "prompt": "a long beginning that two requests share: second"})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


def test_log_probs_of_chat(server: Server) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 2}
    expected = server.reference.chat(TALK, max_new_tokens=6, log_probs=True, top_log_probs=3, **options)
    body = {"messages": TALK, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **options}
    content = server.ask(CHAT, **body)["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected.log_probs, abs=1e-5)
    assert [[one["logprob"] for one in entry["top_logprobs"]] for entry in content] == [
        pytest.approx(list(top.values()), abs=1e-5) for top in expected.top_log_probs
    ]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode(errors="replace").startswith(expected.text)
    streamed = [
        entry
        for data in chunks_of(server.events(CHAT, **body))
        for choice in data["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    # drafts are sized by time, and sums over fewer or more rows round in other ways
    for entry, same in zip(streamed, content, strict=True):
        assert entry["bytes"] == same["bytes"]
        assert entry["logprob"] == pytest.approx(same["logprob"], abs=1e-5)
        for one, other in zip(entry["top_logprobs"], same["top_logprobs"], strict=True):
            assert (one["bytes"], one["logprob"]) == (other["bytes"], pytest.approx(other["logprob"], abs=1e-5))
    refused = server.post(CHAT, messages=TALK, top_logprobs=3)
    assert refused.status_code == 400


def test_log_probs_of_a_prompt_as_evaluations_ask_for_them(server: Server) -> None:
    ids = server.reference.tokenizer.encode("the thing is here")
    expected = server.reference.score(ids)
    body = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    (choice,) = server.ask(COMPLETIONS, **body)["choices"]
    said = choice["logprobs"]
    assert said["token_logprobs"][0] is None
    assert said["token_logprobs"][1:-1] == pytest.approx(expected.log_probs, abs=1e-5)
    assert len(said["tokens"]) == len(said["top_logprobs"]) == len(said["text_offset"]) == len(ids) + 1
    assert choice["text"].startswith("the thing is here")
    best = server.reference.generate(ids, max_new_tokens=1, log_probs=True)
    assert said["token_logprobs"][-1] == pytest.approx(best.log_probs[0], abs=1e-5)
    for value, top in zip(said["token_logprobs"][1:], said["top_logprobs"][1:], strict=True):
        assert value <= max(top.values())
    only = server.ask(COMPLETIONS, **{**body, "max_tokens": 0})["choices"][0]
    assert only["logprobs"]["token_logprobs"][1:] == pytest.approx(said["token_logprobs"][1:-1], abs=1e-5)
    assert only["text"] == "the thing is here"


def test_without_drafts(server: Server) -> None:
    body = {"prompt": "the thing", "temperature": 0, "max_tokens": 12}
    drafted, plain = (server.ask(COMPLETIONS, **body, drafter=drafter) for drafter in ("auto", "none"))
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert server.post(COMPLETIONS, **body, drafter="rest:path=/etc/passwd").status_code == 400


def test_unknown_fields_are_named_and_unsupported_ones_refused(server: Server) -> None:
    body = {"messages": TALK, "max_tokens": 2, "user": "me", "some_hint": 3, "best_of": 1, "suffix": None}
    response = server.post(CHAT, **body)
    assert response.status_code == 200
    assert response.headers["x-anabranch-ignored"] == "some_hint, user"
    strange = {"hint\r\nx-injected: é": 1, **{f"n{number:03}": 1 for number in range(200)}}
    named = server.post(CHAT, messages=TALK, max_tokens=2, **strange).headers
    assert "x-injected" not in named
    assert named["x-anabranch-ignored"].startswith("hint??x-injected:??, n000, n001")
    assert len(named["x-anabranch-ignored"]) < 3000
    for field, value in {"best_of": 3, "use_beam_search": True, "typical_p": 0.4, "modalities": ["audio"]}.items():
        refused = server.post(CHAT, messages=TALK, **{field: value})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert field in refused.json()["error"]["message"]
    assert server.post(COMPLETIONS, prompt="x", suffix="y").json()["error"]["param"] == "suffix"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (CHAT, {"messages": []}, "messages: list should have at least 1 item"),
        (CHAT, {"messages": TALK, "temperature": "hot"}, "temperature: input should be a valid number"),
        (CHAT, {"messages": TALK, "temperature": -1}, "temperature must be 0 (greedy) or a positive number, got -1.0"),
        (CHAT, {"messages": TALK, "max_tokens": 0}, "max_tokens: input should be greater than or equal to 1"),
        (CHAT, {"messages": TALK, "n": 3, "temperature": 0}, "n=3 samples are all the same"),
        (CHAT, {"messages": [{"content": "x"}]}, "the role of a message must be one of"),
        (CHAT, {"messages": [{"role": "model", "content": "x"}]}, "tool, function, got 'model'"),
        (CHAT, {"messages": [{"role": "user"}]}, "a message of the user must have a content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        (CHAT, {"messages": TALK, "logit_bias": {"x": 1}}, "logit_bias has a key that is no token id"),
        (CHAT, {"messages": TALK, "logit_bias": {"3": "1"}}, "logit_bias has '1', which is no finite number"),
        (CHAT, {"messages": TALK, "logit_bias": {"3": 10**400}}, "a value that is too large"),
        (CHAT, {"messages": TALK, "logit_bias": {"70000": 1}}, "logit_bias has the token id 70000"),
        (COMPLETIONS, {"prompt": ""}, "the prompt is empty"),
        (COMPLETIONS, {"prompt": [70000]}, "70000"),
        (COMPLETIONS, {"prompt": ["x", [1]]}, "prompt"),
        (COMPLETIONS, {}, "prompt: field required"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1 without echo"),
        (COMPLETIONS, {"prompt": "the " * 4000}, "but the model's context is"),
    ],
)
def test_mistakes_are_named(server: Server, path: str, body: dict[str, Any], said: str) -> None:
    response = server.post(path, **body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_models_and_names(server: Server) -> None:
    found = server.client.get("/v1/models").json()["data"]
    assert [model["id"] for model in found] == ["toy", "alias"]
    assert server.client.get("/v1/models/alias").json()["id"] == "alias"
    for name in ("toy", "alias", "claude-sonnet-9"):
        assert server.ask(COMPLETIONS, model=name, prompt="x", max_tokens=1)["model"] == name
    missing = server.post(COMPLETIONS, model="gpt-9", prompt="x")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    embeddings = server.post("/v1/embeddings", input="x")
    assert embeddings.status_code == 400  # clients would try again after a 5xx
    assert "/v1/embeddings" in embeddings.json()["error"]["message"]
    assert server.client.get("/nowhere").json()["error"]["message"] == "there is no /nowhere here"
    for path, hint in (
        ("/chat/completions", "let the base URL end in /v1, for /v1/chat/completions"),
        ("/v1/v1/messages", "leave one /v1 out of the base URL, for /v1/messages"),
    ):
        assert server.post(path).json()["error"]["message"] == f"there is no {path} here; {hint}"
    empty = server.post(CHAT, messages=[]).json()["error"]["message"]
    assert empty == "messages: list should have at least 1 item, not 0"
    assert server.client.head("/health").status_code == 200
    refused = server.client.get(CHAT)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


def test_the_openapi_document_describes_all_interfaces(server: Server) -> None:
    document = server.client.get("/openapi.json").json()
    assert all(
        {"4XX", "5XX"} <= set(each["responses"]) for path in document["paths"].values() for each in path.values()
    )
    assert "text/plain" in document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")
    for path in paths:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert ("text/event-stream" in content) is (path != "/v1/messages/count_tokens")
        (reference,) = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].values()
        assert "temperature" in document["components"]["schemas"][reference.rsplit("/", 1)[-1]]["properties"]


def test_tokens_and_texts(server: Server) -> None:
    tokenizer = server.reference.tokenizer
    found = server.ask("/tokenize", prompt="the thing", return_token_strs=True)
    assert found["tokens"] == tokenizer.encode("the thing")
    assert (found["count"], "".join(found["token_strs"])) == (len(found["tokens"]), "the thing")
    assert server.ask("/tokenize", content="the thing")["tokens"] == found["tokens"]
    assert server.ask("/tokenize", messages=TALK)["tokens"] == server.reference.chat_ids(TALK)
    assert server.ask("/detokenize", tokens=found["tokens"])["prompt"] == "the thing"
    assert server.post("/detokenize", tokens=[-1]).status_code == 400
    assert server.post("/tokenize").status_code == 400


def test_health_properties_slots_and_metrics(server: Server) -> None:
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/slots").json() == []
    props = server.client.get("/props").json()
    assert (props["total_slots"], props["n_ctx"]) == (8, server.service.context)
    before = metrics(server)
    found = server.ask(COMPLETIONS, prompt="the thing", temperature=0, max_tokens=9)
    after = metrics(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    label = '{model_name="toy"}'
    assert grown(f"vllm:generation_tokens_total{label}") == 9
    assert grown(f"vllm:prompt_tokens_total{label}") == found["usage"]["prompt_tokens"]
    assert grown('vllm:request_success_total{finished_reason="length",model_name="toy"}') == 1
    assert grown(f"vllm:time_to_first_token_seconds_count{label}") == 1
    speculation = found["metrics"]["speculative_decoding"]
    assert grown(f"vllm:spec_decode_num_draft_tokens_total{label}") == speculation["num_draft_tokens"]
    assert grown(f"vllm:spec_decode_num_accepted_tokens_total{label}") == speculation["num_accepted_draft_tokens"]
    assert grown(f"anabranch:steps_total{label}") == speculation["num_spec_steps"]
    assert after[f"vllm:num_requests_running{label}"] == 0


def metrics(server: Server) -> dict[str, float]:
    lines = server.client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}
