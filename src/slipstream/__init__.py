"""Slipstream: exact speculative decoding of Hugging Face models."""

from __future__ import annotations

from slipstream.version import __version__

__all__ = ["__version__"]
