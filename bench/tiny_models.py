"""The house models: a tiny target that has read Python's standard library, and its drafters.

`make tiny-models` trains them with fixed seeds, through the same commands a person would type, and puts them
where the package ships them: src/slipstream/house/tiny. Each stage resumes; what is there is not made again
(`--restart` makes all of it again). `--quick` runs every stage on almost nothing, to test this script.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import slipstream
from slipstream.cli.main import main as command
from slipstream.cli.train_watch import TrainingWatch
from slipstream.core.params import SamplingParams
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.parts import ModelParts
from slipstream.model.store import write_atomic
from slipstream.model.trainable import Trainable
from slipstream.proof.reference import Reference
from slipstream.proof.ties import margin_of
from slipstream.train.dataset import DataSet
from slipstream.train.draft_lm import DraftMethod
from slipstream.train.fit import fit
from slipstream.train.provenance import TargetNote, seal
from slipstream.train.samples import Sample
from slipstream.train.settings import FitSettings
from slipstream.train.sources import OnlineSource

ROOT = Path(__file__).parents[1]
HOUSE = ROOT / "src" / "slipstream" / "house" / "tiny"
WORK = Path("bench") / "out" / "tiny"  # below ROOT: what ships must not name folders of this machine
LEFT_OUT = {
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "encodings",
}
END = "<|end|>"
# The models only continue text, so a chat is the text of its messages, tools and calls included.
TEMPLATE = (
    '{% if tools %}{{ tools | tojson }}\n<tool_call>{"name": …}</tool_call>\n{% endif %}'
    "{% for message in messages %}{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)
MOST_BYTES = 8_000_000
PROMPT_TOKENS, HELD_OUT = 48, 0.06


@dataclass(frozen=True)
class Scale:
    """How much of everything. shapes: hidden, layers, heads, key-value heads, MLP width."""

    vocab: int = 2048
    target: tuple[int, int, int, int, int] = (192, 5, 6, 2, 512)
    draft: tuple[int, int, int, int, int] = (96, 2, 3, 1, 256)
    window: int = 256
    target_steps: int = 900
    draft_steps: int = 500
    batch: int = 8
    prompts: int = 1500
    answer: int = 96
    eagle_vocab: int = 1024
    eagle_mlp: int = 512
    distil_steps: int = 700
    medusa_steps: int = 700
    eagle_steps: int = 900
    measured: int = 60


FULL = Scale()
QUICK = Scale(
    vocab=300, target=(32, 3, 4, 2, 64), draft=(16, 1, 2, 1, 32), window=32, target_steps=4, draft_steps=3,
    prompts=24, answer=12, eagle_vocab=64, eagle_mlp=32, distil_steps=3, medusa_steps=3, eagle_steps=3,
    measured=4,
)  # fmt: skip


def sources() -> list[tuple[str, str]]:
    """Name and text of every module of this Python's standard library, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not LEFT_OUT & set(relative.parts):
            found.append((relative.as_posix(), path.read_text(encoding="utf-8", errors="replace")))
    return found


def is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 16**8 < HELD_OUT


def make_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE; the end of a file is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=END, clean_up_tokenization_spaces=False
    )


def windows(tokenizer: PreTrainedTokenizerFast, texts: list[str], size: int) -> tuple[Sample, ...]:
    """All texts end to end, cut into samples."""
    end = tokenizer.convert_tokens_to_ids(END)
    line: list[int] = []
    for text in texts:
        line += [*tokenizer(text)["input_ids"], end]
    cuts = range(0, len(line) - size, size)
    return tuple(Sample(tuple(line[i : i + size]), (False, *[True] * (size - 1))) for i in cuts)


def new_model(vocab: int, shape: tuple[int, int, int, int, int], end: int, seed: int) -> LlamaForCausalLM:
    hidden, layers, heads, kv_heads, inner = shape
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=inner,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=end,
        bos_token_id=None,
        pad_token_id=end,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def read(
    name: str,
    out: Path,
    tokenizer: PreTrainedTokenizerFast,
    shape: tuple[int, int, int, int, int],
    data: DataSet,
    scale: Scale,
    steps: int,
    seed: int,
) -> None:
    """Train a language model from nothing on the sources, by the loop that trains drafters."""
    model = new_model(len(tokenizer), shape, tokenizer.eos_token_id, seed)
    count = sum(p.numel() for p in model.parameters())
    parts = ModelParts.of(model)
    note = TargetNote(name, "of nobody: it learns text")
    method = DraftMethod(Trainable(model, tokenizer), parts, loss="sft", depth=1)
    settings = FitSettings(
        lr=3e-3, steps=steps, batch_size=scale.batch, warmup=0.05, weight_decay=0.01, seed=seed,
        checkpoint_every=25, measure_every=0, heldout_batches=8,
    )  # fmt: skip
    with TrainingWatch() as watch:
        watch.note(f"{name}: {count:,} parameters")
        fit(method, OnlineSource(data, None, {}), out, settings, note, watch=watch)


