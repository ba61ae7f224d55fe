"""Hugging Face models: finding, loading and running them. All contact with transformers is here."""
