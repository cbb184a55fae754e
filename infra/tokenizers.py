"""Tokenizers as workers and trainer share them: opened from a model directory, told apart by a fingerprint."""

import hashlib
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

WORDS_TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
"""Nothing but the words of the messages."""


def open_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory. Raises `OSError` where there is none."""
    return import_module("transformers").AutoTokenizer.from_pretrained(directory, local_files_only=True)


def fingerprint(tokenizer: Any) -> str:
    """32 hex digits over vocabulary, merges, special tokens and chat template; the same after saving and opening."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    state: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    merges: list[str | list[str]] = state.get("model", {}).get("merges") or []
    content = {
        "vocabulary": tokenizer.get_vocab(),
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
    }
    text = json.dumps(content, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def word_tokenizer(words: Sequence[str]) -> Any:
    """A `PreTrainedTokenizerFast` with one token a word, in this order, and nothing else: ids are the words' places.

    Its chat template writes the words of the messages and no wrapper around them, so a renderer gives one token a word.
    A word that it does not have is an error, never an unknown token. `save_pretrained` writes a normal directory.
    Raises `ValueError` for a word that is twice there, is empty or holds white space.
    """
    if len(set(words)) != len(words) or any(word.split() != [word] for word in words):
        raise ValueError(f"words without white space, each once, expected: {list(words)[:20]} ...")
    tokenizers: Any = import_module("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: place for place, word in enumerate(words)}))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = WORDS_TEMPLATE
    return tokenizer
