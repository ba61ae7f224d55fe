"""From raw logits to the law tokens are drawn from: masks, penalties and warps, as pure functions."""
