"""Slipstream behind the interfaces of other libraries."""
