"""`slipstream train draft|medusa|eagle`: from data to a drafter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.cli.request import DeviceOption, DtypeOption, ThreadsOption, TrustOption
from slipstream.cli.train_run import TrainingRun, fit_settings, require_temperature
from slipstream.cli.train_shared import Guard, ModelArgument, loaded_target, parse_layers
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.train.method import Method

DataOption = Annotated[
    Path,
    typer.Option(
        "--data", help="Captured states (train capture), or a data folder (train data) with --online.",
        show_default=False,
    ),
]  # fmt: skip
OutputOption = Annotated[
    Path, typer.Option("-o", "--output", help="The folder to write or to go on with.", show_default=False)
]
OnlineOption = Annotated[
    bool,
    typer.Option("--online", help="Let the target compute its states as they are needed; stores nothing."),
]
VocabOption = Annotated[
    int, typer.Option("--draft-vocab", help="Draft only so many of the commonest answer tokens; 0: all.")
]
RateOption = Annotated[float, typer.Option("--lr", help="Highest learning rate.")]
EpochsOption = Annotated[float, typer.Option(help="How often every sample is seen.")]
StepsOption = Annotated[int, typer.Option(help="Steps instead of epochs; 0: by epochs.")]
BatchOption = Annotated[int, typer.Option("--batch-size", help="Samples computed at once.")]
AccumulationOption = Annotated[int, typer.Option(help="Batches a step.")]
WarmupOption = Annotated[float, typer.Option(help="Share of steps in which the learning rate rises.")]
ClipOption = Annotated[float, typer.Option(help="Largest norm of the gradients.")]
DecayOption = Annotated[float, typer.Option("--weight-decay", help="AdamW's.")]
SeedOption = Annotated[int, typer.Option(help="Of the order of samples, first weights and noise.")]
PrecisionOption = Annotated[str, typer.Option(help="fp32, or bf16 for mixed precision.")]
LimitTokensOption = Annotated[int, typer.Option(help="Stop after so many tokens; 0: no limit.")]
LimitTimeOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="Stop this run after 90s, 30m or 2h.")
]
CheckpointOption = Annotated[int, typer.Option("--checkpoint-every", help="Steps between checkpoints.")]
MeasureOption = Annotated[
    int,
    typer.Option("--measure-every", help="Steps between measurements of the expected tau; 0: at the end."),
]
HeldoutOption = Annotated[
    int, typer.Option("--heldout-batches", help="Held-out batches a measurement; 0: all.")
]
RestartOption = Annotated[bool, typer.Option("--restart", help="Throw earlier checkpoints in --output away.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def register(app: typer.Typer, guarded: Guard) -> None:
    """Puts the commands of this file into the `train` application."""
    for name, command in (("draft", draft), ("medusa", medusa), ("eagle", eagle)):
        app.command(name)(guarded(command))


def medusa(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
    heads: Annotated[int, typer.Option(help="How many: tokens guessed beyond the next one.")] = 4,
    layers: Annotated[int, typer.Option(help="Residual blocks a head.")] = 1,
    share_output: Annotated[
        bool, typer.Option("--share-output", help="Use the target's LM head instead of one a head.")
    ] = False,
    draft_vocab: VocabOption = 0,
    joint: Annotated[
        Path | None,
        typer.Option(
            metavar="HEADS",
            help="Medusa-2: go on from these trained heads and tune the target with them. CHANGES THE MODEL:"
            " the answers are those of the tuned target, which is written to OUTPUT/target.",
        ),
    ] = None,
    lora: Annotated[
        int | None, typer.Option(help="Rank of the target's adapters in Medusa-2. Default: 16.")
    ] = None,
    online: OnlineOption = False,
    lr: RateOption = 1e-3,
    epochs: EpochsOption = 2.0,
    steps: StepsOption = 0,
    batch_size: BatchOption = 8,
    accumulation: AccumulationOption = 1,
    warmup: WarmupOption = 0.1,
    clip: ClipOption = 1.0,
    weight_decay: DecayOption = 0.0,
    seed: SeedOption = 0,
    precision: PrecisionOption = "fp32",
    limit_tokens: LimitTokensOption = 0,
    limit_time: LimitTimeOption = None,
    checkpoint_every: CheckpointOption = 100,
    measure_every: MeasureOption = 100,
    heldout_batches: HeldoutOption = 0,
    restart: RestartOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Train Medusa heads: head k guesses the token k + 2 places on, from the target's last state.

    The target stays as it is, unless --joint. A run that was stopped goes on with the same command.
    """
    settings = fit_settings(locals())
    if joint is not None and online:
        raise ParameterError("--joint changes the target, so it needs states captured before: train capture")
    if joint is not None and (heads, layers, share_output, draft_vocab) != (4, 1, False, 0):
        raise ParameterError(
            "--joint goes on with the heads that exist: leave out --heads, --layers, --share-output and"
            " --draft-vocab"
        )
    if joint is None and lora is not None:
        raise ParameterError("--lora is the rank of the target's adapters: it needs --joint HEADS")
    with loaded_target(model, dtype, device, threads, trust_remote_code) as loaded:
        from slipstream.core.places import expanded
        from slipstream.heads.io import load_medusa
        from slipstream.model.trainable import Lora, Trainable
        from slipstream.train.build import new_medusa
        from slipstream.train.medusa import MedusaMethod
        from slipstream.train.medusa2 import JointMedusaMethod

        run = TrainingRun(loaded, data, online)
        ids = run.draft_ids(draft_vocab)
        made: Method
        if joint is None:
            kind: Literal["own", "target"] = "target" if share_output else "own"
            made = MedusaMethod(
                new_medusa(run.parts, heads=heads, layers=layers, output=kind, ids=ids), run.parts
            )
            arguments: dict[str, Any] = {
                "heads": heads,
                "layers": layers,
                "output": kind,
                "draft_vocab": draft_vocab,
            }
        else:
            begun = load_medusa(expanded(joint), run.parts).float()
            rank = 16 if lora is None else lora
            made = JointMedusaMethod(Trainable(loaded.model, loaded.tokenizer, Lora(rank)), begun, run.parts)
            arguments = {"joint": str(joint), "lora": rank}
        run.fit(made, output, settings, arguments, restart, json_, use=f"medusa:heads={output}", begun=joint)
        if joint is not None:
            typer.echo(
                f"this changes the model: use --model {output}/target; answers are exact for that one only",
                err=True,
            )


