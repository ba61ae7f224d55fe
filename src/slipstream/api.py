"""`load`: a model name and a drafter in, something that answers out."""

from __future__ import annotations

import os
from typing import Any

import torch

from slipstream.control import Controller, build_controller
from slipstream.core.draft import Drafter
from slipstream.core.params import SamplingParams
from slipstream.core.precision import check_precision
from slipstream.drafters import TargetInfo, build_drafter, check_drafter_spec, configure
from slipstream.engine.engine import Engine
from slipstream.engine.session import Session
from slipstream.errors import ModelError, ParameterError
from slipstream.logits.grammar import Grammars
from slipstream.model.generation import GENERATION
from slipstream.model.load import LoadedModel
from slipstream.model.load import load as load_model
from slipstream.model.progress import Progress
from slipstream.model.static_runner import open_runner
from slipstream.verify import check_rule


def load(
    model: str | os.PathLike[str] | LoadedModel,
    drafter: str | Drafter = "none",
    *,
    controller: Controller | str | None = None,
    dtype: str = "auto",
    weights: str = "plain",
    embedding: str = "plain",
    device: str | torch.device = "cpu",
    max_rows: int = 8,
    context: int | None = None,
    prefix_tokens: int = 0,
    rule: str = "auto",
    lossy: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Session:
    """Load a target and a drafter.

    model: catalogue name, folder, .gguf file, hub id, or a model loaded before (whose weights are then
    packed in place). drafter: `name:key=value,…`, see `slipstream drafters`. weights: "int8" halves the
    weights and what a step reads, and makes another model, nearly the same, that is exact with itself;
    embedding: "int8" as well, for the table of input embeddings. max_rows: sequences decoded at once.
    context: most tokens a sequence, prompt included; None is the model's own. prefix_tokens: cached tokens
    kept of finished answers, for prompts that begin with the same tokens. rule: "auto", "rejection", "block"
    (sampled chains: more tokens, the same law) or "typical", which changes the output and therefore needs
    lossy=True; what it gives is marked `lossy`.
    """
    # Before anything large is read.
    for name, value, none in (
        ("max_rows", max_rows, False),
        ("context", context, True),
        ("prefix_tokens", prefix_tokens, False),
    ):
        if isinstance(value, bool) or not isinstance(value, int) and not (none and value is None):
            raise ParameterError(f"{name} must be a whole number{' or None' * none}, not {value!r}")
    if not isinstance(dtype, str):
        raise ParameterError(f"dtype must be auto, bfloat16, float16 or float32, not {dtype!r}")
    if not isinstance(device, (str, torch.device)):
        raise ParameterError(f"device must be cpu, cuda or cuda:N, not {device!r}")
    check_rule(rule, lossy)
    check_precision(weights, embedding)
    check_drafter_spec(drafter)
    if isinstance(drafter, str):
        configure(drafter)
    if not isinstance(controller, Controller):
        build_controller(controller, 0)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "progress": progress}
    if isinstance(model, (str, os.PathLike)):
        model = load_model(
            os.fspath(model), dtype=dtype, weights=weights, embedding=embedding, device=device, **options
        )
    if not isinstance(model, LoadedModel):
        raise ParameterError(f"a model is a name, a path or a LoadedModel, not {type(model).__name__}")
    if "int8" in (weights, embedding) and (model.weights, model.embedding) != (weights, embedding):
        raise ParameterError("this model was loaded before, without int8 weights: load it with them")
    loaded = model
    defaults = default_params(loaded)
    runner = open_runner(loaded.model, rows=max_rows)
    info = TargetInfo(
        vocab_size=min(runner.vocab_size, len(loaded.tokenizer)),
        context=runner.context,
        tokenizer=loaded.tokenizer,
        dtype=str(next(loaded.model.parameters()).dtype).removeprefix("torch."),
        device=str(runner.device),
        eos_ids=loaded.generation_config.eos_ids,
        model=loaded.model,
        options=options,
        weights=loaded.weights,
        runner=runner,
    )
    try:
        built = build_drafter(drafter, info)
        engine = Engine(
            runner,
            built,
            vocab_size=info.vocab_size,
            eos_ids=info.eos_ids,
            decode=lambda ids: loaded.tokenizer.decode(list(ids), skip_special_tokens=True),
            grammars=Grammars(loaded.tokenizer, info.vocab_size, info.eos_ids),
            controller=controller,
            max_rows=max_rows,
            context=context,
            prefix_tokens=prefix_tokens,
            rule=rule,
            lossy=lossy,
        )
    except BaseException:
        runner.close()
        raise
    return Session(engine, loaded.tokenizer, info, defaults)


def default_params(model: LoadedModel) -> SamplingParams:
    """The checkpoint's own way of decoding, as its generation_config.json says.

    A checkpoint that does not say `do_sample` is decoded greedily. Raises ModelError for impossible values.
    """
    said = model.generation_config
    values: dict[str, Any] = {}
    if said.do_sample:
        values["temperature"] = 1.0 if said.temperature is None else said.temperature
        values |= {
            name: value for name in ("top_k", "top_p", "min_p") if (value := getattr(said, name)) is not None
        }
    if said.repetition_penalty is not None:
        values["repetition_penalty"] = said.repetition_penalty
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        raise ModelError(f"{model.path / GENERATION}: {error}: mend it there") from None