def prompts(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], count: int, seed: int
) -> Iterator[dict[str, str]]:
    """Beginnings of passages, from random lines on."""
    dice = random.Random(seed)
    made = 0
    while made < count:
        lines = dice.choice(texts).splitlines(keepends=True)
        text = "".join(lines[dice.randrange(max(1, len(lines) - 8)) :][:40])
        ids = tokenizer(text)["input_ids"][:PROMPT_TOKENS]
        if len(ids) == PROMPT_TOKENS:
            yield {"prompt": tokenizer.decode(ids)}
            made += 1


def slip(*arguments: object) -> None:
    """One slipstream command."""
    told = [str(a) for a in arguments]
    print("$ slipstream", " ".join(told), flush=True)
    try:
        command(told)
    except SystemExit as status:
        if status.code:
            raise


def ship(made: Path, home: Path) -> None:
    """Copy a drafter without its checkpoints and curves."""
    shutil.rmtree(home, ignore_errors=True)
    skip = shutil.ignore_patterns("checkpoints", "tensorboard", "curve.*", "*.partial")
    shutil.copytree(made, home, ignore=skip)


def folder_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def speak(folder: Path) -> None:
    """Give a shipped model its chat template. It is trained without one: its data are plain text."""
    write_atomic(folder / "chat_template.jinja", TEMPLATE + "\n")
    seal(folder)


def difference(
    reference: Reference, prompt: list[int], plain: list[int], drafted: list[int]
) -> dict[str, Any]:
    """Where a greedy answer left plain decoding's, and how near the two tokens were (`slipstream verify`)."""
    pairs = enumerate(zip(plain, drafted, strict=False))
    at, tokens = next(((i, (a, b)) for i, (a, b) in pairs if a != b), (None, None))
    if at is None or tokens is None:
        return {"near_tie": False}
    pipeline = LogitsPipeline(SamplingParams(temperature=0.0), reference.vocab_size, frozenset(), len(prompt))
    margin = margin_of(reference, pipeline, prompt, plain[:at], 0, tokens)
    return {"at": at, "logits": margin.logits, "spacing": margin.spacing, "near_tie": margin.near_tie}


def measure(tokenizer: PreTrainedTokenizerFast, texts: list[str], scale: Scale, base: Path) -> dict[str, Any]:
    """tau in the engine on passages of files nobody was trained on, and the trainers' expectations."""
    asked = [p["prompt"] for p in prompts(tokenizer, texts, scale.measured, seed=99)]
    params = SamplingParams(temperature=0.0, max_tokens=scale.answer)
    drafters = {
        "draft_model, not distilled": f"draft_model:model={base}",
        "draft_model": f"draft_model:model={HOUSE / 'draft'}",
        "medusa, one chain": f"medusa:heads={HOUSE / 'medusa'},topk=1x1x1x1",
        "medusa": f"medusa:heads={HOUSE / 'medusa'}",
        "eagle, one chain": f"eagle:heads={HOUSE / 'eagle'},top_k=1",
        "eagle": f"eagle:heads={HOUSE / 'eagle'}",
    }
    found: dict[str, Any] = {}
    with slipstream.load(str(HOUSE / "target"), max_rows=16) as session:
        plain = session.generate(asked, params)
        reference = Reference(session.engine)
        for name, spec in drafters.items():
            session.use(spec)
            answers = session.generate(asked, params)
            counts = answers[0].counts.__class__()
            for answer in answers:
                counts.add(answer.counts)
            found[name] = {
                "tau": counts.tau,
                "acceptance": counts.conditional_acceptance,
                "same_tokens": sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)),
                "answers": len(answers),
                "differences": [
                    difference(
                        reference, list(tokenizer(prompt)["input_ids"]), list(a.tokens), list(b.tokens)
                    )
                    for prompt, a, b in zip(asked, plain, answers, strict=True)
                    if a.tokens != b.tokens
                ],
            }
    for name in ("draft", "medusa", "eagle"):
        note = json.loads((HOUSE / name / "slipstream.json").read_text())
        found[f"{name}, expected by its trainer"] = {"tau": note["run"]["expected"]["tau"]}
    return found


