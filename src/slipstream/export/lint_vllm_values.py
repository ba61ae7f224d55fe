"""The linter's rules for vLLM about values: lengths, parallelism, windows, batch sizes, combinations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from slipstream.export.engines import model_config, vllm
from slipstream.export.lint_fault import Context, Fault, drop_key, set_key
from slipstream.export.lint_python import Source
from slipstream.export.lint_read import Document
from slipstream.export.lint_vllm import DEFAULT_LENGTH, Rule, effective_method

LENGTH = "num_speculative_tokens"
_SCHEDULE = "num_speculative_tokens_per_batch_size"


def spec_fault(document: Document, rule: str, key: str, message: str, fix: str, **more: Any) -> Fault:
    return Fault(rule, f"{document.place}: {key}", message, fix, **more)


def length(document: Document, context: Context) -> Iterator[Fault]:
    """ "num_speculative_tokens must be provided …" unless the draft's config has n_predict, or for suffix."""
    config = document.speculative
    if not config or "spec_tokens" in document.args or LENGTH in document.args:
        return
    method = effective_method(document)
    value = config.get(LENGTH)
    if value is None:
        own = model_config(config.get("model")) or {}
        known = any(k in own for k in ("n_predict", "block_size", "dspark_block_size", "speculators_config"))
        if method in ("suffix", "extract_hidden_states") or known:
            return
        if method is not None and "mtp" in method and context.target_config is None:
            return  # the target's config may say n_predict
        yield spec_fault(
            document,
            "missing-length",
            LENGTH,
            f"{LENGTH} is missing, and neither the method nor the draft's config gives it",
            f'add "{LENGTH}": {DEFAULT_LENGTH}, then measure',
            repair=set_key(LENGTH, DEFAULT_LENGTH),
        )
    elif not _counts(value):
        yield spec_fault(
            document,
            "length-value",
            LENGTH,
            f"{LENGTH} must be a whole number of at least 1, not {value}; 0 is said per batch size",
            f"write {DEFAULT_LENGTH}, or leave the speculative config out",
            repair=set_key(LENGTH, DEFAULT_LENGTH),
        )


