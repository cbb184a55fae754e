"""Mistakes in a configuration, put into words: place, key, what was expected, what was found, what may be meant."""

from difflib import get_close_matches

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .drafts import ConfigError, Draft, Key
from .sections import find_section, is_secret, is_table

LONGEST_FOUND = 80


def describe_faults(root: type[BaseModel], draft: Draft, error: ValidationError) -> ConfigError:
    """One line a mistake."""
    return ConfigError("\n".join(_describe(root, draft, fault) for fault in error.errors()))


def _describe(root: type[BaseModel], draft: Draft, fault: ErrorDetails) -> str:
    key = tuple(str(part) for part in fault["loc"] if part != "[key]")
    found = draft.origin(key)
    place = found[1].place if found else "configuration"
    return f"{place}: {'.'.join(key)}: {_explain(root, key, fault)}"


def _explain(root: type[BaseModel], key: Key, fault: ErrorDetails) -> str:
    if fault["type"] == "extra_forbidden":
        return f"unknown key{_suggest(root, key)}"
    if fault["type"] == "missing":
        return "expected a value, found none"
    message = fault["msg"].removeprefix("Value error, ")
    if message.startswith("expected"):
        return message
    wanted = message.removeprefix("Input should be ").removeprefix("String should ")
    return f"expected {wanted}, found {_quote(key, fault['input'])}"


def _quote(key: Key, value: object) -> str:
    if any(is_secret(part) for part in key):
        return f"a {type(value).__name__} (not shown)"
    quoted = repr(value)
    return quoted if len(quoted) <= LONGEST_FOUND else f"{quoted[:LONGEST_FOUND]}..."


def _suggest(root: type[BaseModel], key: Key) -> str:
    """What may have been meant: a like key of the same section, or the same key of another one."""
    section = _section_at(root, key[:-1])
    known = list(section.model_fields) if section else []
    if close := get_close_matches(key[-1], known, n=1):
        return f"; did you mean {'.'.join((*key[:-1], close[0]))}?"
    for name, field in root.model_fields.items():
        inner = find_section(field.annotation)
        if inner is not None and not is_table(field.annotation) and key[-1] in inner.model_fields:
            return f"; did you mean {name}.{key[-1]}?"
    return f"; expected one of {', '.join(known)}" if known else ""


def _section_at(root: type[BaseModel], key: Key) -> type[BaseModel] | None:
    """The section that this key leads to."""
    section: type[BaseModel] | None = root
    parts = list(key)
    while parts and section is not None:
        field = section.model_fields.get(parts.pop(0))
        section = find_section(field.annotation) if field else None
        if field and is_table(field.annotation) and parts:
            parts.pop(0)
    return section
