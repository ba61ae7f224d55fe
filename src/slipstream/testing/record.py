"""`Recorder`: a drafter around a drafter that notes, for every emitted token, the logits it came from.

Rows are kept as digests of their bytes, so whole runs can be compared bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from slipstream.core.draft import Draft, Drafter, DraftRequest, Needs, Observation


def digest(row: torch.Tensor) -> bytes:
    """A fingerprint of a logit row's exact bits."""
    raw = row.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).digest()


class Recorder(Drafter):
    """Drafts as `inner` does. digests[seq_id][i] is the logit row that token i of the output came from.

    With `keep_rows` the rows themselves are kept too, in `rows`, for margins.
    """

    def __init__(self, inner: Drafter, keep_rows: bool = False) -> None:
        self.inner = inner
        self.name = f"recorded {inner.name}"
        self.num_speculative_tokens = inner.num_speculative_tokens
        self.draft_nodes = inner.draft_nodes
        wanted = inner.needs
        self.needs = Needs(wanted.hidden_layers, wanted.last_hidden, True, wanted.reads_prompt)
        self.keep_rows = keep_rows
        self.digests: dict[int, list[bytes]] = {}
        self.rows: dict[int, list[torch.Tensor]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.digests[seq_id], self.rows[seq_id] = [], []
        self.inner.open(seq_id, prompt)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self.inner.propose(requests)

    def observe(self, observations: Sequence[Observation]) -> None:
        for seen in observations:
            if seen.node_logits is None:
                continue  # a prompt chunk
            for node in (0, *seen.accepted):
                row = seen.node_logits[node]
                self.digests[seen.seq_id].append(digest(row))
                if self.keep_rows:
                    self.rows[seen.seq_id].append(row.clone())
        self.inner.observe(observations)

    def close(self, seq_id: int) -> None:
        self.inner.close(seq_id)

    def keep_prefixes(self, tokens: int) -> None:
        self.inner.keep_prefixes(tokens)

    @property
    def memory_bytes(self) -> int:
        return self.inner.memory_bytes

    def shutdown(self) -> None:
        self.inner.shutdown()