def _counts(value: Any) -> bool:
    """Whether pydantic takes it for a whole number of at least 1, as far as the text shows it."""
    if isinstance(value, Source) or (isinstance(value, str) and re.search(r"\$|\{\{", value)):
        return True
    if isinstance(value, str):
        return bool(re.fullmatch(r"\s*\+?0*[1-9][\d_]*\s*", value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 1 and math.isfinite(value) and value == int(value)


def parallelism(document: Document, context: Context) -> Iterator[Fault]:
    """1 or the target's (config/speculative.py); draft_model needs the target's
    (v1/spec_decode/draft_model.py).
    """
    config = document.speculative or {}
    value = config.get("draft_tensor_parallel_size")
    if not isinstance(value, int) or document.form == "speculative":
        return
    own = document.args.get("tensor_parallel_size", 1)
    method = effective_method(document)
    if not isinstance(own, int) or value == own or (value == 1 and method != "draft_model"):
        return
    rule = "equal to the target's" if method == "draft_model" else "1 or the target's"
    yield spec_fault(
        document,
        "draft-parallelism",
        "draft_tensor_parallel_size",
        f"the draft's parallelism must be {rule} ({own}), not {value}",
        f"write {own}, or leave it out",
        repair=set_key("draft_tensor_parallel_size", own),
    )


def window(document: Document, context: Context) -> Iterator[Fault]:
    """n-gram windows: both unset mean 5 and 5, one unset mirrors the other, min may not exceed max."""
    config = document.speculative or {}
    if effective_method(document) not in ("ngram", "ngram_gpu"):
        return
    low, high = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
    sizes = [v for v in (low, high) if isinstance(v, int)]
    if any(v < 1 for v in sizes) or (len(sizes) == 2 and sizes[0] > sizes[1]):
        good = sorted(max(1, v) for v in sizes)

        def repair(changed: Document) -> None:
            for name, value in zip(
                ("prompt_lookup_min", "prompt_lookup_max"), (good[0], good[-1]), strict=True
            ):
                if changed.speculative is not None:
                    changed.speculative[name] = value

        yield spec_fault(
            document,
            "ngram-window",
            "prompt_lookup_min",
            f"the window {low} to {high} is empty or below 1",
            f"write {good[0]} and {good[-1]}",
            repair=repair,
        )
    elif not sizes:

        def narrow(changed: Document) -> None:
            if changed.speculative is not None:
                changed.speculative |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}

        yield spec_fault(
            document,
            "ngram-defaults",
            "prompt_lookup_max",
            "without a window only repeats of exactly 5 tokens are found",
            "give prompt_lookup_min 2 and prompt_lookup_max 4",
            severity="warning",
            repair=narrow,
        )


def schedule(document: Document, context: Context) -> Iterator[Fault]:
    """Ranges [first, last, length]: from 1, in order, without overlap (v1/spec_decode/dynamic/utils.py)."""
    config = document.speculative or {}
    rows = config.get(_SCHEDULE)
    if rows is None or not vllm().has(vllm().keys, _SCHEDULE, context.engine.version):
        return
    flaw = _schedule_flaw(rows)
    if flaw is not None:
        mended = _mended_schedule(rows)
        yield spec_fault(
            document,
            "batch-schedule",
            _SCHEDULE,
            flaw,
            f"write {mended}" if mended else "write a list of [first, last, length]",
            repair=set_key(_SCHEDULE, mended) if mended else drop_key(_SCHEDULE),
        )
    elif isinstance(config.get(LENGTH), int) and max(row[2] for row in rows) > config[LENGTH]:
        most = max(row[2] for row in rows)
        yield spec_fault(
            document,
            "batch-schedule",
            _SCHEDULE,
            f"lengths above {LENGTH} ({config[LENGTH]}) are cut to it without a word",
            f'write "{LENGTH}": {most}',
            severity="warning",
            repair=set_key(LENGTH, most),
        )
    replicas = document.args.get("data_parallel_size", 1)
    if isinstance(replicas, int) and replicas > 1:
        yield spec_fault(
            document,
            "batch-schedule",
            _SCHEDULE,
            "it is ignored with data parallelism",
            "run replicas behind a balancer, or live with one length",
            severity="warning",
        )


def _schedule_flaw(rows: Any) -> str | None:
    if not isinstance(rows, list) or not rows:
        return "it must be a list of [first, last, length], and not empty"
    for row in rows:
        if not isinstance(row, list | tuple) or len(row) != 3 or not all(isinstance(v, int) for v in row):
            return f"every entry is [first, last, length], not {row}"
        if row[0] < 1 or row[0] > row[1] or row[2] < 0:
            return f"{list(row)} is no range of batch sizes with a length"
    ordered = sorted(rows, key=lambda row: row[0])
    if ordered[0][0] != 1:
        return "the first range must start at batch size 1"
    for before, after in zip(ordered, ordered[1:], strict=False):
        if after[0] <= before[1]:
            return f"the ranges {list(before)} and {list(after)} overlap"
    return None


def _mended_schedule(rows: Any) -> list[list[int]] | None:
    """The same lengths over ranges that start at 1 and follow each other."""
    if not isinstance(rows, list) or not rows:
        return None
    fine = [
        row
        for row in rows
        if isinstance(row, list | tuple) and len(row) == 3 and all(isinstance(v, int) for v in row)
    ]
    if len(fine) != len(rows):
        return None
    out, first = list[list[int]](), 1
    for _, last, value in sorted(fine, key=lambda row: row[0]):
        if last >= first:
            out.append([first, last, max(0, value)])
            first = last + 1
    return out or None


def context_length(document: Document, context: Context) -> Iterator[Fault]:
    """ "speculative_max_model_len cannot be larger than …" (config/speculative.py)."""
    config = document.speculative or {}
    value, own = config.get("max_model_len"), document.args.get("max_model_len")
    target = (context.target_config or {}).get("max_position_embeddings")
    draft = (model_config(config.get("model")) or {}).get("max_position_embeddings")
    limits = [v for v in (own, target, draft) if isinstance(v, int)]
    if isinstance(value, int) and limits and value > min(limits):
        yield spec_fault(
            document,
            "draft-context",
            "max_model_len",
            f"the draft's max_model_len {value} exceeds the context of draft or target ({min(limits)})",
            f"write {min(limits)}, or leave it out",
            repair=set_key("max_model_len", min(limits)),
        )


def heterogeneous(document: Document, context: Context) -> Iterator[Fault]:
    """ "use_heterogeneous_vocab only works with method='draft_model'", and with greedy drafts."""
    config = document.speculative or {}
    if not config.get("use_heterogeneous_vocab"):
        return
    if effective_method(document) != "draft_model":
        yield spec_fault(
            document,
            "combination",
            "use_heterogeneous_vocab",
            "it works with draft_model only",
            "leave it out",
            repair=drop_key("use_heterogeneous_vocab"),
        )
    elif config.get("draft_sample_method", "greedy") != "greedy":
        yield spec_fault(
            document,
            "combination",
            "draft_sample_method",
            "use_heterogeneous_vocab needs greedy drafts",
            'write "greedy", or leave it out',
            repair=drop_key("draft_sample_method"),
        )


def synthetic(document: Document, context: Context) -> Iterator[Fault]:
    """Synthetic acceptance measures cost; it makes up the text. Its rates belong to it alone."""
    config = document.speculative or {}
    rates = [k for k in ("synthetic_acceptance_rates", "synthetic_acceptance_length") if k in config]
    if config.get("rejection_sample_method") == "synthetic":
        yield spec_fault(
            document,
            "lossy",
            "rejection_sample_method",
            "synthetic acceptance is for measuring: the text is wrong",
            'leave it out ("standard") to serve people',
            severity="warning",
        )
    elif rates:
        yield spec_fault(
            document,
            "combination",
            rates[0],
            'it works with "rejection_sample_method": "synthetic" only',
            "leave it out",
            repair=drop_key(*rates),
        )
    if config.get("rejection_sample_method") == "fly":
        yield spec_fault(
            document,
            "lossy",
            "rejection_sample_method",
            "fly accepts tokens that the target would not have said",
            'leave it out ("standard") for an unchanged text',
            severity="warning",
        )


VALUE_RULES: tuple[Rule, ...] = (
    length,
    parallelism,
    window,
    schedule,
    context_length,
    heterogeneous,
    synthetic,
)
