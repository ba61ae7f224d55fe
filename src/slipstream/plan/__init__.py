"""Measurements that say whether speculation pays here, and how to set it."""