def eagle(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
    version: Annotated[int, typer.Option(help="3, or 1 (predicts the target's features).")] = 3,
    draft_vocab: VocabOption = 0,
    layers: Annotated[int, typer.Option(help="Decoder layers of the head.")] = 1,
    mlp: Annotated[int, typer.Option(help="Width of the head's MLP; 0: the target's.")] = 0,
    taps: Annotated[
        str | None,
        typer.Option(metavar="K,K,K", help="EAGLE-3: read the residual streams after so many layers."),
    ] = None,
    unroll: Annotated[
        int | None, typer.Option(help="Steps on the head's own outputs in training. Default: 3, EAGLE-1: 1.")
    ] = None,
    depth: Annotated[int, typer.Option(help="Drafted tokens that are measured.")] = 5,
    temperature: Annotated[float, typer.Option(help="Of both laws in the loss.")] = 1.0,
    noise: Annotated[
        float | None, typer.Option(help="Width of the noise on features. Default: EAGLE-1's 0.2, else 0.")
    ] = None,
    online: OnlineOption = False,
    lr: RateOption = 3e-4,
    epochs: EpochsOption = 2.0,
    steps: StepsOption = 0,
    batch_size: BatchOption = 8,
    accumulation: AccumulationOption = 1,
    warmup: WarmupOption = 0.05,
    clip: ClipOption = 0.5,
    weight_decay: DecayOption = 0.0,
    seed: SeedOption = 0,
    precision: PrecisionOption = "fp32",
    limit_tokens: LimitTokensOption = 0,
    limit_time: LimitTimeOption = None,
    checkpoint_every: CheckpointOption = 100,
    measure_every: MeasureOption = 100,
    heldout_batches: HeldoutOption = 0,
    restart: RestartOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Train an EAGLE head: one layer that continues the target's hidden states.

    It is unrolled on its own outputs as it will draft. A run that was stopped goes on with the same command.
    """
    settings = fit_settings(locals())
    if version not in (1, 3):
        raise ParameterError(f"--version must be 1 or 3, not {version}")
    if version == 1 and (draft_vocab or taps):
        raise ParameterError("EAGLE-1 uses the target's LM head and last state: no --draft-vocab, no --taps")
    tapped = None if taps is None else parse_layers(taps, "--taps")
    steps_ahead = unroll if unroll is not None else 3 if version == 3 else 1
    if steps_ahead < 1 or depth < 1 or layers < 1 or mlp < 0:
        raise ParameterError("--unroll, --depth and --layers must be at least 1, --mlp 0 or more")
    if noise is not None and not 0 <= noise < math.inf:
        raise ParameterError(f"--noise must be a width, 0 or more, not {noise}")
    require_temperature(temperature)
    with loaded_target(model, dtype, device, threads, trust_remote_code) as loaded:
        from slipstream.train.build import new_eagle
        from slipstream.train.eagle import EagleMethod

        run = TrainingRun(loaded, data, online)
        head = new_eagle(
            run.parts,
            loaded.model.config.get_text_config().to_dict(),
            3 if version == 3 else 1,
            ids=run.draft_ids(draft_vocab),
            layers=layers,
            intermediate_size=mlp or None,
            taps=tapped,
            seed=seed,
        )
        made = EagleMethod(
            head, run.parts, steps=steps_ahead, noise=noise, temperature=temperature, depth=depth
        )
        arguments = {
            "version": version,
            "draft_vocab": draft_vocab,
            "layers": layers,
            "mlp": mlp,
            "taps": list(head.config.aux_layers),
            "unroll": steps_ahead,
            "temperature": temperature,
            "noise": noise,
        }
        use = f"eagle:heads={output},num_speculative_tokens={depth}"
        run.fit(made, output, settings, arguments, restart, json_, use=use)


def draft(
    model: ModelArgument,
    data: DataOption,
    output: OutputOption,
    start: Annotated[
        str, typer.Option("--from", help="The draft to begin with: any smaller model of the same vocabulary.")
    ],
    loss: Annotated[str, typer.Option(help="sft, forward_kl, reverse_kl or tv.")] = "forward_kl",
    keep_every: Annotated[int, typer.Option(help="Begin with every k-th layer of it only.")] = 1,
    lora: Annotated[
        int, typer.Option(help="Train adapters of this rank instead of all weights; 0: all.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="Of both laws in the loss.")] = 1.0,
    depth: Annotated[int, typer.Option(help="Drafted tokens that are measured.")] = 4,
    online: OnlineOption = False,
    lr: RateOption = 1e-4,
    epochs: EpochsOption = 2.0,
    steps: StepsOption = 0,
    batch_size: BatchOption = 8,
    accumulation: AccumulationOption = 1,
    warmup: WarmupOption = 0.05,
    clip: ClipOption = 1.0,
    weight_decay: DecayOption = 0.0,
    seed: SeedOption = 0,
    precision: PrecisionOption = "fp32",
    limit_tokens: LimitTokensOption = 0,
    limit_time: LimitTimeOption = None,
    checkpoint_every: CheckpointOption = 100,
    measure_every: MeasureOption = 100,
    heldout_batches: HeldoutOption = 0,
    restart: RestartOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Teach a smaller model to say what the target says.

    sft learns the target's tokens and needs no states; the others learn its whole law. A run that was stopped
    goes on with the same command.
    """
    settings = fit_settings(locals())
    if loss not in ("sft", "forward_kl", "reverse_kl", "tv"):
        raise ParameterError(f"--loss must be sft, forward_kl, reverse_kl or tv, not {loss!r}")
    if lora < 0 or depth < 1 or keep_every < 1:
        raise ParameterError("--lora must be 0 or more, --depth and --keep-every at least 1")
    require_temperature(temperature)
    if loss == "sft" and temperature != 1.0:
        raise ParameterError("--loss sft learns tokens, not laws: leave --temperature out")
    with loaded_target(model, dtype, device, threads, trust_remote_code) as loaded:
        from slipstream.model.identity import weights_hash
        from slipstream.model.load import load
        from slipstream.model.trainable import Lora, Trainable, keep_layers
        from slipstream.model.vocab import shared_vocabulary
        from slipstream.train.draft_lm import DraftMethod

        run = TrainingRun(loaded, data, online)
        small = load(start, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        shared = shared_vocabulary(
            loaded.tokenizer, small.tokenizer, run.parts.vocab_size, int(small.model.config.vocab_size)
        )
        weights = weights_hash(small.model)
        begun = keep_layers(small.model, keep_every)
        made = DraftMethod(
            Trainable(begun, small.tokenizer, Lora(lora) if lora else None),
            run.parts,
            loss=loss,  # type: ignore[arg-type]
            temperature=temperature,
            vocab_size=shared,
            depth=depth,
        )
        arguments = {
            "from": small.name,
            "loss": loss,
            "keep_every": keep_every,
            "lora": lora,
            "temperature": temperature,
        }
        if lora:  # checkpoints hold the adapters alone, so what they belong to must be the same
            arguments["from_weights"] = weights
        use = f"draft_model:model={output},num_speculative_tokens={depth}"
        run.fit(made, output, settings, arguments, restart, json_, use=use, begun=small.path)
