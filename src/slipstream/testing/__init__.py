"""Tools that test exactness. Public: a drafter or a rule from elsewhere is held to the same checks."""
