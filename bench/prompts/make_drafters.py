"""Writes `drafters.jsonl`: 24 prompts, three of each of eight tasks, chosen by a rule and not by hand.

    python bench/prompts/make_drafters.py DATA_FOLDER

DATA_FOLDER holds Spec-Bench's `question.jsonl` (hemingkx/Spec-Bench, Apache-2.0) and HumanEval's
`HumanEval.jsonl` (openai/human-eval, MIT). Of each of Spec-Bench's six tasks the first turns of at most
3000 characters (about 700 tokens: the prompt must not outweigh the answer), of HumanEval all problems; of
these three evenly spaced ones in the order of the file. Code editing is made from HumanEval problems that
were not chosen, prompt and solution joined, with one instruction for all. Only ids in `development.json`
count: the other half of both sets is kept back for acceptance. The tasks take turns, so that a bench that is
cut short has seen all of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EACH, LONGEST = 3, 3000
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
SPEC_BENCH, HUMANEVAL = "hemingkx/Spec-Bench, Apache-2.0", "openai/human-eval, MIT"
COMPLETE = "Complete this Python function. Answer with the code.\n\n{prompt}"
EDIT = (
    "Rename the function `{name}` to `{name}_checked` everywhere in this file, add type hints where they are"
    " missing, and change nothing else. Give the whole file back.\n\n```python\n{file}\n```"
)


def spaced(items: Sequence[Any], count: int = EACH) -> list[Any]:
    """`count` of them at equal distances, the first one included."""
    return [items[i * len(items) // count] for i in range(count)]


def spec_bench(questions: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Prompts by task; categories of MT-Bench (writing, roleplay, …) are one task."""
    found: dict[str, list[dict[str, Any]]] = {task: [] for task in TASKS}
    for question in questions:
        task = question["category"] if question["category"] in TASKS else "mt_bench"
        prompt = question["turns"][0]
        if len(prompt) <= LONGEST:
            number = question["question_id"]
            found[task].append(
                {"id": f"{task}/{number}", "task": task, "prompt": prompt, "source": SPEC_BENCH}
            )
    return {task: spaced(rows) for task, rows in found.items()}


def humaneval(problems: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    chosen = spaced(problems)
    others = spaced([p for p in problems if p not in chosen])
    return {
        "humaneval": [
            {
                "id": p["task_id"],
                "task": "humaneval",
                "prompt": COMPLETE.format(prompt=p["prompt"].strip()),
                "source": HUMANEVAL,
            }
            for p in chosen
        ],
        "edit": [
            {
                "id": f"edit/{p['task_id']}",
                "task": "edit",
                "prompt": EDIT.format(
                    name=p["entry_point"], file=(p["prompt"] + p["canonical_solution"]).strip()
                ),
                "source": HUMANEVAL,
            }
            for p in others
        ],
    }


def read(folder: Path, name: str, pattern: str) -> list[dict[str, Any]]:
    """The objects of the one file that is called so or matches."""
    found = [p for p in sorted(folder.iterdir()) if p.name == name or p.match(pattern)]
    if len(found) != 1:
        raise SystemExit(f"{folder} must hold one {name}, it holds {len(found)}")
    return [json.loads(line) for line in found[0].read_text(encoding="utf-8").split("\n") if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DATA_FOLDER")
    parser.add_argument("--out", type=Path, default=HERE / "drafters.jsonl")
    args = parser.parse_args()
    kept = {k: set(v) for k, v in json.loads((HERE / "development.json").read_text()).items()}
    questions = read(args.folder, "question.jsonl", "spec_bench*.jsonl")
    problems = read(args.folder, "HumanEval.jsonl", "humaneval*.jsonl")
    chosen = {
        **spec_bench([q for q in questions if q["question_id"] in kept["spec_bench"]]),
        **humaneval([p for p in problems if int(p["task_id"].rpartition("/")[2]) in kept["humaneval"]]),
    }
    rows = [rows[turn] for turn in range(EACH) for rows in chosen.values()]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
