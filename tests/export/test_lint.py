"""Every fault is named with its fix, in every form people paste a configuration, and repaired without
touching the rest.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ParameterError
from slipstream.export.engines import parse_engine, vllm
from slipstream.export.lint import Report, lint
from slipstream.export.lint_fault import Fault

FAULTS = json.loads((Path(__file__).parent / "faults.json").read_text())
PAIR = 'vllm serve Qwen/Qwen3-32B --speculative-config \'{"method": "%s", "model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5}\''  # noqa: E501
CALL = """from vllm import LLM

llm = LLM(
    model="meta-llama/Llama-3.1-70B-Instruct",
    speculative_model="meta-llama/Llama-3.2-1B-Instruct",
    num_speculative_tokens=5,
    speculative_max_model_len=4096,
    tensor_parallel_size=size(),
)
"""


def rules(report: Report) -> list[str]:
    return [fault.rule for fault in report.faults]


def repaired(text: str, engine: str = "vllm==0.33.0", **options: Any) -> str:
    report = lint(text, engine, repair=True, **options)
    assert report.fixed is not None and not report.left, report.left
    assert not lint(report.fixed, engine, **options).faults, "a repaired text is clean"
    return report.fixed


# -- the three blocks that circulate ----------------------------------------------------------------


def test_the_method_called_draft() -> None:
    report = lint(PAIR % "draft", "vllm==0.33.0")
    (fault,) = report.errors
    assert (
        fault.rule == "method-name" and "draft_model" in fault.fix and "--speculative-config" in fault.where
    )
    assert repaired(PAIR % "draft") == PAIR % "draft_model"


def test_the_call_with_removed_arguments() -> None:
    report = lint(CALL, "vllm==0.33.0")
    named = {f.where for f in report.errors if f.rule == "removed-argument"}
    assert named == {"speculative_model", "num_speculative_tokens", "speculative_max_model_len"}
    fixed = repaired(CALL)
    (call,) = [
        n for n in ast.walk(ast.parse(fixed)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "LLM"
    ]
    values = {k.arg: k.value for k in call.keywords}
    assert set(values) == {"model", "tensor_parallel_size", "speculative_config"}
    assert ast.literal_eval(values["speculative_config"]) == {
        "model": "meta-llama/Llama-3.2-1B-Instruct",
        "num_speculative_tokens": 5,
        "max_model_len": 4096,
        "method": "draft_model",
    }
    assert ast.unparse(values["tensor_parallel_size"]) == "size()", "what is no literal stays as written"
    assert fixed.startswith("from vllm import LLM\n\nllm = LLM(\n")


def test_the_head_without_a_model() -> None:
    text = "# our server\nmethod: eagle3 # fast\nnum_speculative_tokens: 2\n"
    assert rules(lint(text, "vllm==0.33.0")) == ["missing-model"]
    fixed = repaired(text)
    assert (
        "# our server" in fixed and "method: ngram  # fast" in fixed and "num_speculative_tokens: 2" in fixed
    )
    named = repaired(text, draft="org/head")
    assert named == text + "model: org/head\n"


# -- every rule -------------------------------------------------------------------------------------


def filled(value: Any, folders: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {k: filled(v, folders) for k, v in value.items()}
    if isinstance(value, list):
        return [filled(v, folders) for v in value]
    return re.sub(r"\{(\w+)\}", lambda m: folders[m[1]], value) if isinstance(value, str) else value


def command(case: dict[str, Any], folders: dict[str, str]) -> str:
    words = ["vllm", "serve", folders["target"], *filled(case.get("arguments", []), folders)]
    if "config" in case:
        words += ["--speculative-config", json.dumps(filled(case["config"], folders))]
    if "raw" in case:
        words += ["--speculative-config", filled(case["raw"], folders)]
    return shlex.join(words)


@pytest.mark.parametrize("case", FAULTS, ids=lambda c: c["rule"])
def test_each_rule_finds_its_fault_and_mends_it(case: dict[str, Any], checkpoints: dict[str, str]) -> None:
    text = command(case, checkpoints)
    report = lint(text, case["engine"])
    assert case["rule"] in [f.rule for f in report.errors]
    for fault in report.faults:
        assert fault.where and fault.message and fault.fix and "\n" not in fault.message + fault.fix
    assert case["rule"] not in [f.rule for f in lint(repaired(text, case["engine"]), case["engine"]).faults]


def test_every_rule_of_the_engine_is_covered() -> None:
    source = "".join(
        (Path(lint.__code__.co_filename).parent / name).read_text()
        for name in ("lint_vllm.py", "lint_vllm_values.py", "lint_vllm_models.py")
    )
    named = set(
        re.findall(r'^\s+"([a-z]+(?:-[a-z]+)+|lossy|combination|vocabulary)",$', source, re.MULTILINE)
    )
    warnings = {"ngram-defaults", "method-missing", "deprecated-method", "head-config", "lossy", "draft-name"}
    assert {case["rule"] for case in FAULTS} | warnings >= named - {"draft-model"}
    assert len(named) > 15


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "medusa"])
def test_good_configurations_are_clean(method: str, checkpoints: dict[str, str]) -> None:
    model = {"draft_model": "draft", "eagle": "eagle1", "eagle3": "eagle3", "medusa": "medusa"}.get(method)
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    config |= {"model": checkpoints[model]} if model else {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    text = shlex.join(["vllm", "serve", checkpoints["target"], "--speculative-config", json.dumps(config)])
    report = lint(text, "vllm==0.32.0", repair=True)
    assert report.faults == [] and report.fixed == text


def test_warnings_are_no_errors() -> None:
    for text, rule in (
        ('{"method": "ngram", "num_speculative_tokens": 3}', "ngram-defaults"),
        ('{"model": "a/b", "num_speculative_tokens": 3, "method": "deepseek_mtp"}', "deprecated-method"),
        (
            'vllm serve x --speculative-config \'{"model": "a/b", "num_speculative_tokens": 3}\'',
            "method-missing",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 3, "rejection_sample_method":'  # noqa: E501
            ' "synthetic", "synthetic_acceptance_rates": [0.5]}',
            "lossy",
        ),
    ):
        report = lint(text, "vllm==0.32.0")
        assert rules(report) == [rule] and not report.errors


def test_a_name_that_misleads_vllm() -> None:
    text = '{"method": "draft_model", "model": "me/my-eagle-draft", "num_speculative_tokens": 3}'
    report = lint(text, "vllm==0.32.0", repair=True)
    assert rules(report) == ["draft-name"] == [f.rule for f in report.left], (
        "no text can mend a folder's name"
    )


def test_a_head_that_leaves_its_layers_to_the_engine(checkpoints: dict[str, str], tmp_path: Path) -> None:
    config = json.loads((Path(checkpoints["eagle3"]) / "config.json").read_text())
    for name in ("eagle_config", "eagle_aux_hidden_state_layer_ids"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 2})
    assert rules(lint(text, "vllm", target=checkpoints["target"])) == ["head-config"]


@pytest.mark.parametrize(
    ("kind", "method"), [("eagle3", "eagle"), ("eagle3", "draft_model"), ("medusa", "eagle")]
)
def test_heads_of_another_kind_than_the_method(kind: str, method: str, checkpoints: dict[str, str]) -> None:
    text = json.dumps({"method": method, "model": checkpoints[kind], "num_speculative_tokens": 2})
    report = lint(text, "vllm==0.32.0", target=checkpoints["target"], repair=True)
    assert "head-config" in rules(report) and report.left == []
    assert json.loads(report.fixed or "")["method"] == kind


# -- versions ---------------------------------------------------------------------------------------


def test_versions_know_different_words() -> None:
    def found(config: dict[str, Any], version: str) -> list[str]:
        return [f.rule for f in lint(json.dumps(config), f"vllm=={version}").errors]

    medusa = {"method": "medusa", "model": "a/b", "num_speculative_tokens": 3}
    assert found(medusa, "0.32.0") == [] and found(medusa, "0.33.0") == ["method-version"]
    switch = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "disable_by_batch_size": 4,
    }
    assert found(switch, "0.16.0") == [] and found(switch, "0.17.0") == ["removed-key"]
    schedule = {**switch, "num_speculative_tokens_per_batch_size": [[1, 4, 3]]}
    del schedule["disable_by_batch_size"]
    assert found(schedule, "0.24.0") == [] and found(schedule, "0.23.0") == ["removed-key"]
    assert found(medusa, "0.32.1") == [], "a version that was not read counts as the one before it"
    with pytest.raises(ParameterError, match="older than 0.8.5"):
        found(medusa, "0.7.0")


def test_what_the_batch_switch_becomes() -> None:
    text = (
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "disable_by_batch_size": 4}'
    )
    fixed = json.loads(repaired(text, "vllm==0.32.0"))
    assert fixed["num_speculative_tokens_per_batch_size"] == [[1, 4, 3], [5, 5, 0]]
    assert "disable_by_batch_size" not in json.loads(repaired(text, "vllm==0.20.0"))


def test_the_table_says_what_the_releases_say() -> None:
    facts = vllm()
    assert facts.when(facts.methods, "medusa") == "0.8.5 to 0.32.0"
    assert facts.when(facts.methods, "draft_model") == "0.15.0 and newer"
    assert facts.when(facts.keys, "speculative_token_tree") == "0.10.0 to 0.20.0"
    assert "host" in facts.names(facts.args, "0.33.0") and "speculative_model" not in facts.args
    assert len(facts.read) >= 25 and "wheels" in facts.source


# -- forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (PAIR % "draft", "command"),
        ("python -m vllm.entrypoints.openai.api_server --model a/b -sc '{\"method\": \"draft\", \"model\": \"c\", \"num_speculative_tokens\": 2}'", "command"),  # noqa: E501
        ("docker run --gpus all vllm/vllm-openai:v0.32.0 --model a/b --speculative-config.method draft --speculative-config.model c --speculative-config.num_speculative_tokens 2", "command"),  # noqa: E501
        ('{"method": "draft", "model": "c", "num_speculative_tokens": 2}', "json"),
        ('{"model": "a/b", "speculative_config": {"method": "draft", "model": "c", "num_speculative_tokens": 2}}', "json"),  # noqa: E501
        ("model: a/b\nspeculative-config:\n  method: draft\n  model: c\n  num_speculative_tokens: 2\n", "yaml"),  # noqa: E501
        ("model: a/b\nspeculative-config: '{\"method\": \"draft\", \"model\": \"c\", \"num_speculative_tokens\": 2}'\n", "yaml"),  # noqa: E501
        ('LLM("a/b", speculative_config={"method": "draft", "model": "c", "num_speculative_tokens": 2})', "python"),  # noqa: E501
        ('x = AsyncEngineArgs(model=m, speculative_config=dict(method="draft", model="c", num_speculative_tokens=k))', "python"),  # noqa: E501
    ],
)  # fmt: skip
def test_every_form_is_read_and_written_back(text: str, kind: str) -> None:
    report = lint(text, repair=True)
    assert report.kind == kind and rules(report) == ["method-name"] and report.left == []
    fixed = report.fixed or ""
    assert "draft_model" in fixed and lint(fixed).faults == []
    if "k)" in text:
        assert '"num_speculative_tokens": k' in fixed, "names stay names"


def test_sglangs_call() -> None:
    report = lint('sgl.Engine(model_path="a", speculative_algorithm="EAGLE-3")', repair=True)
    assert report.engine.name == "sglang" and rules(report) == ["method-name", "missing-model"]
    assert report.fixed == 'sgl.Engine(model_path="a", speculative_algorithm="EAGLE3")'


def test_an_image_names_the_version() -> None:
    text = "docker run vllm/vllm-openai:v0.32.0 --model a/b --speculative-config '{}'"
    assert str(lint(text).engine) == "vllm 0.32.0"
    assert lint(text, "vllm==0.20.0").engine.version == "0.20.0"
    with pytest.raises(ParameterError, match="configuration of sglang"):
        lint("python -m sglang.launch_server --model-path a", "vllm")


def test_a_script_keeps_what_is_around_the_command() -> None:
    text = """#!/bin/sh
