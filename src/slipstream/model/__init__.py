"""Everything that touches transformers: loading, running, caching, packing, probing."""
