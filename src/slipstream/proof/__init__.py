"""Proving, on the user's own model and drafter, that speculation changes nothing (`slipstream verify`)."""
