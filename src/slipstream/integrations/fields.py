"""Every argument that transformers' `generate` knows, and what becomes of it here.

A `GenerationConfig` field is handled, has no effect on the tokens, or is refused by name when it asks
for something. A field this version has never heard of is refused as well.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from slipstream.errors import ParameterError

# Used where neither the call nor a configuration says otherwise; transformers' own defaults.
DEFAULTS: dict[str, Any] = {
    "do_sample": False,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
HANDLED = frozenset(
    {
        *DEFAULTS,
        *SAMPLING,
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "stop_strings",
        "bad_words_ids",
        "sequence_bias",
        "suppress_tokens",
        "eos_token_id",
        "pad_token_id",
        "bos_token_id",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
    }
)
HARMLESS: dict[str, str] = {
    "renormalize_logits": "rescales scores, which changes neither the argmax nor the law",
    "decoder_start_token_id": "read by encoder-decoder models only",
    "assistant_lookbehind": "read only when the assistant has another tokenizer",
    "target_lookbehind": "read only when the assistant has another tokenizer",
    "disable_compile": "nothing is compiled",
    "transformers_version": "says who wrote the file",
}
_BEAMS = "each row follows one hypothesis, there are no beams"
_LAW = "this way of changing the law is not implemented"
_EXTRA = "only the sequences are returned"
_ONE_WAY = "another way of drafting is chosen with drafter="
_CACHE = "Slipstream keeps its own cache"
# name -> (values that ask for nothing besides None, why anything else is refused)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), _BEAMS),
    "num_beam_groups": ((1,), _BEAMS),
    "diversity_penalty": ((0.0,), _BEAMS),
    "early_stopping": ((False,), _BEAMS),
    "length_penalty": ((1.0,), _BEAMS),
    "constraints": ((), _BEAMS),
    "force_words_ids": ((), _BEAMS),
    "max_time": ((), "a time limit would make the output depend on the machine"),
    "use_cache": ((True,), _CACHE),
    "cache_implementation": (("dynamic", "hybrid"), _CACHE),
    "cache_config": ((), _CACHE),
    "max_cache_len": ((), _CACHE),
    "prefill_chunk_size": ((), "prompts are read in chunks of a fixed size"),
    "top_h": ((), _LAW),
    "typical_p": ((1.0,), _LAW),
    "epsilon_cutoff": ((0.0,), _LAW),
    "eta_cutoff": ((0.0,), _LAW),
    "no_repeat_ngram_size": ((0,), _LAW),
    "encoder_no_repeat_ngram_size": ((0,), _LAW),
    "encoder_repetition_penalty": ((1.0,), _LAW),
    "forced_bos_token_id": ((), _LAW),
    "forced_eos_token_id": ((), _LAW),
    "exponential_decay_length_penalty": ((), _LAW),
    "begin_suppress_tokens": ((), _LAW),
    "guidance_scale": ((1.0,), _LAW),
    "watermarking_config": ((), _LAW),
    "penalty_alpha": ((0.0,), "contrastive search is not implemented"),
    "low_memory": ((False,), "contrastive search is not implemented"),
    "dola_layers": ((), "DoLa is not implemented"),
    "remove_invalid_values": ((False,), "logits that are not numbers are an error here"),
    "token_healing": ((False,), "prompts are taken as they are"),
    "output_attentions": ((False,), _EXTRA),
    "output_hidden_states": ((False,), _EXTRA),
    "output_scores": ((False,), _EXTRA),
    "output_logits": ((False,), _EXTRA),
    "use_mtp": ((False,), _ONE_WAY),
    "assistant_early_exit": ((), _ONE_WAY),
    "speculation_type": ((), _ONE_WAY),
    "assistant_ensemble_weight": ((), "it changes the law, and Slipstream is exact"),
    "is_assistant": ((False,), "Slipstream's target is not an assistant"),
    "compile_config": ((), "nothing is compiled"),
    "continuous_batching_config": ((), "rows are batched by Slipstream's own scheduler"),
}
# Arguments of the call that are in no configuration.
_CALL: dict[str, str] = {
    "logits_processor": "use the arguments for penalties, bans and biases",
    "stopping_criteria": "use eos_token_id, stop_strings or max_new_tokens",
    "prefix_allowed_tokens_fn": _LAW,
    "negative_prompt_ids": _LAW,
    "negative_prompt_attention_mask": _LAW,
    "synced_gpus": "one process runs one model",
    "custom_generate": "it replaces the loop that Slipstream is",
    "trust_remote_code": "no code is fetched",
    "assistant_tokenizer": "the assistant must have the target's tokenizer",
    "inputs_embeds": "prompts are token ids",
    "past_key_values": _CACHE,
    "cache": _CACHE,
    "cache_params": _CACHE,
    "position_ids": "positions follow from the attention mask",
    "token_type_ids": "a causal model has one kind of token (tokenizer(..., return_token_type_ids=False))",
    "pixel_values": "prompts are text only",
    "decoder_input_ids": "encoder-decoder models are not run",
    "logits_to_keep": _EXTRA,
}


def resolve(
    model: PreTrainedModel, config: GenerationConfig | None, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The value of every configuration field: call, then `config`, then the model's own, then the default.

    A None in the call counts, a None in a configuration does not, as in transformers. Raises
    ParameterError for everything that is unknown or refused.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        raise ParameterError(f"generation_config must be a GenerationConfig, not a {type(config).__name__}")
    names = field_names()
    for name, value in arguments.items():
        if name not in names:
            _refuse_argument(name, value, names)
    values = {}
    for name in names:
        found = arguments.get(name)
        if name not in arguments:
            for source in (config, model.generation_config):
                # Keys a configuration has beyond the fields are read by nobody, here or there.
                found = getattr(source, name, None) if found is None else found
            found = DEFAULTS.get(name) if found is None else found
        _judge(name, found)
        values[name] = found
    return values


def field_names() -> list[str]:
    """The public fields of the installed GenerationConfig."""
    return [name for name in vars(GenerationConfig()) if not name.startswith("_")]


def asks_nothing(value: Any, neutral: tuple[Any, ...] = ()) -> bool:
    if isinstance(value, (bool, int, float, str)):
        return value in neutral
    return value is None or (isinstance(value, (list, tuple, dict)) and not value)


def _judge(name: str, value: Any) -> None:
    if name in HANDLED or name in HARMLESS:
        return
    neutral, why = REFUSED.get(name, ((), "this version of Slipstream does not know it"))
    if not asks_nothing(value, neutral):
        off = neutral[0] if neutral else None
        shown = " ".join(reprlib.repr(value).split())
        raise ParameterError(
            f"{name}={shown} is not supported: {why}; pass {name}={off!r}, or use model.generate"
        )


def _refuse_argument(name: str, value: Any, names: list[str]) -> None:
    if name in _CALL:
        if not asks_nothing(value, (False,)):
            raise ParameterError(
                f"{name} is not supported: {_CALL[name]}; leave it out, or use model.generate"
            )
        return
    close = difflib.get_close_matches(name, [*names, "input_ids", "attention_mask", "drafter"], 1)
    hint = f"did you mean {close[0]!r}?" if close else "leave it out, or use model.generate"
    raise ParameterError(f"generate has no argument {name!r}; {hint}")
