"""Live acceptance from the metrics of four engines: the same numbers, and advice that follows from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.errors import ParameterError
from slipstream.watch import history as past
from slipstream.watch.advice import advise
from slipstream.watch.alerts import alert_rules
from slipstream.watch.fetch import metrics_url, read_all
from slipstream.watch.metrics import Reading, WatchError, parse
from slipstream.watch.rates import Rates, best_length, rates

HERE = Path(__file__).parent


def recorded(name: str, at: float = 0.0) -> Reading:
    return parse((HERE / f"{name}.prom").read_text(), f"http://{name}/metrics", at)


def test_vllm_is_summed_over_engines() -> None:
    seen = rates(recorded("vllm"))
    assert seen.engine == "vllm" and seen.seconds is None
    assert seen.tau == 1 + 1500 / 1000 and seen.acceptance == 0.5 and seen.length == 3
    assert seen.per_position == (0.8, 0.5, 0.2) and sum(seen.per_position) + 1 == seen.tau
    assert (seen.running, seen.waiting, seen.tokens_per_second) == (8, 1, None)
    assert recorded("vllm").models == ("target",)


def test_what_the_real_vllm_said() -> None:
    """All of its metrics, histograms and its own process's included; only ours are read."""
    seen = rates(recorded("vllm-recorded"))
    assert (seen.drafts, seen.tau) == (2405, 1 + 5544 / 2405) and seen.length == 3
    assert seen.per_position == (2259 / 2405, 1708 / 2405, 1577 / 2405)
    assert recorded("vllm-recorded").models == ("tiny",)


def test_what_sglangs_collectors_said() -> None:
    """Two ranks say the same, and parts by priority stand beside the whole: nothing counts twice."""
    seen = rates(recorded("sglang"))
    assert seen.engine == "sglang" and seen.length == 3 and seen.drafts == 144
    assert (seen.tau, seen.acceptance) == (1 + 223 / 147, 223 / (147 * 3))
    assert seen.per_position == () and seen.best_length is None
    assert (seen.running, seen.waiting, seen.tokens_per_second) == (2, 1, 38.4)


def test_sglangs_engines_are_summed() -> None:
    text = "".join(
        f'sglang:num_running_reqs{{model_name="m",dp_rank="{engine}",tp_rank="{rank}"}} {3 + engine}\n'
        for engine in range(2)
        for rank in range(4)
    )
    assert parse(text, "u", 0).running == 3 + 4


def test_what_the_real_llamacpp_said() -> None:
    """Its drafts are shorter than asked for where it is unsure: 329 tokens in 112 drafts of at most 3."""
    seen = rates(recorded("llamacpp"))
    assert seen.engine == "llama.cpp" and seen.tau == 1 + 262 / 112 and seen.acceptance == 262 / 329
    assert seen.per_position == (100 / 112, 89 / 112, 73 / 112) and seen.length == pytest.approx(329 / 112)
    assert seen.tokens_per_second == pytest.approx(0.512883)


def test_what_our_own_server_said() -> None:
    seen = rates(recorded("slipstream"))
    assert seen.engine == "slipstream" and seen.tau == 1 + 223 / 147 and seen.acceptance == 223 / 436
    assert seen.per_position == (96 / 147, 67 / 147, 60 / 147) and seen.running == seen.waiting == 0


def test_between_two_readings_only_what_is_new_counts() -> None:
    first = recorded("vllm", at=10.0)
    later = replace(
        first, at=14.0, drafts=1100.0, draft_tokens=3300.0, accepted=1510.0, tokens=2810.0, per_position=(810.0, 500.0, 200.0)  # noqa: E501
    )  # fmt: skip
    seen = rates(later, first)
    assert seen.seconds == 4 and seen.drafts == 100 and seen.tau == 1.1
    assert seen.per_position == (0.1, 0.0, 0.0) and seen.tokens_per_second == (2810 - 2700) / 4
    again = rates(replace(later, drafts=5.0, accepted=5.0, tokens=9.0, draft_tokens=15.0), later)
    assert again.seconds is None and again.drafts == 5 and again.tau == 2, (
        "a restarted server counts from its start"
    )


def test_an_idle_interval_has_no_acceptance() -> None:
    first = recorded("vllm", at=1.0)
    seen = rates(replace(first, at=2.0), first)
    assert seen.drafts == 0 and seen.tau is None and seen.per_position == () and seen.tokens_per_second == 0
    assert "nothing was drafted" in advise(seen)[0].text


def test_the_best_length() -> None:
    assert best_length((0.9, 0.81, 0.73, 0.66), 0.01) > 8, "nearly free and nearly always right: long"
    assert best_length((0.8, 0.5, 0.2), 0.1) == 3
    assert best_length((0.8, 0.2, 0.02), 0.3) == 1
    assert best_length((0.1, 0.01), 0.2) == 0, "drafting loses"
    assert best_length((), 0.1) == 0
    for cost in (0.05, 0.2, 0.5):  # against every length, one by one
        accepted = (0.7, 0.45, 0.3, 0.1, 0.0)
        gains = [(1 + sum(accepted[:k])) / (1 + k * cost) for k in range(6)]
        assert best_length(accepted, cost) == gains.index(max(gains))


