"""`slipstream run`: one answer, a comparison with plain decoding, or a chat."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.request import (
    COLOURS,
    DEFAULT_MODEL,
    MOST_THREADS,
    DeviceOption,
    DtypeOption,
    EmbeddingOption,
    Request,
    ThreadsOption,
    TrustOption,
    WeightsOption,
    checked,
    one_prompt,
    read_stdin,
    require_chat,
    use_colour,
)
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.core.params import SamplingParams
    from slipstream.engine.session import Session


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]",
            help="What to answer, in quotes. Without it, standard input; on a terminal, a chat.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="Catalogue name (see `slipstream models`), folder, .gguf file or hub id.")
    ] = DEFAULT_MODEL,
    drafter: Annotated[
        str,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="How to draft; see `slipstream drafters`. ngram copies from the text so far and needs no"
            " second model; draft_model:model=qwen2.5-coder-0.5b drafts with a smaller one; none is plain"
            " decoding.",
        ),
    ] = "ngram",
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="How much to draft; see `slipstream controllers`. Default: always the drafter's own length.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens to generate. Default: until the model ends its answer.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 is greedy. Default, here and below: what the model's own generation_config says."
        ),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens; 0 is all.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest one's probability.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is off.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="-2 to 2; 0 is off.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="-2 to 2; 0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="For sampling. Default: a new one each time.")] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat template.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; may be repeated.")
    ] = None,
    n: Annotated[int, typer.Option(help="Number of answers, with seeds SEED, SEED+1, ...")] = 1,
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "plain",
    embedding: EmbeddingOption = "plain",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    context: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer. Default: the model's own.")
    ] = None,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompt as plain text.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the text.")] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode plainly and compare speed and tokens, after a short warm-up of both."
            " Exit status 1 if tokens differ that must not.",
        ),
    ] = False,
    colour: Annotated[
        str | None,
        typer.Option(
            "--colour",
            "--color",
            metavar="|".join(COLOURS),
            help="Show drafted and accepted tokens in green: drafts on a terminal only (the default unless"
            " NO_COLOR is set), always also into a pipe.",
        ),
    ] = None,
    trust_remote_code: TrustOption = False,
) -> None:
    """Answer a prompt, or chat. Text goes to stdout, measurements to stderr.

    Drafting never changes the answer: the same prompt, options and seed give the same tokens with any drafter
    that does not draw its drafts at random.
    """
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "stop": tuple(stop) if stop else None,
        "n": n,
    }
    # Mistakes are told before torch is imported and models are loaded.
    prompt = one_prompt(words)
    from slipstream.control import build_controller
    from slipstream.core.precision import check_precision
    from slipstream.drafters import check_spec

    check_spec(drafter)
    check_precision(weights, embedding)
    build_controller(controller, 0)
    sampling = checked({name: value for name, value in given.items() if value is not None})
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ParameterError(f"threads must be from 1 to {MOST_THREADS}, not {threads}")
    if context is not None and context < 2:
        raise ParameterError(f"context must be at least 2 tokens, not {context}")
    if no_chat_template and system is not None:
        raise ParameterError(
            "--system needs the chat template: drop --no-chat-template, or put it in the prompt"
        )
    if json_ and colour == "always":
        raise ParameterError("--json has no colours: drop --colour always")
    if compare and drafter.strip() == "none":
        raise ParameterError("--compare compares a drafter with plain decoding: choose a --drafter")
    colours = use_colour(colour)
    piped = prompt is None and not sys.stdin.isatty()
    if prompt is None and not piped:
        require_chat(json_=json_, compare=compare, plain=no_chat_template, n=n)
    text = read_stdin() if piped else prompt
    if text is not None and not text.strip():
        raise ParameterError("the prompt is empty: give some text, as an argument or on standard input")
    request = Request(
        model,
        drafter,
        controller,
        text,
        piped,
        system,
        not no_chat_template,
        sampling,
        json_,
        compare,
        colours,
        {
            "dtype": dtype,
            "weights": weights,
            "embedding": embedding,
            "device": device,
            "context": context,
            "trust_remote_code": trust_remote_code,
        },
        threads,
    )
    status = _run(request)
    if status:
        raise typer.Exit(status)


def _run(request: Request) -> int:
    with _load(request) as session:
        params = session.defaults.with_(**request.sampling)
        if request.prompt is None:
            from slipstream.cli.answer import Painter
            from slipstream.cli.chat import chat

            if not session.tokenizer.chat_template:
                raise ParameterError(f"{request.model} has no chat template: give a PROMPT to continue")
            return chat(session, params, request.system, Painter(sys.stdout, request.colour))
        return _answer(session, request, request.prompt, params)


def _load(request: Request) -> Session:
    """torch and transformers take seconds to import: something is said first."""
    from slipstream.cli.output import progress

    with progress(transient=True) as drawn:
        drawn.stage(f"looking for {request.model}", 0)
        from slipstream.drafters import configure

        configure(request.drafter)  # some wrong values are told before torch is imported, too
        import torch

        from slipstream.api import load

        if request.threads is not None:
            torch.set_num_threads(request.threads)
        return load(
            request.model, request.drafter, controller=request.controller, progress=drawn, **request.load
        )


def _answer(session: Session, request: Request, prompt: str, params: SamplingParams) -> int:
    """Answer once, and once more plainly if they are compared; gives the exit status."""
    import torch

    from slipstream.cli.answer import Painter, Summary, as_json
    from slipstream.cli.generation import Comparison, Interrupts, counting, generate, warm_up_both
    from slipstream.cli.output import print_json, progress
    from slipstream.core.spec import parse_spec

    summary = Summary()
    if session.info.weights == "int8" and not request.json:
        summary.note("int8 weights: the answer is the int8 model's own, with any drafter")
    ids = _encode(session, request, prompt, summary)
    params = params.with_(seed=secrets.randbits(32) if params.seed is None else params.seed)
    painter = Painter(sys.stdout, request.colour)
    streams = params.n == 1 and not request.json
    comparison = plain = None
    with Interrupts() as interrupts:
        if request.compare:
            with progress(transient=True) as drawn:
                plain = warm_up_both(session, ids, params, interrupts, request.controller, drawn)
        if streams:
            outcome = generate(session, ids, params, interrupts, painter)
        else:
            with progress(transient=True, calm=True) as drawn:
                show = counting(drawn, "answering", params.n * (params.max_tokens or 0))
                outcome = generate(session, ids, params, interrupts, show)
        if not request.json:
            if streams:
                painter.end_line()
            else:
                painter.several(outcome.completions)
            green = request.colour and streams
            summary.full(outcome, green, params.seed if params.temperature > 0 else None)
        if plain is not None and interrupts.number is None:
            session.use(plain)
            with progress(transient=True, calm=True) as drawn:
                show = counting(drawn, "the same again with plain decoding", outcome.num_tokens)
                without = generate(session, ids, params, interrupts, show)
            comparison = Comparison(outcome, without) if interrupts.number is None else None
    if request.json:
        facts = {
            "model": request.model,
            "drafter": request.drafter,
            "controller": request.controller,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "context": session.engine.context,
            "dtype": session.info.dtype,
            "weights": request.load["weights"],
            "embedding": request.load["embedding"],
            "device": session.info.device,
            "threads": torch.get_num_threads(),
        }
        print_json(as_json(outcome, comparison, **facts))
    elif comparison is not None:
        summary.compared(comparison, parse_spec(request.drafter)[0])
    broken = comparison is not None and not comparison.identical and comparison.why_not_expected is None
    return interrupts.status or int(broken)


def _encode(session: Session, request: Request, prompt: str, summary: Any) -> list[int]:
    from slipstream.engine.inputs import encode

    if request.template and session.tokenizer.chat_template:
        # `echo hello | slipstream run` asks what `slipstream run hello` asks
        content = prompt.removesuffix("\n") if request.piped else prompt
        opening = [{"role": "system", "content": request.system}] if request.system else []
        return encode(session.tokenizer, [*opening, {"role": "user", "content": content}])
    if request.template:
        if request.system is not None:
            raise ParameterError(f"{request.model} has no chat template: put --system into the prompt")
        summary.note(f"{request.model} has no chat template: continuing the prompt as plain text")
    return encode(session.tokenizer, prompt)
