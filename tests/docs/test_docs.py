"""What the documents say is run: the example drafter, the links, the commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from slipstream.cli.main import build_app
from slipstream.core.params import SamplingParams
from slipstream.drafters import TargetInfo, build_drafter
from slipstream.engine.engine import Engine
from slipstream.model.runner import Runner
from slipstream.testing.tiny import tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    text = (ROOT / "docs" / "add-a-drafter.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    path = tmp_path / "bigram.py"
    path.write_text(code, encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_example_drafter_drafts_and_changes_nothing(example: Path) -> None:
    model = tiny_model("llama", seed=3)
    prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
    outputs = []
    for spec in ("none", f"{example}:BigramDrafter:num_speculative_tokens=6"):
        runner = Runner(model, pack=False)
        drafter = build_drafter(spec, TargetInfo(runner.vocab_size, runner.context))
        with Engine(runner, drafter) as engine:
            seq_id = engine.add(prompt, SamplingParams(max_tokens=40))
            row = engine.find(seq_id)
            for _ in engine.run():
                pass
            assert row is not None
            outputs.append(row.output)
            drafted = row.counts.draft_tokens
    assert outputs[0] == outputs[1]
    assert drafted > 0


@pytest.mark.slow
def test_the_example_drafter_keeps_the_contract(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract"]
        + ["--drafter", f"{example}:BigramDrafter"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


def test_make_targets_in_the_documents_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8")):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"


def commands(page: Path) -> Iterator[list[str]]:
    """What a page has people type: the lines of its shell blocks, and commands within its sentences."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *re.findall(r"`((?:slipstream|python) [^`]*)`", text)]:
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word not in ("|", "&&", "&", ";", ">"):
                words.append(word)
            elif words:
                yield words
                words = []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_in_the_documents_exist_with_their_options(page: Path) -> None:
    for words in commands(page):
        while re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        options = {w.partition("=")[0] for w in words[1:] if re.match(r"--?[a-z]", w)}
        if words[0] == "slipstream":
            command: Any = get_command(build_app())
            for word in words[1:]:
                if not hasattr(command, "commands") or word.startswith("-"):
                    break
                if re.fullmatch(r"[a-z][a-z.|-]*", word):  # several may be named at once, as vllm|sglang
                    assert set(word.split("|")) <= set(command.commands), f"{page.name}: {shlex.join(words)}"
                    command = command.commands[word.split("|")[0]]
            known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
            assert options <= known, f"{page.name}: {shlex.join(words)}: {options - known}"
        elif words[0] == "python" and words[1].endswith(".py") and "/" in words[1]:
            code = (ROOT / words[1]).read_text(encoding="utf-8")
            missing = {o for o in options - {"--help"} if f'"{o}"' not in code}
            assert not missing, f"{page.name}: {shlex.join(words)}: {missing}"
