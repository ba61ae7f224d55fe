"""`tiny`: a model that every command can be tried on at once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TINY = "tiny"
# That of `testing.tiny`, which knows no tools, and these besides.
_TEMPLATE = (
    '{% if tools %}<system>{{ tools | tojson }} <tool_call>{"name": …}</tool_call><|eos|>{% endif %}'
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for c in message.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|eos|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@contextmanager
def or_toy(model: str) -> Iterator[str]:
    """The model as it was named; for `tiny`, where there is none of that name, the folder of a random one
    that says nothing of sense."""
    if model != TINY or Path(model).exists():
        yield model
        return
    from slipstream.model.house import house_model

    if house_model(TINY) is not None:
        yield model
        return
    from slipstream.testing.tiny import save_tiny, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / TINY
        yield str(save_tiny(at, tokenizer=tokenizer, kind="qwen2", seed=1, max_position_embeddings=4096))
