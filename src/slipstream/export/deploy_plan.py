"""What is to be served, engine by engine: the input of `slipstream config`, `deploy` and the integrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from slipstream.core import jsontext
from slipstream.errors import ParameterError
from slipstream.export import from_plan
from slipstream.export.engines import Engine, closest, parse_engine

Drafter = Literal["none", "draft_model", "eagle", "eagle3", "medusa", "ngram", "suffix", "mtp"]
_WITH_MODEL = ("draft_model", "eagle", "eagle3", "medusa")
# What waits for the server and asks it, or mounts its models, goes by the plan's own fields.
_OWN_OPTIONS = frozenset(
    ("host", "port", "model", "model-path", "speculative-config", "tensor-parallel-size", "tp-size")
)
BatchLengths = list[tuple[int, int, int]]


class DeployPlan(BaseModel):
    """A deployment, in words that no engine owns. Files hold it as JSON with these names.

    num_speculative_tokens: drafted tokens a step, the root is none. per_batch_size: other lengths by
    running requests, [first, last, length]; length 0 is plain decoding. off_above: no drafting above so
    many running requests. draft_quantization: an engine's name for it. probabilistic: drafts are sampled
    and verified by the ratio test. predicted_tau, predicted_acceptance: what was measured for this pair
    (tokens a pass; per position, unconditional). notes: what is to be said beside the configuration.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    engine: str = "vllm"
    target: str = Field(min_length=1)
    drafter: Drafter = "none"
    model: str | None = None
    num_speculative_tokens: int = Field(default=3, ge=1, le=64)
    per_batch_size: BatchLengths | None = None
    off_above: int | None = Field(default=None, ge=1)
    tensor_parallel: int = Field(default=1, ge=1)
    draft_tensor_parallel: int | None = Field(default=None, ge=1)
    dtype: str | None = None
    quantization: str | None = None
    draft_quantization: str | None = None
    max_model_len: int | None = Field(default=None, ge=1)
    draft_max_model_len: int | None = Field(default=None, ge=1)
    prompt_lookup_min: int = Field(default=2, ge=1)
    prompt_lookup_max: int = Field(default=4, ge=1)
    heterogeneous_vocab: bool = False
    probabilistic: bool = False
    max_running: int | None = Field(default=None, ge=1)
    extra: dict[str, str | int | float | bool] = Field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    name: str = Field(default="slipstream-target", pattern=r"^[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?$")
    replicas: int = Field(default=1, ge=1)
    image: str | None = None
    volume_claim: str = "models"
    predicted_tau: float | None = Field(default=None, ge=1)
    predicted_acceptance: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> DeployPlan:
        parse_engine(self.engine)
        if self.drafter in _WITH_MODEL and not self.model:
            raise ValueError(f"drafter {self.drafter} needs a model: the folder or hub name of the draft")
        if self.drafter not in _WITH_MODEL and self.model:
            raise ValueError(
                "a model is given and no drafter: say how it drafts (draft_model, eagle, eagle3 or medusa)"
                if self.drafter == "none"
                else f"drafter {self.drafter} has no model of its own: leave model out"
            )
        own = {name.replace("_", "-").lstrip("-") for name in self.extra} & _OWN_OPTIONS
        if own:
            raise ValueError(f"extra holds {', '.join(sorted(own))}, which the plan has fields for")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min may not exceed prompt_lookup_max")
        if self.per_batch_size is not None:
            if self.off_above is not None:
                raise ValueError("give per_batch_size or off_above, not both")
            _check_rows(self.per_batch_size, self.num_speculative_tokens)
        return self

    @property
    def parsed_engine(self) -> Engine:
        return parse_engine(self.engine)

    @property
    def extra_options(self) -> dict[str, str | int | float | bool]:
        """`extra` without what is set to false, which is how an option is left out."""
        return {name: value for name, value in self.extra.items() if value is not False}

    @property
    def lengths(self) -> BatchLengths | None:
        """The lengths by batch size that both ways of giving them come down to; behind the last row it
        stays so.
        """
        if self.per_batch_size is not None:
            return self.per_batch_size
        if self.off_above is None:
            return None
        return [(1, self.off_above, self.num_speculative_tokens), (self.off_above + 1, self.off_above + 1, 0)]


def _check_rows(rows: BatchLengths, most: int) -> None:
    if not rows or rows[0][0] != 1:
        raise ValueError("per_batch_size starts at batch size 1")
    for first, last, length in rows:
        if first < 1 or first > last or not 0 <= length <= most:
            raise ValueError(
                f"per_batch_size row {[first, last, length]}: first and last are batch sizes in order, the"
                " length is"
                f" 0 to num_speculative_tokens ({most})"
            )
    for before, after in zip(rows, rows[1:], strict=False):
        if after[0] <= before[1]:
            raise ValueError(
                f"per_batch_size rows {list(before)} and {list(after)} overlap or are not in order"
            )


def make_plan(**values: Any) -> DeployPlan:
    """A plan; ParameterError says which field is wrong and why."""
    try:
        return DeployPlan(**values)
    except ValidationError as error:
        raise ParameterError(f"the plan cannot be used: {_told(error)}") from None


def read_plan(file: Path, **changes: Any) -> DeployPlan:
    """A plan from a JSON file: its fields, or what `slipstream plan --json` printed; `changes` win."""
    try:
        values = jsontext.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"the plan {file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ParameterError(f"the plan {file} is not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ParameterError(f"the plan {file} must be a JSON object")
    try:
        if from_plan.is_advice(values):
            values = from_plan.deployment(values, changes)
    except ParameterError as error:
        raise ParameterError(f"the plan {file} cannot be used: {error}") from None
    try:
        return DeployPlan(**{**values, **changes})
    except ValidationError as error:
        raise ParameterError(f"the plan {file} cannot be used: {_told(error)}") from None


def _told(error: ValidationError) -> str:
    unknown = [str(e["loc"][0]) for e in error.errors() if e["type"] == "extra_forbidden"]
    parts = [
        ": ".join(
            part for part in (".".join(map(str, e["loc"])), e["msg"].removeprefix("Value error, ")) if part
        )
        for e in error.errors()
        if e["type"] != "extra_forbidden"
    ]
    for name in unknown:
        meant = closest(name, DeployPlan.model_fields)
        parts.append(f"there is no field {name}" + (f", did you mean {meant}?" if meant else ""))
    if unknown:
        parts.append(f"the fields are {', '.join(DeployPlan.model_fields)}")
    return "; ".join(parts)
