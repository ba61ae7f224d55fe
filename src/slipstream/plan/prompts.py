"""Prompt files: a text or a chat a line, each of a task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from slipstream.engine.inputs import encode
from slipstream.errors import ParameterError

Prompt = str | list[dict[str, Any]]
BUILT_IN = "built-in"


@dataclass(frozen=True)
class TaskPrompt:
    """task: what kind of text it asks for; "all" where the file does not say."""

    task: str
    name: str
    prompt: Prompt


def read_prompts(path: Path | None) -> list[TaskPrompt]:
    """Of a text file with a prompt a line, or a .jsonl file; None: the small set that ships with Slipstream.

    A line of .jsonl is an object with "prompt", "messages", "turns" (Spec-Bench, MT-Bench; the first turn is
    asked) or "question" (GSM8K), and the task as "task" or "category". ParameterError if there are none.
    """
    try:
        if path is None:
            name = "prompts.jsonl"
            text = resources.files("slipstream.plan").joinpath(name).read_text(encoding="utf-8")
        else:
            name, text = path.name, path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(
            f"the prompts {path} cannot be read ({type(error).__name__}): check it"
        ) from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ParameterError(f"{path} holds no prompts: write one a line")
    if Path(name).suffix != ".jsonl":
        return [TaskPrompt("all", f"{name}:{number}", line) for number, line in lines]
    return [_read(path, name, number, line) for number, line in lines]


def encode_prompt(tokenizer: Any, asked: TaskPrompt) -> list[int]:
    """Token ids; a text is asked as a user's message if the model has a chat template."""
    prompt = asked.prompt
    if isinstance(prompt, str) and tokenizer.chat_template is not None:
        prompt = [{"role": "user", "content": prompt}]
    return encode(tokenizer, prompt)


def _read(path: Path | None, name: str, number: int, line: str) -> TaskPrompt:
    try:
        value = json.loads(line)
        prompt = _prompt(value)
        task = str(value.get("task") or value.get("category") or "all")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise ParameterError(
            f'{path}, line {number}: not a JSON object with "prompt", "messages", "turns" or "question"'
        ) from None
    known = next((str(value[key]) for key in ("id", "question_id", "task_id") if key in value), str(number))
    return TaskPrompt(task, f"{name}:{known}", prompt)


def _prompt(value: Mapping[str, Any]) -> Prompt:
    if "messages" in value:
        messages: Prompt = value["messages"]
        return messages
    text = value["turns"][0] if "turns" in value else value.get("prompt", value.get("question"))
    if not isinstance(text, str) or not text.strip():
        raise KeyError("prompt")
    return text
