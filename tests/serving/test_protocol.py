"""What is asked becomes the engine's request, or a refusal that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from twofold.ops.sampling import Sampling
from twofold.serving.protocol import ApiError, parse_chat, parse_completion, to_request

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def body(**fields: Any) -> bytes:
    return json.dumps({**HELLO, **fields}).encode()


def test_defaults_are_the_apis() -> None:
    call = parse_chat(body(temperature=0))
    assert call.sampling == Sampling()
    assert (call.max_tokens, call.stop, call.stream, call.logprobs) == (None, (), False, False)
    assert parse_chat(body()).sampling.temperature == 1.0
    assert parse_completion(b'{"model": "m", "prompt": "x"}').max_tokens == 16


def test_without_a_seed_every_call_draws_its_own() -> None:
    assert parse_chat(body()).sampling.seed != parse_chat(body()).sampling.seed
    assert [parse_chat(body(seed=seed)).sampling.seed for seed in (7, -7)] == [7, -7]
    assert parse_chat(body(temperature=0)).sampling.seed == 0


def test_all_fields_arrive() -> None:
    call = parse_chat(
        body(
            temperature=0.5,
            top_p=0.9,
            top_k=20,
            min_p=0.1,
            seed=3,
            stop=["a", "b"],
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
            ignore_eos=True,
        )
    )
    assert call.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=20, min_p=0.1, seed=3)
    assert (call.stop, call.max_tokens) == (("a", "b"), 5)
    assert call.stream
    assert call.include_usage
    assert call.logprobs
    assert call.ignore_eos


def test_other_spellings() -> None:
    assert parse_chat(body(stop="x")).stop == ("x",)
    assert parse_chat(body(top_k=-1)).sampling.top_k == 0
    assert parse_chat(body(max_completion_tokens=9, max_tokens=5)).max_tokens == 9
    assert parse_chat(body(temperature=None, stop=None, seed=None)).sampling.temperature == 1.0
    developer = parse_chat(body(messages=[{"role": "developer", "content": "x"}]))
    assert developer.messages == ({"role": "system", "content": "x"},)
    for prompt, expected in (("x", "x"), (["x"], "x"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2))):
        assert parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode()).prompt == expected
    for given, wanted in ((None, False), (False, False), (True, True), (0, True)):
        call = parse_completion(json.dumps({"model": "m", "prompt": "x", "logprobs": given}).encode())
        assert call.logprobs is wanted


def test_neutral_and_unheard_of_fields_pass() -> None:
    parse_chat(
        body(
            n=1,
            presence_penalty=0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            top_logprobs=0,
            logit_bias={},
            tools=[],
            tool_choice="none",
            response_format={"type": "text"},
            user="someone",
            metadata={"a": "b"},
        )
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", None),
        ("messages", []),
        ("messages", "hello"),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", [{"role": ["user"], "content": "x"}]),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}]),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("top_k", -2),
        ("min_p", 2),
        ("min_p", 1),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_completion_tokens", 0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", {"a": "b"}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("logprobs", 3),
        ("n", 2),
        ("best_of", 2),
        ("top_logprobs", 1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"1": 5}),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_a_refusal_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body(**{field: value}))
    assert caught.value.status == 400
    error = caught.value.body["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert error["message"] == str(caught.value)
    assert field in error["message"]


@pytest.mark.parametrize("prompt", [None, 3, ["a", "b"], [1, "a"], [True], {"a": 1}, [[1], [2]], [["a"]], [1.5]])
def test_a_wrong_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="one text or one list of token ids"):
        parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": "\\ud800"}'])
def test_a_body_that_is_no_object_of_texts_is_refused(text: bytes) -> None:
    with pytest.raises(ApiError, match="JSON"):
        parse_chat(text)


def test_the_prompt_must_fit_and_the_answer_is_cut_to_the_room() -> None:
    call = parse_chat(body(max_tokens=50, temperature=0))
    fits = to_request(call, [1] * 60, vocab_size=10, max_context=100)
    assert fits.max_tokens == 40
    assert to_request(call, [1] * 20, vocab_size=10, max_context=100).max_tokens == 50
    assert to_request(parse_chat(body()), [1] * 99, vocab_size=10, max_context=100).max_tokens == 1
    with pytest.raises(ApiError, match=r"100 tokens .* holds 100"):
        to_request(call, [1] * 100, vocab_size=10, max_context=100)
    with pytest.raises(ApiError, match="empty"):
        to_request(call, [], vocab_size=10, max_context=100)
    for token in (-1, 10):
        with pytest.raises(ApiError, match="from 0 to 9"):
            to_request(call, [token], vocab_size=10, max_context=100)
