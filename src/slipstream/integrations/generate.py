"""`generate`: `model.generate` of transformers, run by Slipstream on the model the caller has loaded."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from slipstream.control import Controller
from slipstream.core.ask import Later
from slipstream.core.draft import Drafter
from slipstream.core.stats import DraftCounts
from slipstream.drafters import TargetInfo, build_drafter
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.engine.engine import Engine
from slipstream.errors import ParameterError
from slipstream.integrations.fields import resolve
from slipstream.integrations.options import Options, read_options
from slipstream.integrations.prompts import Prompts, read_prompts, split_inputs
from slipstream.model.borrow import borrowed, refuse_unusable
from slipstream.model.runner import Runner

Stops = Callable[[Sequence[int]], bool]
_DRAFTER = "ngram"


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):  # type: ignore[misc]
    """What `return_dict_in_generate` gives: sequences, and counts of what was drafted and accepted."""

    counts: DraftCounts | None = None


def generate(
    model: PreTrainedModel,
    inputs: Any = None,
    *,
    drafter: str | Drafter = _DRAFTER,
    controller: Controller | str | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
    check: bool = True,
    **generate_kwargs: Any,
) -> torch.Tensor | GenerateOutput:
    """What `model.generate(inputs, **generate_kwargs)` gives, drafted: int64 [B * n, length].

    inputs: ids [B, T], or what a tokenizer gives; padding may be left or right, and the mask tells.
    Greedy decoding gives the same tokens; sampling draws from the same law with noise of its own,
    keyed by `seed` (row i has seed + i), and leaves torch's generators alone. A streamer gets the calls
    it gets from transformers. assistant_model drafts with a loaded model, prompt_lookup_num_tokens with
    n-grams. A built drafter is not shut down. check=False skips the comparison of tree and path logits
    for a model that has passed it before.

    The model is left as it was. Raises ParameterError for every argument that cannot be honoured.
    """
    arguments = dict(generate_kwargs)
    ids, mask = split_inputs(inputs, arguments)
    config, streamer, assistant = (
        arguments.pop(name, None) for name in ("generation_config", "streamer", "assistant_model")
    )
    refuse_unusable(model)
    values = resolve(model, config, arguments)
    options = read_options(values, arguments, model.config.get_text_config().vocab_size)
    prompts = read_prompts(ids, mask, options, model.device)
    stops = _stop_strings(options, tokenizer)
    count = len(prompts.rows) * options.copies
    if streamer is not None and count != 1:
        raise ParameterError(f"a streamer takes one row, not {count}; generate them one by one")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ParameterError(f"seed must be a whole number, not {seed!r}")
    choice = _choose(drafter, controller, assistant, values)
    with ExitStack() as stack:
        runner = stack.enter_context(borrowed(model, check=check))
        params = options.params(prompts.width, prompts.longest, runner.context)
        if assistant is not None:
            helper = stack.enter_context(borrowed(assistant, check=check))
        else:
            helper = None
        info = _target_info(runner, options, tokenizer)
        engine = stack.enter_context(_engine(runner, choice, helper, info, count))
        first = secrets.randbits(62) if seed is None else seed
        rows = {}
        for number, prompt in enumerate(p for p in prompts.rows for _ in range(options.copies)):
            group = number // options.copies if options.copies > 1 else None
            rows[engine.add(prompt, params, seed=first + number, group=group)] = _Row(prompt)
        if streamer is not None:
            streamer.put(prompts.columns.cpu())
        width = _decode(engine, rows, stops, streamer, keep_going=not options.eos_ids)
        counts = engine.counts
    if streamer is not None:
        streamer.end()
    sequences = _join(prompts, list(rows.values()), width, options)
    return GenerateOutput(sequences=sequences, counts=counts) if options.as_dict else sequences


@dataclass
class _Row:
    """One output row. end: how many tokens it has when it is finished; what lies behind is dropped."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    end: int | None = None


def _decode(
    engine: Engine, rows: Mapping[int, _Row], stops: Stops | None, streamer: Any, keep_going: bool
) -> int:
    """Step until every row has ended; gives the longest one's tokens.

    Stop strings are judged token by token by transformers' own rule, which looks at the prompt too and
    does not wait for min_new_tokens; a draft that ran past one is cut here. keep_going: without an end
    token there is no padding, so transformers lets ended rows go on until the last one ends, and so do we.
    """
    while engine.has_work:
        for event in engine.turn():
            row = rows[event.seq_id]
            for token in event.tokens:
                ended = row.end is not None
                row.tokens.append(token)
                if ended:
                    continue
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
                if stops is not None and stops((*row.prompt, *row.tokens)):
                    row.end = len(row.tokens)
            if event.finish_reason is not None and row.end is None:
                row.end = len(row.tokens)
        width = max((row.end or 0) for row in rows.values())
        running = any(row.end is None for row in rows.values())
        for seq_id, row in rows.items():
            enough = not running and len(row.tokens) >= width if keep_going else row.end is not None
            if enough:
                engine.cancel(seq_id)
    return max(row.end or 0 for row in rows.values())


