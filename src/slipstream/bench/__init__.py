"""Measuring whole answers: drafters, lengths, temperatures and batch sizes against plain decoding."""
