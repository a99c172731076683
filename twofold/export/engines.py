"""The engines that a model is exported to. What differs between them is here, as data."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What an engine wants of a folder, and the command that serves it.

    `drafter` is the format of a drafter, None where the engine has no use for one. A drafter's layers in `dense` are
    written in bfloat16 although the artifact has them packed, and are ignored by the patterns beside them; so are
    those that the artifact has dense. `serve` and `speculate` are words of the command, formats over {target},
    {drafter}, {drafter_json}, {block} (the drafter's block), {drafted} (one less) and {context}.
    """

    name: str
    versions: str
    drafter: Literal["dflash", "speculators"] | None
    dense: dict[str, str]  # a drafter's layer -> the pattern that ignores it
    serve: tuple[str, ...]
    speculate: tuple[str, ...] = ()


_VLLM = ("vllm", "serve", "{target}", "--max-model-len", "{context}", "--no-enable-prefix-caching")
_VLLM_DFLASH = (
    "--speculative-config",
    '{{"method": "dflash", "model": {drafter_json}, "num_speculative_tokens": {drafted}}}',
)

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name="vllm",
            versions="0.32.0",
            drafter="dflash",
            dense={},
            serve=_VLLM,
            speculate=_VLLM_DFLASH,
        ),
        Engine(
            name="sglang",
            versions="written for, not run",
            drafter="dflash",
            # A packed fc is skipped by its loader, and so left random (sglang#39087); "fc" alone is no pattern that
            # engines find behind a prefix.
            dense={"fc": "re:.*fc$"},
            serve=(
                *("python", "-m", "sglang.launch_server"),
                *("--model-path", "{target}", "--context-length", "{context}"),
            ),
            speculate=(
                *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "{drafter}"),
                *("--speculative-num-draft-tokens", "{block}"),
            ),
        ),
        Engine(
            name="transformers",
            versions="5.17 to 5.21",
            drafter=None,
            dense={},
            serve=("transformers", "serve", "{target}"),
        ),
        Engine(
            name="speculators",
            versions="vLLM 0.32.0 reads it",
            drafter="speculators",
            dense={},
            serve=_VLLM,
            speculate=_VLLM_DFLASH,
        ),
    )
}


def find_engine(name: str) -> Engine:
    """ValueError that lists the known ones."""
    if name not in ENGINES:
        raise ValueError(f"there is no engine {name!r}; choose one of: {', '.join(ENGINES)}")
    return ENGINES[name]
