"""`bench/quality.py`, `bench/humaneval.py` and `bench/int8_layers.py` on tiny models and shapes."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import int8_layers
import quality
from humaneval import Problem, judge, program, read_problems
from slipstream.errors import ParameterError
from slipstream.model.pack import ROWS
from slipstream.testing.quantised import every_size, lacks_int8
from slipstream.testing.tiny import save_tiny, save_tiny_gguf, tiny_model

needs_int8 = pytest.mark.skipif(lacks_int8(), reason="this CPU has no int8 products")
ADD = Problem(
    "t/0", "def add(a, b):\n    '''Their sum.'''\n", "add", "def check(f):\n    assert f(2, 3) == 5\n"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target", kind="qwen2", vocab_size=260, tie=True)
    save_tiny_gguf(root / "other.gguf", tiny_model("qwen2", vocab_size=260, seed=4))
    lines = [
        {"task_id": f"t/{i}", **{k: getattr(ADD, k) for k in ("prompt", "entry_point", "test")}}
        for i in (0, 1)
    ]
    (root / "problems.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return root


@pytest.fixture(autouse=True)
def cache(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(models / "cache"))


def bench(models: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """Run it; gives what it wrote."""
    with every_size():
        quality.main(
            ["--target", str(models / "target"), "--dtype", "float32", "--json", str(out), "--threads", "1"]
            + ["--window", "24", "--windows", "1", "--max-tokens", "8", "--batch", "2", *arguments]
        )
    return json.loads(out.read_text())["candidates"]  # type: ignore[no-any-return]


# -- laws ---------------------------------------------------------------------------------------------


@needs_int8
def test_candidates_are_compared_with_the_plain_model_on_the_same_tokens(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = f"other={models / 'other.gguf'}"
    found = bench(models, tmp_path / "q.json", "--candidates", f"int8,int8+embedding,q8_0,q4_0,{other}")
    assert all(s["positions"] == 3 * 23 for s in found.values())
    kl = {name: s["kl"] for name, s in found.items()}
    assert 0 < kl["q8_0"] < kl["q4_0"] < kl["other"]
    assert 0 < kl["int8"] < kl["q4_0"] and 0 < kl["int8+embedding"] < kl["q4_0"]
    assert len({s["perplexity_plain"] for s in found.values()}) == 1
    assert found["int8+embedding"]["weights"] < found["int8"]["weights"] < found["q8_0"]["weights"]
    assert found["other"]["agree"] < 0.5 < found["q8_0"]["agree"]
    told = capsys.readouterr().out
    assert f"| int8 | {found['int8']['weights'] / 1e9:.2f} | {kl['int8']:.5f} ±" in told


def test_it_goes_on_where_it_was_ended(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = bench(models, tmp_path / "whole.json", "--candidates", "q4_0,q8_0")
    log = tmp_path / "whole.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:4]) + '\n{"row": {"sett')  # the run and a whole candidate
    opened, seen = quality.opened, []
    monkeypatch.setattr(quality, "opened", lambda name, *rest: (seen.append(name), opened(name, *rest))[1])
    assert bench(models, tmp_path / "whole.json", "--candidates", "q4_0,q8_0", "--resume") == whole
    assert seen == ["q8_0"]  # the plain model's logits are there
    assert bench(models, tmp_path / "whole.json", "--table") == whole
    with pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "texts", lambda: {"documents": "x" * 100})
        bench(models, tmp_path / "whole.json", "--candidates", "q8_0", "--resume")


def test_the_numbers_are_those_of_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    plain, found = torch.randn(2, 9, 50, generator=generator).unbind()
    ids = torch.randint(0, 50, (10,), generator=generator).tolist()
    row = quality.compare(found, plain, ids)
    p, q = plain.double().softmax(-1), found.double().softmax(-1)
    kl = nn.functional.kl_div(q.log(), p, reduction="none").sum(-1)
    assert row["kl"] == pytest.approx(float(kl.sum())) and row["kl_most"] == pytest.approx(float(kl.max()))
    assert row["nll"] == pytest.approx(9 * float(nn.functional.cross_entropy(found, torch.tensor(ids[1:]))))
    assert quality.compare(plain, plain, ids)["kl"] == 0.0
    told = quality.summary([{"setting": "x", "weights": 5, **row}])
    assert told["perplexity"] == pytest.approx(math.exp(row["nll"] / 9)) and told["agree"] == row["agree"] / 9
    assert told["error"] == pytest.approx(float(kl.std(correction=0)) / 3)


def test_q8_0_is_what_a_gguf_file_holds() -> None:
    """Blocks of 32 with a scale of max / 127, rounded to float16; vectors stay."""
    model = tiny_model("qwen2")
    before = {n: p.clone() for n, p in model.named_parameters()}
    quality.through_gguf(model, quality.GGUF["q8_0"])
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, before[name])
        else:
            blocks, was = parameter.view(-1, 32), before[name].view(-1, 32)
            scales = (was.abs().amax(1) / 127).half().float()
            assert (blocks - was).abs().max() <= scales.max() * (0.5 + 127 / 2048)
            assert not torch.equal(blocks, was)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--candidates", "int3"], "unknown candidate 'int3'"),
        (["--candidates", "a="], "unknown candidate 'a='"),
        (["--window", "100000000"], "give a --window of at most that"),
        (["--humaneval", "/nowhere.jsonl"], "cannot be read as HumanEval problems"),
        (["--table"], "holds no results"),
    ],
)
def test_a_mistake_is_one_line(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench(models, tmp_path / "q.json", *arguments)
    assert ended.value.code == 2 and told in capsys.readouterr().err


# -- HumanEval ----------------------------------------------------------------------------------------


def test_answers_are_judged_and_kept(models: Path, tmp_path: Path) -> None:
    """A random model solves nothing; the same again with --resume asks nothing."""
    options = ("--windows", "0", "--candidates", "plain", "--humaneval", str(models / "problems.jsonl"))
    found = bench(models, tmp_path / "h.json", *options)
    assert found["plain"] == {"weights": found["plain"]["weights"], "problems": 2, "passed": 0}
    rows = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert [r["row"]["task"] for r in rows if "row" in r] == ["t/0", "t/1"]
    assert all(0 < len(r["row"]["ids"]) <= 8 and r["row"]["why"] for r in rows if "row" in r)
    assert bench(models, tmp_path / "h.json", *options, "--resume") == found
    assert len((tmp_path / "h.jsonl").read_text().splitlines()) == len(rows) + 1  # the second run


RIGHT = "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"Sure!\n```python\n{RIGHT}```\nThis adds.",
        f"```\n{RIGHT}```",
        f"```py\nprint('first')\n```\nand\n```python\n{RIGHT}",  # cut off at the limit
        RIGHT,
        "    return a + b\n",
    ],
)
def test_right_answers_pass_in_every_form(answer: str) -> None:
    assert judge(ADD, answer, 20.0) == {"passed": True, "why": ""}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("    return a - b\n", "AssertionError"),
        ("```python\ndef add(a, b)\n```", "SyntaxError"),
        ("    import os, sys\n    os._exit(7)\n", "exit status 7"),
        ("    return bytes(1 << 34)\n", "MemoryError"),
        ("    return open('/proc/self/environ').read().count('SLIPSTREAM') and 5 or 6\n", "AssertionError"),
    ],
)
def test_wrong_answers_fail_and_say_why(answer: str, why: str) -> None:
    verdict = judge(ADD, answer, 20.0)
    assert not verdict["passed"] and why in verdict["why"]


def test_an_answer_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w')"
    start = f"    import subprocess, sys\n    subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    assert judge(ADD, f"{start}    while True: pass\n", 0.7) == {
        "passed": False,
        "why": "took more than 0.7 s",
    }
    time.sleep(1.6)
    assert not mark.exists()


def test_imports_of_the_head_hold_for_the_answer() -> None:
    typed = Problem(
        "t", "from typing import List\n\ndef f(x: List[int]):\n    '''x'''\n", "f", "def check(f): f([1])\n"
    )
    whole = program(typed, "```python\ndef f(x: List[int]):\n    return x\n```")
    assert whole.index("from typing") < whole.index("return x") < whole.index("check(f)")


def test_problems_are_read(models: Path, tmp_path: Path) -> None:
    assert [p.task for p in read_problems(models / "problems.jsonl")] == ["t/0", "t/1"]
    (tmp_path / "bad.jsonl").write_text('{"task_id": "x"}\n')
    with pytest.raises(ParameterError, match="each line must hold task_id, prompt"):
        read_problems(tmp_path / "bad.jsonl")


# -- layers -------------------------------------------------------------------------------------------


@needs_int8
def test_layers_are_measured_by_shape_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--shapes",
        "64x32,32x16",
        "--rows",
        "1,4",
        "--rounds",
        "1",
        "--working-set",
        "1",
        "--threads",
        "1",
    ]
    int8_layers.main([*options, "--json", str(tmp_path / "out" / "l.json")])
    rows = json.loads((tmp_path / "out" / "l.json").read_text())["rows"]
    assert [(r["out"], r["in"], r["rows"]) for r in rows] == [
        (64, 32, 1),
        (64, 32, 4),
        (32, 16, 1),
        (32, 16, 4),
    ]
    assert all(r["plain"] > 0 and r["int8"] > 0 for r in rows)
    assert "int8 gains at 4 rows from" in capsys.readouterr().out


def test_the_smallest_size_is_the_one_from_which_all_gain() -> None:
    def of(int8: float) -> dict[int, dict[str, float]]:
        return {ROWS: {"plain": 1.0, "int8": int8}}

    assert (
        int8_layers.smallest({(10, 10): of(0.9), (20, 20): of(1.1), (30, 30): of(0.8), (40, 40): of(0.7)})
        == 900
    )
    assert int8_layers.smallest({(10, 10): of(0.9), (40, 40): of(1.2)}) is None
    assert int8_layers.shapes_of("qwen2.5-coder-0.5b") == [
        (128, 896),
        (896, 896),
        (896, 4864),
        (4864, 896),
        (151936, 896),
    ]


def test_wrong_shapes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("3", "3x", "0x4", "axb"):
        with pytest.raises(SystemExit):
            int8_layers.main(["--shapes", text])
        assert "--shapes must be like" in capsys.readouterr().err
