"""Tokenizer of the pocket model: byte-level BPE, 8,192 tokens, ChatML.

    python scripts/pocket/make_tokenizer.py --chat CHAT/smollm2_chat_*.jsonl.xz --docs DOCS/html/_sources

`sources.py` says what is read and under which licences. The merges are learnt from the training split alone:
no held-out text has shaped the vocabulary. Every byte is a token and nothing is normalised, so
decode(encode(text)) == text for any text.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from sources import chat_turns, docs_texts, function_turns, is_heldout, parse_args, stdlib_texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
CONTEXT_LENGTH = 4096
END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END, MASK, *(f"<|reserved_{i}|>" for i in range(4))]
# One alternative a line: contractions, words with one leading sign, single digits, signs, line ends, spaces.
WORDS = "|".join(
    (
        r"(?i:'(?:[sdmt]|ll|ve|re))",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json`, its configuration for transformers, the chat template, the ids that end an answer."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    configs = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT_LENGTH,
            "clean_up_tokenization_spaces": False,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "mask_token": MASK,
            "extra_special_tokens": [TURN_START],
        },
        "generation_config.json": {
            "eos_token_id": [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)],
            "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
            "do_sample": False,
        },
    }
    for name, config in configs.items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_args("Train the pocket model's tokenizer")
    turns = [*chat_turns(args.chat), *function_turns(args.stdlib)]
    texts = [*stdlib_texts(args.stdlib), *docs_texts(args.docs)]
    training = [part for turn in turns if not is_heldout(turn.key) for part in (turn.prompt, turn.answer)]
    training += [text.text for text in texts if not is_heldout(text.key)]
    tokenizer = train_tokenizer(iter(training))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"only {tokenizer.get_vocab_size()} of {VOCAB_SIZE} tokens: give more text")
    write_tokenizer(tokenizer, args.assets)


if __name__ == "__main__":
    main()
