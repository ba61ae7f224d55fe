"""Handing over: what other engines load, configurations that are right the first time, and their checks."""
