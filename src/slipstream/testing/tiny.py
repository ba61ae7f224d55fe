"""Tiny random checkpoints and a byte-level tokenizer: real transformers models that run in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from slipstream.model.quiet import quiet

BYTES = 256
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = BYTES, BYTES + 1
MIN_VOCAB = BYTES + 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    + EOS
    + "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_tokenizer(vocab: int = MIN_VOCAB) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: one token per byte (ids 0…255 in byte order), then bos and eos, then unused
    ids.

    Any text round-trips. vocab is the total, at least 258.
    """
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab must be at least {MIN_VOCAB} (256 bytes, bos, eos), not {vocab}")
    symbols = byte_symbols()
    ids = {symbol: i for i, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = [BOS, EOS, *(f"<|unused{i}|>" for i in range(vocab - MIN_VOCAB))]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def byte_symbols() -> list[str]:
    """GPT-2's printable character for each byte, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    spare = (chr(256 + i) for i in range(BYTES))
    return [table[byte] if byte in table else next(spare) for byte in range(BYTES)]


def tiny_model(
    kind: str = "llama",
    vocab_size: int = MIN_VOCAB,
    layers: int = 2,
    hidden: int = 32,
    seed: int = 0,
    tie: bool = False,
    **config: Any,
) -> PreTrainedModel:
    """A random fp32 causal LM of a transformers `model_type` (llama, qwen2, qwen3, mistral, gemma3_text, …).

    4 query heads on 2 key-value heads. The weights depend only on the arguments, and the global random state
    is left as it was. Other config values go through `config`.
    """
    heads = 4
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tie,
        "bos_token_id": BOS_ID if vocab_size > BOS_ID else None,
        "eos_token_id": EOS_ID if vocab_size > EOS_ID else None,
        "pad_token_id": None,
        # Wide enough that the laws are far from uniform and greedy choices have no near-ties.
        "initializer_range": 0.3,
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32)
    model.eval()
    model.requires_grad_(False)
    return model  # type: ignore[no-any-return]


def save_tiny(
    path: Path,
    *,
    model: PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype = torch.float32,
    **tiny: Any,
) -> Path:
    """Writes a checkpoint folder that from_pretrained reads; `tiny` are arguments of tiny_model."""
    model = tiny_model(**tiny) if model is None else model
    tokenizer = tiny_tokenizer(max(MIN_VOCAB, model.config.vocab_size)) if tokenizer is None else tokenizer
    with quiet():
        model.to(dtype).save_pretrained(path)
        tokenizer.save_pretrained(path)
    return path


def save_tiny_gguf(path: Path, model: PreTrainedModel) -> Path:
    """Writes a tiny llama or qwen2 model as a GGUF file of fp32 tensors, with the byte tokenizer inside.

    The model needs at least 259 tokens: GGUF cannot hold an empty list of merges, so there is one, "ab".
    """
    import gguf

    config = model.config
    llama = config.model_type == "llama"
    writer = gguf.GGUFWriter(str(path), config.model_type)
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    if llama:
        writer.add_rope_dimension_count(config.head_dim)
    unused = [f"<|unused{i}|>" for i in range(config.vocab_size - MIN_VOCAB - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*byte_symbols(), BOS, EOS, "ab", *unused])
    writer.add_token_types([1] * BYTES + [3, 3, 1] + [3] * len(unused))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
    architecture = gguf.MODEL_ARCH.LLAMA if llama else gguf.MODEL_ARCH.QWEN2
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if llama and name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF pairs neighbouring rotary rows, transformers pairs row i with row i + half
            rows = tensor.view(-1, 2, config.head_dim // 2, tensor.shape[-1])
            tensor = rows.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