def main() -> None:
    global HOUSE, WORK
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restart", action="store_true", help="throw away what was made before")
    parser.add_argument("--quick", type=Path, help="a folder to put almost untrained models in")
    options = parser.parse_args()
    scale = FULL
    if options.quick:
        made = options.quick.absolute()
        scale, HOUSE, WORK = QUICK, made / "house", made / "work"
    os.chdir(ROOT)
    if options.restart:
        shutil.rmtree(WORK, ignore_errors=True)
        shutil.rmtree(HOUSE, ignore_errors=True)
    begun = time.perf_counter()
    WORK.mkdir(parents=True, exist_ok=True)
    texts = sources()
    train = [t for name, t in texts if not is_held_out(name)]
    held_out = [t for name, t in texts if is_held_out(name)]
    if scale is QUICK:
        train, held_out = train[:12], held_out[:4]

    if not (WORK / "tokenizer" / "tokenizer.json").exists():
        make_tokenizer(train, scale.vocab).save_pretrained(WORK / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(WORK / "tokenizer")
    about = {
        "kind": "text", "python": sys.version.split()[0],
        "files": len(train), "held_out_files": len(held_out),
        "sha256": hashlib.sha256("".join(train).encode()).hexdigest(), "vocab": scale.vocab,
        "licence": "Python Software Foundation License: the standard library's sources",
    }  # fmt: skip
    heldout = windows(tokenizer, held_out, scale.window)
    data = DataSet(about, windows(tokenizer, train, scale.window), heldout[:64])
    target, base = WORK / "target", WORK / "draft-base"
    read("tiny", target, tokenizer, scale.target, data, scale, scale.target_steps, seed=1)
    read("tiny-draft", base, tokenizer, scale.draft, data, scale, scale.draft_steps, seed=2)
    ship(target, HOUSE / "target")

    asked = WORK / "prompts.jsonl"
    asked.write_text("".join(json.dumps(p) + "\n" for p in prompts(tokenizer, train, scale.prompts, seed=3)))
    shipped = HOUSE / "target"
    slip(
        "train", "data", shipped, "--prompts", asked, "-o", WORK / "data", "--no-chat-template",
        "--temperature", 0, "--max-tokens", scale.answer, "--batch", 16, "--held-out", 0.05,
    )  # fmt: skip
    slip(
        "train", "capture", shipped, "--data", WORK / "data", "-o", WORK / "states",
        "--for", "eagle3", "--last", "--top-k", 0,
    )  # fmt: skip
    common = ["--data", WORK / "states", "--batch-size", 8, "--checkpoint-every", 100, "--measure-every", 200]
    slip(
        "train", "medusa", shipped, "-o", WORK / "medusa", *common, "--share-output", "--steps",
        scale.medusa_steps, "--lr", 3e-3,
    )  # fmt: skip
    slip(
        "train", "eagle", shipped, "-o", WORK / "eagle", *common,
        "--draft-vocab", scale.eagle_vocab, "--mlp", scale.eagle_mlp, "--unroll", 4,
        "--steps", scale.eagle_steps, "--lr", 2e-3,
    )  # fmt: skip
    slip(
        "train", "draft", shipped, "-o", WORK / "draft", *common, "--from", base, "--loss", "forward_kl",
        "--steps", scale.distil_steps, "--lr", 1e-3,
    )  # fmt: skip
    for name in ("medusa", "eagle", "draft"):
        ship(WORK / name, HOUSE / name)
    for name in ("target", "draft"):
        speak(HOUSE / name)
    found = measure(tokenizer, held_out, scale, base)
    size = folder_bytes(HOUSE)
    report = {"measured": found, "bytes": size}
    (HOUSE / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    for name, row in found.items():
        same = f"{row['same_tokens']} of {row['answers']} as plain" if "answers" in row else ""
        print(f"{name:40} tau {row['tau']:.2f}   {same}")
        for d in row.get("differences", ()):
            print(f"    {'near-tie' if d['near_tie'] else 'BROKEN'}: {d}")
    print(f"{size / 1e6:.2f} MB in {HOUSE}, {time.perf_counter() - begun:.0f} s in this call")
    if size > MOST_BYTES:
        raise SystemExit(f"the house models take {size} bytes, more than the {MOST_BYTES} they may")


if __name__ == "__main__":
    main()
