"""Grammars: which tokens may follow, and which must, by llguidance.

A `Grammar` looks like a function of the output so far. Inside, one matcher is moved to the output it is asked
about, by taking back and consuming tokens, so a drafted token that is rejected leaves no trace, and any node
of a tree can be asked about in any order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.core.params import GrammarSpec
from slipstream.errors import ParameterError

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"  # of JSON: as much as anybody indents by, and no endless one
_KEPT = 64  # compiled grammars; a client tends to ask for the same again


class Grammar:
    """The grammar of one request. matcher: llguidance's, which this owns. end: the end token, if there is
    only one."""

    def __init__(self, matcher: Any, vocab_size: int, end: int | None = None) -> None:
        self._matcher = matcher
        self._end = end
        self._vocab_size = vocab_size
        self._consumed: list[int] = []

    def allowed(self, output: Sequence[int]) -> torch.Tensor | None:
        """Whether each token may follow `output`: bool [V].

        None if the grammar has ended or does not allow `output` itself: no rule ever keeps a token behind
        a forbidden one, so nothing depends on what is allowed there.
        """
        if not self._move(output):
            return None
        bits = bytearray(self._matcher.compute_bitmask())
        if self._matcher.is_error():
            raise ParameterError("the grammar became too complex for this answer: simplify it")
        packed = torch.frombuffer(bits, dtype=torch.uint8)  # [V / 8]
        each = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1  # [V / 8, 8]
        mask = each.flatten()[: self._vocab_size].bool()  # [<= V]
        if len(mask) < self._vocab_size:
            mask = torch.cat((mask, mask.new_zeros(self._vocab_size - len(mask))))  # [V]
        return mask

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that must follow `output`, as far as the grammar leaves no choice.

        The way text is cut into tokens is a choice too; what is given is the tokenizer's own cut, so it is
        a guess, and a good one.
        """
        if limit < 1 or not self._move(output):
            return []
        tokens = list(self._matcher.compute_ff_tokens())[:limit]
        if tokens and self._end is not None and len(tokens) < limit:
            ended = self._move([*output, *tokens]) and self._matcher.is_stopped()
            tokens += [self._end] if ended else []
        return tokens

    def accepts(self, output: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of `tokens` may follow `output`, one after the other."""
        if not self._move(output):
            return 0
        return int(self._matcher.validate_tokens(list(tokens)))

    def _move(self, output: Sequence[int]) -> bool:
        """Bring the matcher to `output`; False if it does not get there."""
        wanted = list(output)
        common = next(
            (i for i, (a, b) in enumerate(zip(self._consumed, wanted, strict=False)) if a != b),
            min(len(self._consumed), len(wanted)),
        )
        if back := len(self._consumed) - common:
            if not self._matcher.rollback(back):
                self._matcher.reset()
                common = self._matcher.try_consume_tokens(wanted[:common])
            del self._consumed[common:]
        rest = wanted[common:]
        taken = int(self._matcher.try_consume_tokens(rest)) if rest else 0
        self._consumed += rest[:taken]
        return taken == len(rest)


def no_grammars(spec: GrammarSpec) -> Grammar:
    """Where there is no tokenizer."""
    raise ParameterError(f"a {spec.kind} needs a tokenizer; load the model with slipstream.load")


class Grammars:
    """Compiles grammars for one tokenizer. Compiled ones are kept, so what was checked once is there at once.
    For any thread.

    vocab_size: ids the target can emit. eos_ids: tokens that may come where the grammar may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._table: Any = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, Any] = OrderedDict()

    @property
    def table(self) -> Any:
        """llguidance's view of the tokenizer, made when it is first needed (about a second).

        Raises ParameterError for a tokenizer it cannot read, and without llguidance.
        """
        if self._table is None:
            try:
                from llguidance.hf import from_tokenizer
            except ImportError:
                raise ParameterError("grammars need llguidance: pip install 'slipstream-lm[serve]'") from None
            if not self._eos_ids:
                raise ParameterError("grammars need a model that names its end token")
            size = max(self._vocab_size, len(self._tokenizer))
            try:
                self._table = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=sorted(self._eos_ids))
            except Exception as error:  # it raises what its parts raise
                raise ParameterError(f"llguidance cannot read this model's tokenizer: {error}") from error
        return self._table

    def __call__(self, spec: GrammarSpec) -> Grammar:
        """A fresh grammar. Raises ParameterError for one that is wrong or too complex."""
        with self._lock:
            compiled = self._compiled.get(spec)
        if compiled is None:
            compiled = self._compile(spec)
        with self._lock:
            self._compiled[spec] = compiled
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            end = min(self._eos_ids) if len(self._eos_ids) == 1 else None
            return Grammar(compiled.deep_copy(), self._vocab_size, end)

    def _compile(self, spec: GrammarSpec) -> Any:
        table = self.table
        from llguidance import LLMatcher, LLParserLimits

        try:
            if spec.kind == "json_schema":
                text = LLMatcher.grammar_from_json_schema(
                    spec.source, defaults={"whitespace_pattern": WHITE_SPACE}
                )
            elif spec.kind == "regex":
                text = LLMatcher.grammar_from_regex(spec.source)
            else:
                text = LLMatcher.grammar_from_lark(spec.source)
            matcher = LLMatcher(table, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        except ValueError as error:
            raise ParameterError(f"the {spec.kind} cannot be read: {error}") from error
        if matcher.is_error():
            lines = [line for line in str(matcher.get_error()).splitlines() if line.strip()]
            raise ParameterError(f"the {spec.kind} cannot be used: {' '.join(lines[:3])[:300]}")
        return matcher
