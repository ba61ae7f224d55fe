"""`pytest tests/contract --drafter NAME[:key=value,…]`, any number of times; default: all built in."""

from __future__ import annotations

import pytest

from slipstream.drafters import list_drafters

# What must be given to a drafter that cannot be built without options.
NEEDED = {
    "draft_model": [
        "draft_model:model={draft}",
        "draft_model:model={draft},sampled=true",
        "draft_model:model={draft},width=3",
        "draft_model:model={draft},width=2,draft_vocab={draft}/draft_vocab.json",
        "draft_model:model={draft},sampled=true,draft_vocab={draft}/draft_vocab.json",
    ],
    "selfspec": ["selfspec:skip=a1+m0,min_confidence=0", "selfspec:exit=1,width=2,min_confidence=0.1"],
    "crossvocab": ["crossvocab:model={draft}", "crossvocab:model={draft},mode=intersect"],
    "medusa": ["medusa:heads={heads}/medusa", "medusa:heads={heads}/medusa_reduced,topk=3x2x1"],
    "eagle": ["eagle:heads={heads}/eagle1,top_k=1", "eagle:heads={heads}/eagle3"],
    "cascade": [
        "cascade:model={draft}",
        "cascade:mode=merge,drafters=ngram(branches=2)+recycle",
        "cascade:drafters=medusa(heads={heads}/medusa,nodes=7)+draft_model(model={draft},width=2)",
    ],
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--drafter", action="append", help="test this drafter, as NAME[:key=value,...]")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "spec" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--drafter", None)
        names = [d["name"] for d in list_drafters() if d["where"] == "built in"]
        specs = asked or [spec for name in names for spec in NEEDED.get(name, [name])]
        metafunc.parametrize("spec", [s for spec in specs for s in NEEDED.get(spec, [spec])])
