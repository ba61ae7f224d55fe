"""Watching live acceptance: metrics of vLLM, SGLang, llama.cpp and Slipstream, and what they advise."""
