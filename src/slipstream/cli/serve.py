"""`slipstream serve`: an OpenAI-compatible server."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.request import (
    DEFAULT_MODEL,
    DeviceOption,
    DtypeOption,
    EmbeddingOption,
    ThreadsOption,
    TrustOption,
    WeightsOption,
)
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.control import Controller, GoodputConfig
    from slipstream.core.draft import Drafter
    from slipstream.engine.session import Session

_SPEC = "NAME[:KEY=VALUE,...]"


def serve(
    model: Annotated[
        str,
        typer.Argument(
            help="Catalogue name, folder, .gguf file or hub id; tiny comes with Slipstream, to try clients."
        ),
    ] = DEFAULT_MODEL,
    drafter: Annotated[
        str,
        typer.Option(metavar=_SPEC, help="How to draft; see `slipstream drafters`."),
    ] = "ngram",
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[LABEL=]" + _SPEC,
            help="Another drafter that requests may choose, by its name or this label; may be repeated."
            " Plain decoding (none) can always be chosen.",
        ),
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option(
            metavar=_SPEC,
            help="How much to draft. Default: goodput, what pays for the whole batch. fixed is the drafter's"
            " own length; see `slipstream controllers`.",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="Measure at the start, once, what steps take here; without, goodput learns it on the way.",
        ),
    ] = True,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="SLIPSTREAM_API_KEY", help="Key that requests must bring; may be repeated."),
    ] = None,
    guard_metrics: Annotated[
        bool, typer.Option("--guard-metrics", help="/metrics needs the key as well.")
    ] = False,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What clients call the model; may be repeated. Default: MODEL.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Sequences decoded at once.", min=1)] = 8,
    max_waiting: Annotated[int, typer.Option(help="Sequences that may wait beyond them.", min=0)] = 64,
    max_seconds: Annotated[float, typer.Option(help="Longest that one request may take.")] = 600.0,
    max_body: Annotated[int, typer.Option(help="Bytes of a request.", min=1024)] = 4 << 20,
    cache_memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="Memory of all caches. Default: half of what is free."),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Compute what prompts begin with in common once; uses cache memory that nothing else needs.",
        ),
    ] = True,
    context: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer. Default: the model's own.")
    ] = None,
    tool_form: Annotated[
        str | None,
        typer.Option(help="How tool calls are written: hermes, mistral or llama3_json. Default: seen."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="Web origin whose pages may call this server; may be repeated.")
    ] = None,
    metrics_prefix: Annotated[
        str, typer.Option(help="Of the names at /metrics; vllm for tools made for vLLM.")
    ] = "slipstream",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and answers to the log.")
    ] = False,
    grace: Annotated[float, typer.Option(help="Seconds to finish requests after SIGTERM.", min=0)] = 10.0,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "plain",
    embedding: EmbeddingOption = "plain",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Serve a model over HTTP, in the form of OpenAI's API, with a page at /.

    The log goes to stderr, a JSON object a line. Ctrl-C or SIGTERM ends it; running requests get --grace
    seconds.
    """
    _need_packages()
    from slipstream.control import build_controller, goodput_config
    from slipstream.core.precision import check_precision
    from slipstream.drafters import check_spec

    check_precision(weights, embedding)
    specs = drafter_specs(drafter, also or [])
    for spec in specs.values():  # mistakes are told before torch is imported and models are loaded
        check_spec(spec)
    goodput = goodput_config(controller)
    if goodput is None:
        build_controller(controller, 0)
    elif goodput.curve:
        from slipstream.cost.bundle import read_bundle

        read_bundle(Path(goodput.curve))
    if threads is not None and threads < 1:
        raise ParameterError(f"threads must be at least 1, not {threads}")
    if context is not None and context < 2:
        raise ParameterError(f"context must be at least 2 tokens, not {context}")
    if cache_memory is not None and not 0 < cache_memory < math.inf:
        raise ParameterError(f"--cache-memory must be above 0 GiB, not {cache_memory}")
    if not math.isfinite(grace):
        raise ParameterError(f"--grace must be a number of seconds, not {grace}")
    if not all(served_model_name or ["-"]):
        raise ParameterError("--served-model-name must not be empty")
    if any(not key.strip() for key in api_key or ()):
        raise ParameterError("--api-key must not be empty")
    from slipstream.serve.binding import LOOPBACK, Binding, claim, listen
    from slipstream.serve.limits import Limits
    from slipstream.serve.metrics import Metrics
    from slipstream.serve.tools import find_form

    limits = Limits(waiting=max_waiting, seconds=max_seconds, body_bytes=max_body)
    binding = Binding(host, port, tuple(api_key or ()), guard_metrics, tuple(allow_origin or ()), grace)
    names = tuple(served_model_name or (Path(model).name or model,))
    metrics = Metrics(names[0], metrics_prefix)
    find_form("", tool_form)
    load: dict[str, Any] = {
        "dtype": dtype,
        "weights": weights,
        "embedding": embedding,
        "device": device,
        "context": context,
        "max_rows": max_rows,
        "trust_remote_code": trust_remote_code,
    }
    with ExitStack() as stack:
        listening = stack.enter_context(listen(host, port))  # a taken port is told before a model is loaded
        session, drafters = stack.enter_context(_loaded(model, specs, threads, load))
        from slipstream.serve.capacity import limit_cache
        from slipstream.serve.server import Server, log_to
        from slipstream.serve.service import Options, Service
        from slipstream.serve.worker import Worker

        default = next(iter(specs))
        chosen: Controller | str | None = controller
        if goodput is not None:
            chosen = _goodput(session, drafters, specs, goodput, calibrate)
        worker = Worker(session, limits, metrics, drafters=drafters, default=default, controller=chosen)
        tokens = limit_cache(session, None if cache_memory is None else int(cache_memory * (1 << 30)))
        session.engine.limit_prefixes(tokens if prefix_cache else 0)
        service = Service(session, worker, limits, Options(names, tool_form, log_prompts))
        claim(listening)
        at = listening.getsockname()
        shown = f"[{at[0]}]" if ":" in at[0] else at[0]
        typer.echo(
            f"slipstream: {names[0]} at http://{shown}:{at[1]} (drafters: {', '.join(drafters)}; default"
            f" {default}; {max_rows} at once, {tokens} cached tokens)",
            err=True,
        )
        if host not in LOOPBACK and not api_key:
            typer.echo("slipstream: anybody who reaches this address may use it: set --api-key", err=True)
        log_to(sys.stderr)
        try:
            Server(service, binding).run(sockets=[listening])
        finally:
            worker.shutdown(0.0)  # the thread must have ended before the model is taken away


