"""HumanEval (Chen et al., arXiv 2107.03374): asking for a solution, and running its tests.

Solutions are run: in a process of their own, in an empty folder, with limits on time, memory and files, and
without the environment. That is no sandbox against ill will.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import SamplingParams
from slipstream.engine.session import Completion, Session
from slipstream.errors import ParameterError

MEMORY_BYTES = 2 << 30
FILE_BYTES = 1 << 20
FENCED = re.compile(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
BEHIND = ("\ndef ", "\nclass ", "\nif __name__", "\nprint(", "\nassert ")  # what follows a function's end


@dataclass(frozen=True, slots=True)
class Problem:
    """prompt: a function's head and docstring. test: code that defines check(candidate)."""

    task: str
    prompt: str
    entry_point: str
    test: str


def read_problems(path: Path) -> list[Problem]:
    """From a file of openai/human-eval, an object a line."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [Problem(o["task_id"], o["prompt"], o["entry_point"], o["test"]) for o in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParameterError(
            f"{path} cannot be read as HumanEval problems ({type(error).__name__}: {error}): each line must"
            " hold task_id, prompt, entry_point and test"
        ) from error


def ask(session: Session, problems: Sequence[Problem], max_tokens: int) -> list[Completion]:
    """Greedy answers, all together; of a model with a chat template as a chat, else as a continuation."""
    if session.tokenizer.chat_template:
        prompts: list[Any] = [[{"role": "user", "content": question(p)}] for p in problems]
        params = SamplingParams(max_tokens=max_tokens)
    else:
        prompts = [p.prompt for p in problems]
        params = SamplingParams(max_tokens=max_tokens, stop=BEHIND)
    found: list[Completion] = session.generate(prompts, params)
    return found


def question(problem: Problem) -> str:
    return (
        "Complete this Python function. Answer with the whole function in one code block, without"
        " examples.\n\n"
        f"```python\n{problem.prompt.strip()}\n```"
    )


def program(problem: Problem, answer: str) -> str:
    """The problem's own head, then the answer's function, or the answer as the rest of the function."""
    blocks = FENCED.findall(answer) or [answer]
    defines = re.compile(rf"^\s*(async )?def {re.escape(problem.entry_point)}\s*\(", re.MULTILINE)
    whole = next((block for block in blocks if defines.search(block)), None)
    # The head alone is a function with a docstring, and what it imports the answer may use.
    code = f"{problem.prompt}\n\n{whole}" if whole is not None else problem.prompt + blocks[0]
    return f"{code}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def judge(problem: Problem, answer: str, seconds: float) -> dict[str, Any]:
    """passed, and why not: the last line that the tests' process wrote, or that it took too long."""
    with tempfile.TemporaryDirectory() as folder:
        file, errors = Path(folder) / "solution.py", Path(folder) / "errors"
        file.write_text(program(problem, answer), encoding="utf-8")
        with errors.open("wb") as told:
            child = subprocess.Popen(
                [sys.executable, "-I", str(file)],
                cwd=folder,
                env={"PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=told,
                start_new_session=True,
                preexec_fn=_limit,
            )
            try:
                status = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(child)
        if status is None:
            return {"passed": False, "why": f"took more than {seconds:g} s"}
        lines = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return {
        "passed": status == 0,
        "why": "" if status == 0 else (lines or [f"exit status {status}"])[-1][:300],
    }


def _limit() -> None:
    """Of the child, before it begins."""
    import resource

    for what, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, FILE_BYTES)):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
