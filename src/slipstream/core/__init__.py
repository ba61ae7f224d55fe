"""Values and rules of speculative decoding. Knows no model, no tokenizer, no transformers."""
