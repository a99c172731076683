"""What clients may ask, in the format of the OpenAI API, and how a refusal looks.

Read strictly: a field that this server knows has the right type and range or is refused; a field that asks
for what this server does not do is refused unless it is neutral (null, n = 1, no tools); fields that nobody
here has heard of are ignored, as clients send many.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from twofold.decoding.engine import Request
from twofold.ops.sampling import Sampling

T = TypeVar("T")

_ROLES = ("system", "developer", "user", "assistant")
_COMPLETION_TOKENS = 16  # the API's default for /v1/completions; a chat answer may fill the context

_ABOVE_0, _BELOW_1 = math.nextafter(0, 1), math.nextafter(1, 0)

_NEUTRAL: dict[str, tuple[Any, ...]] = {  # field this server does not do -> values that ask for nothing
    "n": (1,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "bad_words": ([],),
    "stop_token_ids": ([],),
    "prompt_logprobs": (),
    "structured_outputs": ({},),
    "chat_template_kwargs": ({},),
}


class ApiError(Exception):
    """A refusal: HTTP status, message, and the field it is about."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {
                "message": message,
                "type": "invalid_request_error" if status < 500 else "server_error",
                "param": param,
                "code": code,
            }
        }


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request as sent, checked but for what depends on the model. One of messages and prompt is given."""

    model: str
    messages: tuple[dict[str, Any], ...] | None = None
    prompt: str | tuple[int, ...] | None = None
    sampling: Sampling
    max_tokens: int | None  # None: as many as fit
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: bool
    stream: bool
    include_usage: bool


def parse_chat(body: bytes) -> Call:
    """The body of /v1/chat/completions. Raises ApiError."""
    fields = _fields(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a list of at least one message", param="messages")
    limit = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
    return _call(
        fields,
        messages=tuple(_message(message, index) for index, message in enumerate(messages)),
        max_tokens=_field(fields, limit, None, _integer(1), "a whole number of at least 1"),
        logprobs=_flag(fields, "logprobs"),
    )


def parse_completion(body: bytes) -> Call:
    """The body of /v1/completions. Raises ApiError."""
    fields = _fields(body)
    logprobs = fields.get("logprobs")
    if logprobs is not None and type(logprobs) is not bool and logprobs != 0:
        raise ApiError(
            "logprobs of other tokens than the chosen ones are not offered; set logprobs to 0 or null",
            param="logprobs",
        )
    return _call(
        fields,
        prompt=_prompt(fields.get("prompt")),
        max_tokens=_field(fields, "max_tokens", _COMPLETION_TOKENS, _integer(1), "a whole number of at least 1"),
        logprobs=logprobs is not None and logprobs is not False,
    )


def to_request(call: Call, prompt_ids: list[int], *, vocab_size: int, max_context: int) -> Request:
    """The engine's request: the prompt must leave room in the context, max_tokens is cut to that room."""
    if not prompt_ids:
        raise ApiError("the prompt is empty; give at least one token", param="prompt")
    if not all(0 <= token < vocab_size for token in prompt_ids):
        raise ApiError(f"the token ids of the prompt must be from 0 to {vocab_size - 1}", param="prompt")
    room = max_context - len(prompt_ids)
    if room < 1:
        raise ApiError(
            f"the prompt has {len(prompt_ids)} tokens and the context holds {max_context}, the answer's "
            "included; shorten the prompt",
            param="messages" if call.messages is not None else "prompt",
            code="context_length_exceeded",
        )
    return Request(
        prompt_ids=tuple(prompt_ids),
        sampling=call.sampling,
        max_tokens=room if call.max_tokens is None else min(call.max_tokens, room),
        stop=call.stop,
        ignore_eos=call.ignore_eos,
        logprobs=call.logprobs,
    )


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but not a text
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ApiError("the body must be a JSON object")
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            allowed = " or ".join(["leave it out", *(f"set {json.dumps(option)}" for option in neutral)])
            raise ApiError(f"{name} is not supported; {allowed}", param=name)
    return fields


def _call(
    fields: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: bool,
    messages: tuple[dict[str, Any], ...] | None = None,
    prompt: str | tuple[int, ...] | None = None,
) -> Call:
    model = fields.get("model")
    if not isinstance(model, str):
        raise ApiError("model must be the name of a model; see /v1/models", param="model")
    temperature = _field(fields, "temperature", 1.0, _number(0, 2), "a number from 0 to 2")
    drawn = secrets.randbits(32) if temperature > 0 else 0
    stream = _flag(fields, "stream")
    options = fields.get("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        raise ApiError('stream_options must be an object, and needs "stream": true', param="stream_options")
    return Call(
        model=model,
        messages=messages,
        prompt=prompt,
        sampling=Sampling(
            temperature=temperature,
            top_p=_field(fields, "top_p", 1.0, _number(_ABOVE_0, 1), "a number above 0 and up to 1"),
            top_k=max(0, _field(fields, "top_k", 0, _integer(-1), "a whole number; 0 or -1 for all")),
            min_p=_field(fields, "min_p", 0.0, _number(0, _BELOW_1), "a number from 0 to below 1"),
            seed=_field(fields, "seed", drawn, _integer(-(2**63)), "a whole number of 64 bits"),
        ),
        max_tokens=max_tokens,
        stop=_stop(fields.get("stop")),
        ignore_eos=_flag(fields, "ignore_eos"),
        logprobs=logprobs,
        stream=stream,
        include_usage=_flag(options or {}, "include_usage"),
    )


def _message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise ApiError(f"messages[{index}] must have a role of {', '.join(_ROLES)}", param="messages")
    if message.get("tool_calls"):
        raise ApiError(f"messages[{index}]: tool calls are not supported", param="messages")
    # "developer" is the API's newer word for what chat templates call "system"
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": message.get("content")}


def _prompt(prompt: Any) -> str | tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return tuple(prompt)
    raise ApiError("prompt must be one text or one list of token ids", param="prompt")


def _stop(stop: Any) -> tuple[str, ...]:
    found = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise ApiError("stop must be a text or a list of texts, none of them empty", param="stop")
    return tuple(found)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    return _field(fields, name, False, lambda value: value if type(value) is bool else None, "true or false")


def _field(fields: Mapping[str, Any], name: str, default: T, read: Callable[[Any], T | None], expected: str) -> T:
    """The field's value; `default` if it is absent or null. `read` gives None for what is not `expected`."""
    value = fields.get(name)
    if value is None:
        return default
    found = read(value)
    if found is None:
        raise ApiError(f"{name} must be {expected}, not {json.dumps(value)[:50]}", param=name)
    return found


def _integer(least: int, most: int = 2**63 - 1) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and least <= value <= most else None


def _number(least: float, most: float) -> Callable[[Any], float | None]:
    return lambda value: float(value) if type(value) in (int, float) and least <= value <= most else None
