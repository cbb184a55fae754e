"""Turns are tokenized once, by appending, and the result is what the chat template itself would have given."""

import random
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollstream.infra.models import export_smollm2
from rollstream.infra.tokenizers import fingerprint, open_tokenizer, word_tokenizer
from rollstream.producers.environment import Message
from rollstream.producers.rendering import PLAIN_TEMPLATE, Renderer, RenderingError
from rollstream.schemas import MissingExtra, Role

PreTrainedTokenizerFast: Any = import_module("transformers").PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
THINKING = (
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.index0 < last.user %}"
    "{{ message['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
NUMBERED = (
    "{% for message in messages %}{{ loop.index ~ '. ' + message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}"
)
SYSTEM_LAST = (
    "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ '<|im_start|>' + (system if loop.last else '') + message['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
FORGETFUL = "{% for message in messages[-2:] %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
UPSIDE_DOWN = "{% for message in messages | reverse %}{{ message['content'] + '<|im_end|>' }}{% endfor %}"
COUNTING = "{{ messages | length ~ ' messages\n' }}" + CHATML
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]

APPENDABLE = {"chatml": CHATML, "headers": HEADERS, "instruct": INSTRUCT, "plain": PLAIN_TEMPLATE}


def byte_tokenizer(template: str | None, *, eos: str | None = "</s>") -> Any:
    """One token a byte, and the special tokens: any text has exactly one tokenization."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend: Any = Tokenizer(models.BPE({character: place for place, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def converse(
    renderer: Renderer, turns: Sequence[tuple[str, str]], *, ended: bool = True, blank: str = ""
) -> list[list[int]]:
    """The tokens before each assistant's turn and at the end, for turns of (user, assistant).

    `blank`: what the template wants before the assistant's words and leaves to the model.
    """
    tokens = list(renderer.opening([user(turns[0][0])]))
    prompts = [list(tokens)]
    for place, (_, words) in enumerate(turns):
        reply = list(renderer.reply(blank + words))
        tokens += reply if ended else reply[:-1]
        following = [user(turns[place + 1][0])] if place + 1 < len(turns) else [user("bye")]
        tokens += renderer.extend(ended, following)
        prompts.append(list(tokens))
    return prompts


def as_template(tokenizer: Any, turns: Sequence[tuple[str, str]], template: str) -> str:
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]
    messages.append({"role": "user", "content": "bye"})
    text: str = tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    return text


def make_turns(seed: int, count: int) -> list[tuple[str, str]]:
    chance = random.Random(seed)
    letters = "ab é\n{}'\"<|0"

    def words() -> str:
        return "x" + "".join(chance.choice(letters) for _ in range(chance.randint(0, 12))) + "y"

    return [(words(), words()) for _ in range(count)]


@pytest.mark.parametrize("name", APPENDABLE)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut off"])
@pytest.mark.parametrize("seed", range(5))
def test_appending_gives_what_the_template_gives(name: str, ended: bool, seed: int) -> None:
    template = APPENDABLE[name]
    tokenizer = byte_tokenizer(None if template is PLAIN_TEMPLATE else template)
    turns = make_turns(seed, 4)
    prompts = converse(Renderer(tokenizer), turns, ended=ended, blank=" " if template is INSTRUCT else "")
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier
        assert len(later) > len(earlier)
    text = as_template(tokenizer, turns, template)
    assert tokenizer.decode(prompts[-1]) == text
    assert prompts[-1] == tokenizer.encode(text, add_special_tokens=False)


def test_a_default_system_prompt_comes_once_and_only_by_default() -> None:
    tokenizer = byte_tokenizer(CHATML)
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(converse(renderer, make_turns(0, 3))[-1]).count("You are helpful.") == 1
    given = renderer.opening([Message(role=Role.SYSTEM, content="Be brief."), user("hi")])
    assert "You are helpful." not in tokenizer.decode(given)


def test_thinking_stays_as_it_was_sampled() -> None:
    """The template would cut it from earlier turns, and opens a thinking block that past turns do not show."""
    tokenizer = byte_tokenizer(THINKING)
    renderer = Renderer(tokenizer)
    tokens = [
        *renderer.opening([user("1 + 1?")]),
        *renderer.reply("one more\n</think>\n\n2"),
        *renderer.extend(True, [user("+ 1?")]),
    ]
    assert tokenizer.decode(tokens) == (
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\none more\n</think>\n\n2<|im_end|>\n"
        "<|im_start|>user\n+ 1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_trimming_touches_no_sampled_token() -> None:
    tokenizer = byte_tokenizer(HEADERS)
    renderer = Renderer(tokenizer)
    tokens = [*renderer.opening([user("a")]), *renderer.reply("  b  "), *renderer.extend(True, [user("  c  ")])]
    assert tokenizer.decode(tokens).endswith(
        "\n\n  b  <|eot|><|start|>user<|end|>\n\nc<|eot|><|start|>assistant<|end|>\n\n"
    )


@pytest.mark.parametrize("template", [NUMBERED, SYSTEM_LAST, FORGETFUL, UPSIDE_DOWN, COUNTING])
def test_a_template_that_rewrites_earlier_turns_is_refused(template: str) -> None:
    with pytest.raises(RenderingError, match="cannot be appended to"):
        Renderer(byte_tokenizer(template))


def test_several_messages_and_roles_at_once() -> None:
    tokenizer = byte_tokenizer(CHATML)
    renderer = Renderer(tokenizer)
    call = Message(role=Role.ASSISTANT, content="ok", tool_calls=('{"name": "look", "arguments": {}}',))
    tail = renderer.extend(False, [Message(role=Role.TOOL, content="42"), call, user("so?")])
    assert tokenizer.decode(tail) == (
        "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_calls_reach_the_template_as_objects() -> None:
    template = CHATML.replace(
        "message['content'] +",
        "message['content'] + (message['tool_calls'][0]['name'] if 'tool_calls' in message else '') +",
    )
    tokenizer = byte_tokenizer(template)
    call = Message(role=Role.ASSISTANT, content="", tool_calls=('{"name": "look"}',))
    assert "assistant\nlook<|im_end|>" in tokenizer.decode(Renderer(tokenizer).opening([user("a"), call, user("b")]))


def test_messages_that_the_template_refuses() -> None:
    renderer = Renderer(byte_tokenizer(INSTRUCT))
    with pytest.raises(RenderingError, match=r"\(SYSTEM, USER\): roles must alternate"):
        renderer.opening([Message(role=Role.SYSTEM, content="a"), user("b")])
    with pytest.raises(RenderingError, match="alternate"):
        renderer.extend(True, [user("a"), user("b")])


def test_a_template_that_is_broken() -> None:
    with pytest.raises(RenderingError, match="does not take these messages"):
        Renderer(byte_tokenizer("{% for message in messages %}{{ message['content'] + 1 }}{% endfor %}"))


def test_tokens_that_end_a_turn() -> None:
    ids = {text: place for place, text in enumerate(SPECIAL, start=256)}
    assert Renderer(byte_tokenizer(CHATML)).end_ids == (ids["</s>"], ids["<|im_end|>"])
    assert Renderer(byte_tokenizer(INSTRUCT), ends=[3]).end_ids == (3, ids["</s>"])
    assert Renderer(byte_tokenizer(None, eos=None)).end_ids == ()
    assert Renderer(byte_tokenizer(HEADERS)).reply("a")[-1] == ids["<|eot|>"]


def test_without_an_end_token_the_turn_is_closed_in_words() -> None:
    tokenizer = byte_tokenizer(None, eos=None)
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(renderer.extend(False, [user("a")])) == "\n\nuser:\na\n\nassistant:\n"
    assert renderer.extend(True, [user("a")]) == renderer.extend(False, [user("a")])


def test_decoding_leaves_special_tokens_out() -> None:
    renderer = Renderer(byte_tokenizer(CHATML))
    assert renderer.decode(renderer.reply("grüße 🙂")) == "grüße 🙂"


WORDS = ["lower", "higher", *map(str, range(1, 51))]


def test_words_are_one_token_each_and_nothing_more(tmp_path: Path) -> None:
    word_tokenizer(WORDS).save_pretrained(tmp_path)
    renderer = Renderer.open(tmp_path)
    assert list(renderer.opening([user("1 50")])) == [2, 51]
    assert list(renderer.reply("25")) == [26]
    for ended in (True, False):
        assert list(renderer.extend(ended, [user("higher")])) == [1]
        assert list(renderer.extend(ended, [])) == []
    assert renderer.decode([26, 0]) == "25 lower"
    assert renderer.end_ids == ()
    assert renderer.fingerprint == fingerprint(word_tokenizer(WORDS))


def test_a_word_that_the_tokenizer_does_not_have() -> None:
    with pytest.raises(RenderingError, match="'51 '"):
        Renderer(word_tokenizer(WORDS)).opening([user("51")])


@pytest.mark.parametrize("words", [["a", "a"], ["a b"], [""], ["a\n"]])
def test_words_that_are_none(words: list[str]) -> None:
    with pytest.raises(ValueError, match="words without white space, each once"):
        word_tokenizer(words)


def test_the_fingerprint_tells_tokenizers_apart() -> None:
    changed = [
        byte_tokenizer(CHATML),
        byte_tokenizer(HEADERS),
        byte_tokenizer(None),
        byte_tokenizer(CHATML, eos="<|im_end|>"),
        word_tokenizer(["a", "b"]),
        word_tokenizer(["b", "a"]),
        merged("a", "b"),
        merged("b", "a"),
    ]
    prints = [fingerprint(tokenizer) for tokenizer in changed]
    assert len(set(prints)) == len(prints)
    assert prints[0] == fingerprint(byte_tokenizer(CHATML))


def merged(first: str, second: str) -> Any:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "ba": 3}
    both = [(first, second), (second, first)]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, both)))


def test_the_fingerprint_survives_saving_and_use(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML)
    before = fingerprint(tokenizer)
    tokenizer(["a", "bcd"], padding=False, truncation=True, max_length=2)
    tokenizer.save_pretrained(tmp_path)
    assert fingerprint(tokenizer) == fingerprint(open_tokenizer(tmp_path)) == before


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return export_smollm2(tmp_path_factory.getbasetemp() / "smollm2", dtype="bfloat16")
    except MissingExtra as missing:
        pytest.skip(str(missing))


def test_smollm2(smollm2: Path) -> None:
    renderer, tokenizer = Renderer.open(smollm2), open_tokenizer(smollm2)
    assert [tokenizer.convert_ids_to_tokens(id_) for id_ in renderer.end_ids] == ["<|im_end|>"]
    own = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}], add_generation_prompt=True, return_dict=False
    )
    assert list(renderer.opening([user("What is 2 + 2?")])) == own
    for ended in (True, False):
        prompts = converse(renderer, make_turns(1, 5), ended=ended)
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prompts))
        assert tokenizer.decode(prompts[-1]) == as_template(tokenizer, make_turns(1, 5), tokenizer.chat_template)
    assert renderer.fingerprint == fingerprint(tokenizer)
