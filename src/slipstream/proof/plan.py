"""How much a proof tries."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import ParameterError

FEWEST = 100  # samples of a law, whatever the time
MOST_MINUTES = 525_600  # a year
SHORTEST = 12  # tokens of an answer, likewise


@dataclass(frozen=True)
class Plan:
    """How much is tried.

    prompts: the first ones of those given. tokens: of each answer, fewer if the time does not suffice.
    samples: of each law, likewise. horizon: tokens whose joint law is tested. alpha: the probability of a
    false alarm, all laws together. power: the probability with which a difference is to be found, for telling
    how large it must be. rows: sequences at once. fail_fast: stop at the first thing that is broken.

    The time is kept to as far as the least of everything allows: answers of `SHORTEST` tokens, `FEWEST`
    samples a law.
    """

    prompts: int = 8
    tokens: int = 32
    samples: int = 600
    horizon: int = 3
    minutes: float = 10.0
    alpha: float = 1e-4
    power: float = 0.99
    rows: int = 16
    seed: int = 0
    fail_fast: bool = False

    def __post_init__(self) -> None:
        least = {"prompts": 1, "tokens": 4, "samples": FEWEST, "horizon": 1, "rows": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ParameterError(f"{name} must be at least {value}, not {getattr(self, name)}")
        if not self.minutes > 0.0:
            raise ParameterError(f"minutes must be above 0, not {self.minutes:g}")
        if self.minutes > MOST_MINUTES:
            raise ParameterError(f"minutes must be at most {MOST_MINUTES}, a year, not {self.minutes:g}")
        for name in ("alpha", "power"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ParameterError(f"{name} must be between 0 and 1, not {getattr(self, name):g}")
        if self.seed < 0:
            raise ParameterError(f"the seed must be 0 or more, not {self.seed}")