def drafter_specs(drafter: str, also: list[str]) -> dict[str, str]:
    """Label -> spec, the default first. Plain decoding is always offered."""
    from slipstream.core.spec import parse_spec

    specs: dict[str, str] = {}
    for text in (drafter, *also, "none"):
        label, equals, spec = text.partition("=")
        if not equals or ":" in label:
            label, spec = parse_spec(text)[0], text
        if label == "none" and "none" in specs:
            continue
        if label in specs:
            raise ParameterError(f"two drafters are called {label!r}: write --also LABEL={spec}")
        specs[label] = spec
    return specs


def _need_packages() -> None:
    import importlib.util

    needed = ("fastapi", "uvicorn", "prometheus_client", "llguidance")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ParameterError(f"serving needs {', '.join(missing)}: pip install 'slipstream-lm[serve]'")


@contextmanager
def _loaded(
    model: str, specs: dict[str, str], threads: int | None, options: dict[str, Any]
) -> Iterator[tuple[Session, dict[str, Drafter]]]:
    """The session, and its drafters by label; torch and transformers take seconds to import."""
    from slipstream.cli.output import progress

    with ExitStack() as stack:
        with progress(transient=True) as drawn:
            drawn.stage(f"looking for {model}", 0)
            import torch

            from slipstream.api import load
            from slipstream.drafters import build_drafter

            if threads is not None:
                torch.set_num_threads(threads)
            session = stack.enter_context(load(model, "none", progress=drawn, **options))
            drafters = {label: build_drafter(spec, session.info) for label, spec in specs.items()}
        yield session, drafters


def _goodput(
    session: Session,
    drafters: dict[str, Drafter],
    specs: dict[str, str],
    config: GoodputConfig,
    measure: bool,
) -> Controller | None:
    """The controller, with what its curves say told on stderr; None where nothing drafts."""
    from slipstream.cli.output import progress
    from slipstream.plan.calibrate import Offer, goodput_for

    offers = {label: Offer(drafter, specs[label]) for label, drafter in drafters.items()}
    with progress(transient=True) as drawn:
        found = goodput_for(
            session, offers, config, session.engine.load.slots, measure=measure, progress=drawn
        )
    if found is None:
        return None
    typer.echo(f"slipstream: {found.told}", err=True)
    return found.controller