# vllm serve is started here
export HF_HOME=/data   # "cache"
FOO=1 vllm serve a/b \\
  --speculative-config '{"method": "draft", "model": "c",
    "num_speculative_tokens": 2}' \\
  --port 9000
echo 'done'
"""
    fixed = repaired(text)
    assert fixed.startswith(
        '#!/bin/sh\n# vllm serve is started here\nexport HF_HOME=/data   # "cache"\nFOO=1 vllm serve'
    )
    assert fixed.endswith("--port 9000\necho 'done'\n") and " \\\n  --speculative-config" in fixed


@pytest.mark.parametrize("shell", [False, True])
def test_manifests(shell: bool) -> None:
    inner = PAIR % "draft"
    words = ["sh", "-c"] if shell else shlex.split(inner)[:2]
    args = json.dumps([inner] if shell else shlex.split(inner)[2:])
    text = f"""kind: Service
metadata: {{name: s}}
---
kind: Deployment # ours
spec:
  template:
    spec:
      containers:
        - name: sidecar
          image: busybox
        - name: engine
          image: vllm/vllm-openai:v0.32.0
          command: {json.dumps(words)}
          args: {args}
"""
    report = lint(text, repair=True)
    assert rules(report) == ["method-name"] and report.engine.version == ("0.33.0" if shell else "0.32.0")
    assert (
        report.fixed
        and "# ours" in report.fixed
        and "draft_model" in report.fixed
        and "busybox" in report.fixed
    )
    assert lint(report.fixed).faults == []


@pytest.mark.parametrize(
    "text",
    [
        'vllm serve a/b --speculative-config “{"method": "ngram", "num_speculative_tokens": 2}”',
        "vllm serve a/b --speculative-config '{“method”: “ngram”, “num_speculative_tokens”: 2}'",
        "vllm serve a/b --speculative-config \"{'method': 'ngram', 'num_speculative_tokens': 2}\"",
        "vllm serve a/b --speculative-config '{method: ngram, num_speculative_tokens: 2}'",
        "{'method': 'ngram', 'num_speculative_tokens': 2}",
    ],
)
def test_damaged_json_is_mended(text: str) -> None:
    report = lint(text, repair=True)
    assert "syntax" in rules(report)
    fixed = report.fixed or ""
    found = json.loads(fixed if fixed.startswith("{") else shlex.split(fixed)[-1])
    assert found["method"] == "ngram" and found["num_speculative_tokens"] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("hello there", "neither a command line"),
        ("{]", "not JSON"),
        ("- a\n- b", "neither"),
        ("llm = LLM(model='x'", "not Python"),
        ("LLM(model='x', speculative_config=make())", "not written out"),
        ("vllm serve x --speculative-config nonsense", "not JSON"),
        ("vllm serve x 'unclosed", "quotes"),
        ("vllm serve x --tensor-parallel-size 2 4", "stands alone"),
        ("vllm serve x --speculative-config '[1]'", "JSON object"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        lint(text)


# -- other engines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "rule", "fixed"),
    [
        ("--speculative-algorithm EAGLE-3 --speculative-draft-model-path h", "method-name", "--speculative-algorithm EAGLE3"),  # noqa: E501
        ("--speculative-algorithm EAGLE --speculative-num-steps 3", "three-or-none", "--speculative-num-draft-tokens 4"),  # noqa: E501
        ("--speculative-algorithm NGRAM --speculative-ngram-max-trie-dept 9", "unknown-argument", "--speculative-ngram-max-trie-depth 9"),  # noqa: E501
        ("--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 8", "chain-length", "--speculative-num-draft-tokens 4"),  # noqa: E501
        ("--speculative-algorithm NGRAM --speculative-accept-threshold-acc 0.5", "lossy", "NGRAM"),
        ("--speculative-algorithm STANDALONE", "missing-model", None),
        ("--speculative-algorithm MEDUSA", "method-name", None),
        ("--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4", "method-missing", None),  # noqa: E501
    ],
)  # fmt: skip
def test_sglang(options: str, rule: str, fixed: str | None) -> None:
    text = f"python -m sglang.launch_server --model-path a/b {options}"
    report = lint(text, repair=True)
    assert rule in rules(report) and report.engine == parse_engine("sglang")
    assert (fixed is None) == (rule in [f.rule for f in report.left])
    if fixed is not None:
        assert fixed in (report.fixed or "")


@pytest.mark.parametrize(
    ("options", "rule", "fixed"),
    [
        ("-md d.gguf --spec-type draft-simple --draft-max 8", "removed-argument", "--spec-draft-n-max 8"),
        ("-md d.gguf --spec-type draft", "method-name", "--spec-type draft-simple"),
        ("-md d.gguf", "method-missing", "--spec-type draft-simple"),
        ("--spec-type draft-simple,ngram-mod", "missing-model", None),
    ],
)
def test_llamacpp(options: str, rule: str, fixed: str | None) -> None:
    report = lint(f"./build/bin/llama-server -m t.gguf {options}", repair=True)
    assert rules(report) == [rule]
    if fixed is None:
        assert [f.rule for f in report.left] == [rule]
    else:
        assert fixed in (report.fixed or "") and not report.left


def test_a_fault_as_json() -> None:
    (fault,) = lint('{"method": "draft", "model": "a", "num_speculative_tokens": 1}').faults
    assert isinstance(fault, Fault)
    assert set(fault.as_dict()) == {"rule", "where", "message", "fix", "severity", "fixable"}