def seen(**changes: object) -> Rates:
    return replace(rates(recorded("vllm")), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rates_", "level", "text"),
    [
        (seen(), "fine", "pays as it is"),
        (seen(drafts=None, tau=None), "look", "reports no speculative decoding"),
        (seen(drafts=12.0), "look", "too few"),
        (seen(per_position=(0.004, 0.0, 0.0), tau=1.004), "act", "does not belong to this target"),
        (seen(per_position=(0.2, 0.1, 0.0), tau=1.3), "act", "too far from the target's family"),
        (seen(per_position=(), drafts=None, tau=1.01), "act", "no drafting at all"),
        (seen(length=11.5), "fine", "pays as it is"),
        (seen(best_length=None, per_position=()), "fine", "no length can be advised"),
        (seen(best_length=0), "look", "costs more than it brings"),
        (seen(best_length=1), "look", "too long: 20% of drafts reach token 3; draft 1 token"),
        (seen(best_length=6), "look", "short: 20% reach its end; try up to 6 tokens"),
        (seen(running=40.0), "act", "turn drafting off above 32"),
        (seen(tau=1.2, per_position=(0.4, 0.0)), "act", "the plan predicts 2.60"),
        (seen(waiting=50.0), "look", "more replicas"),
    ],
)
def test_advice_follows_from_the_numbers(rates_: Rates, level: str, text: str) -> None:
    predicted = 2.6 if "2.60" in text else None
    told = advise(rates_, off_above=32, predicted_tau=predicted)
    assert (told[0].level, text in told[0].text) == (level, True), told


def test_text_of_no_engine_is_refused() -> None:
    with pytest.raises(WatchError, match="no metrics of vLLM, SGLang, llama.cpp or Slipstream"):
        parse("# TYPE up gauge\nup 1\n", "http://x/metrics", 0)
    with pytest.raises(WatchError, match="something else than Prometheus text"):
        parse("<html>hello</html>", "http://x/metrics", 0)


def test_one_server_that_is_down_hides_no_other() -> None:
    def fetch(url: str) -> str:
        if "down" in url:
            raise WatchError(f"{url} cannot be reached")
        return (HERE / "vllm.prom").read_text()

    down, up = read_all(["http://down/metrics", "http://up/metrics"], fetch)
    assert isinstance(down, WatchError) and isinstance(up, Reading) and up.url == "http://up/metrics"


def test_addresses() -> None:
    assert metrics_url("localhost:8000") == "http://localhost:8000/metrics"
    assert metrics_url("https://a.b/") == "https://a.b/metrics"
    assert metrics_url("http://a:1/engine/metrics") == "http://a:1/engine/metrics"
    for wrong in ("file:///etc/passwd", "http://", ""):
        with pytest.raises(WatchError, match="no server"):
            metrics_url(wrong)


def test_history_and_chart(tmp_path: Path) -> None:
    file = tmp_path / "h.jsonl"
    past.append(file, [seen(), rates(recorded("sglang"))], 1e9)
    past.append(file, [seen(tau=None, per_position=(), acceptance=None)], 1e9 + 60)
    rows = past.read(file)
    assert [row["engine"] for row in rows] == ["vllm", "sglang", "vllm"]
    assert rows[0]["time"] == "2001-09-09T01:46:40+00:00" and rows[0]["per_position"] == [0.8, 0.5, 0.2]
    past.chart(rows, tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG") and not list(tmp_path.glob("*.partial"))
    with pytest.raises(ParameterError, match="history is empty"):
        past.chart([], tmp_path / "d.png")
    file.write_text("{}\nnot json\n")
    with pytest.raises(ParameterError, match="line 2"):
        past.read(file)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "slipstream"])
def test_alert_rules_use_the_engines_own_names(engine: str) -> None:
    from ruamel.yaml import YAML

    text = alert_rules(engine, predicted_tau=2.5, off_above=32)
    (group,) = YAML(typ="safe").load(text)["groups"]
    assert [r["alert"] for r in group["rules"]] == [
        "SpeculationAcceptsNothing",
        "SpeculationBelowPlan",
        "SpeculationComputeBound",
    ]
    known = (HERE / f"{engine.replace('.', '')}.prom").read_text()
    for rule in group["rules"]:
        names = [
            w for w in rule["expr"].replace("(", " ").replace("[", " ").replace(")", " ").split() if ":" in w
        ]
        assert names and all(f"\n{name}" in known for name in names), rule
    assert "1.75" in group["rules"][1]["expr"], "half of what is predicted above 1"
    with pytest.raises(ParameterError, match="no metrics of 'tgi'"):
        alert_rules("tgi")


def test_json_of_rates_is_json() -> None:
    assert json.loads(json.dumps(seen().as_dict()))["per_position"] == [0.8, 0.5, 0.2]