def _join(prompts: Prompts, rows: Sequence[_Row], width: int, options: Options) -> torch.Tensor:
    """The prompts' columns as given, then the continuations, padded on the right: [B * n, T + width]."""
    if options.eos_ids:
        assert options.pad_id is not None
        tails = [row.tokens[: row.end] + [options.pad_id] * (width - (row.end or 0)) for row in rows]
    else:
        tails = [row.tokens[:width] for row in rows]
    columns = prompts.columns.repeat_interleave(options.copies, dim=0)  # [B * n, T]
    return torch.cat((columns, torch.tensor(tails, device=columns.device)), dim=1)


def _stop_strings(options: Options, tokenizer: Any) -> Stops | None:
    if not options.stop_strings:
        return None
    if tokenizer is None:
        raise ParameterError("stop_strings need the model's tokenizer; pass tokenizer=")
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(options.stop_strings))
    reach = max(len(s.encode()) for s in options.stop_strings) + 1  # no token is shorter than a byte

    def stops(tokens: Sequence[int]) -> bool:
        return bool(criterion(torch.tensor([tokens[-reach:]]), None))

    return stops


def _target_info(runner: Runner, options: Options, tokenizer: Any) -> TargetInfo:
    return TargetInfo(
        vocab_size=runner.vocab_size,
        context=runner.context,
        tokenizer=tokenizer,
        dtype=str(runner.model.dtype).removeprefix("torch."),
        device=str(runner.device),
        eos_ids=frozenset(options.eos_ids),
        model=runner.model,
        runner=runner,
    )


@dataclass(frozen=True)
class _Choice:
    """How to draft: a drafter, or the configuration of one on the assistant."""

    drafter: str | Drafter | DraftModelConfig
    controller: Controller | str | None


def _choose(
    drafter: str | Drafter, controller: Controller | str | None, assistant: Any, values: Mapping[str, Any]
) -> _Choice:
    """The drafter, or what transformers' names for one mean."""
    lookup = values["prompt_lookup_num_tokens"]
    asked = [
        n for n, v in (("assistant_model", assistant), ("prompt_lookup_num_tokens", lookup)) if v is not None
    ]
    if drafter != _DRAFTER:
        asked.append("drafter")
    if len(asked) > 1:
        raise ParameterError(f"{' and '.join(asked)} name different drafters; give one of them")
    if lookup is not None:
        longest = values["max_matching_ngram_size"] or 2
        return _Choice(f"ngram:num_speculative_tokens={lookup},max_n={longest},min_n=1", controller)
    if assistant is None:
        return _Choice(drafter, controller)
    settings = {"num_speculative_tokens": values["num_assistant_tokens"]}
    settings["min_confidence"] = values["assistant_confidence_threshold"]
    config = DraftModelConfig(
        model=type(assistant).__name__, **{k: v for k, v in settings.items() if v is not None}
    )
    length, schedule = config.num_speculative_tokens, values["num_assistant_tokens_schedule"] or "constant"
    if schedule not in ("constant", "heuristic", "heuristic_transient"):
        raise ParameterError(f"num_assistant_tokens_schedule must be constant or heuristic, not {schedule!r}")
    if controller is None and schedule != "constant":
        controller = f"additive:start={length},min={min(length, 1)},max={max(length, 20)}"
    return _Choice(config, controller)


@contextmanager
def _engine(
    runner: Runner, choice: _Choice, helper: Runner | None, info: TargetInfo, rows: int
) -> Iterator[Engine]:
    """An engine that forgets its rows at the end; a drafter that the caller built stays usable."""
    if isinstance(choice.drafter, DraftModelConfig):
        built: Drafter = ModelDrafter(choice.drafter, info, runner=helper)
    else:
        built = build_drafter(choice.drafter, info)
    engine = Engine(runner, built, eos_ids=info.eos_ids, controller=choice.controller, max_rows=rows)
    later = Later()
    try:
        yield engine
    finally:
        with later:
            engine.abandon()
        with later:
            if built is choice.drafter:
                engine.set_drafter(None)
        with later:
            engine.close()
    later.tell()
