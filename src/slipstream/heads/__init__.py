"""Trained draft heads: one definition for training, drafting and export."""
