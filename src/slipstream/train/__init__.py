"""Training drafters: data, capture, losses, one loop, provenance."""
