"""From messages to tokens and back: every turn is tokenized once, by appending.

    opening(messages)          [ messages, generation prompt ]
    engine                                                   [ sampled ... end-of-turn? ]
    extend(ended, messages)                                                             [ rest of the close, messages,
                                                                                          generation prompt ]

So the tokens of turn n are a prefix of those of turn n + 1, and what was sampled stays as it was sampled, even where
the model's chat template would trim it in hindsight (earlier thinking, say). A template that rewrites anything else of
earlier turns cannot be appended to, and is refused when the renderer is made.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ..infra.models import end_ids
from ..infra.tokenizers import fingerprint, open_tokenizer
from ..schemas import Role, RollstreamError
from .environment import Message

MARK = "rollstream0mark"
"""Stands for an assistant's words while a template is taken apart: nothing that a template would trim or escape."""

PLAIN_TEMPLATE = (
    r"{{ bos_token or '' }}{% for message in messages %}"
    r"{{ message['role'] + ':\n' + message['content'] }}"
    r"{{ eos_token if eos_token and message['role'] == 'assistant' else '' }}{{ '\n\n' }}"
    r"{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
"""For a tokenizer without a chat template."""


SHORT = 8
"""Tokens of a turn that is likely to be sampled again."""


class RenderingError(RollstreamError):
    """Messages that cannot be rendered, or a chat template that cannot be appended to."""


class Renderer:
    """Turns messages into token ids with one tokenizer, and sampled ids into text."""

    end_ids: tuple[int, ...]
    """Tokens that end a turn: the tokenizer's end of sequence, the template's closing token, and what was given."""

    def __init__(self, tokenizer: Any, *, ends: Iterable[int] = ()) -> None:
        """`tokenizer`: of `transformers`. `ends`: further tokens that end a turn.

        Raises `RenderingError` where its chat template cannot be appended to.
        """
        self._tokenizer = tokenizer
        self._template: str = tokenizer.chat_template or PLAIN_TEMPLATE
        self._check_template()
        self._closing = self._find_closing()
        eos: int | None = tokenizer.eos_token_id
        self.end_ids = tuple(sorted({*ends, *self._closing[-1:], *(() if eos is None else (eos,))}))
        # The samples of a group share an opening, and small environments say few things: most renderings are repeats.
        self._opening = lru_cache(maxsize=256)(self._render_opening)
        self._extension = lru_cache(maxsize=1024)(self._render_extension)
        self._reply = lru_cache(maxsize=1024)(self._render_reply)
        self._text = lru_cache(maxsize=4096)(self._render_text)

    @classmethod
    def open(cls, directory: Path) -> "Renderer":
        """With the tokenizer in a model directory, and the end-of-turn tokens that the model declares.

        Raises `RenderingError`; `OSError` where there is none.
        """
        return cls(open_tokenizer(directory), ends=end_ids(directory))

    @property
    def fingerprint(self) -> str:
        """Identifies the tokenizer."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._tokenizer)

    def opening(self, messages: Sequence[Message]) -> Sequence[int]:
        """Tokens of the opening, up to where the assistant's first turn begins. Raises `RenderingError`."""
        return self._opening(tuple(messages))

    def extend(self, sampled_ended: bool, messages: Sequence[Message]) -> Sequence[int]:
        """Tokens between a sampled turn and the next one. Raises `RenderingError`.

        `sampled_ended`: the last token sampled was one of `end_ids`; where it was not, the turn is closed here.
        """
        return self._extension(sampled_ended, tuple(messages))

    def reply(self, text: str) -> Sequence[int]:
        """Tokens of an assistant's turn with these words, as if sampled: whatever ends the turn included."""
        return self._reply(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._text(tuple(ids)) if len(ids) <= SHORT else self._render_text(tuple(ids))

    def _render_reply(self, text: str) -> tuple[int, ...]:
        return (*self._encode(text), *self._closing)

    def _render_text(self, ids: tuple[int, ...]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _render_opening(self, messages: tuple[Message, ...]) -> tuple[int, ...]:
        return self._encode(self._render(messages))

    def _render_extension(self, sampled_ended: bool, messages: tuple[Message, ...]) -> tuple[int, ...]:
        (_, text) = self._render_around(_USER, _MARKED, *messages)
        ids = self._encode(text)
        if not sampled_ended:
            return ids
        if ids[: len(self._closing)] != self._closing:
            raise RenderingError(f"the chat template closes a turn in another way before {messages[:1]}")
        return ids[len(self._closing) :]

    def _render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                [_as_dict(message) for message in messages],
                chat_template=self._template,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise RenderingError(f"the chat template does not take these messages ({roles}): {error}") from error
        return text

    def _render_around(self, *messages: Message) -> list[str]:
        """The text before, between and after the marked turns."""
        parts = self._render(messages).split(MARK)
        if len(parts) != 1 + messages.count(_MARKED):
            raise RenderingError("the chat template leaves out or repeats earlier turns, so it cannot be appended to")
        return parts

    def _encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:  # tokenizers raises nothing more exact
            raise RenderingError(f"the tokenizer does not take {text[:200]!r}: {error}") from error

    def _check_template(self) -> None:
        """Hold that turns come one after the other, whatever comes later. Raises `RenderingError`."""
        for opening in ((_USER,), (_SYSTEM, _USER)):
            try:
                start = self._render(opening)
            except RenderingError:
                if opening == (_USER,):
                    raise
                continue
            shorter = self._render_around(*opening, _MARKED, _NEXT)
            longer = self._render_around(*opening, _MARKED, _NEXT, _MARKED, _NEXT)
            # A generation prompt may hold more than a past turn shows of it (an opened thinking block): that stays. Or
            # it may lack the white space before the words, which is then for the model to sample.
            steady = start.startswith(longer[0].rstrip()) and longer[2].startswith(longer[1].rstrip())
            if not steady or shorter != [longer[0], longer[2]]:
                raise RenderingError(
                    "the chat template renders earlier turns differently once later ones follow, so it cannot be "
                    f"appended to: {shorter} became {longer}; give the tokenizer another chat_template"
                )

    def _find_closing(self) -> tuple[int, ...]:
        """What ends an assistant's turn, up to its special token; () where the template has none."""
        added: dict[int, Any] = self._tokenizer.added_tokens_decoder
        special = {*self._tokenizer.all_special_ids, *(id_ for id_, token in added.items() if token.special)}
        text = self._render((_USER, _MARKED), prompt=False).partition(MARK)[2]
        ids = self._encode(text)
        ends = [place for place, id_ in enumerate(ids) if id_ in special]
        return ids[: ends[0] + 1] if ends else ()


_SYSTEM = Message(role=Role.SYSTEM, content="rollstream0system")
_USER = Message(role=Role.USER, content="rollstream0user")
_MARKED = Message(role=Role.ASSISTANT, content=MARK)
_NEXT = Message(role=Role.USER, content="rollstream0next")


def _as_dict(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role.lower(), "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [json.loads(call) for call in message.tool_calls]
    return plain
