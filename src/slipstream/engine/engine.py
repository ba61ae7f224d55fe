"""`Engine`: the loop. Every method, and plain decoding, is these steps.

A running sequence has exactly one token that is not in the target's cache, its root. A step drafts
after the roots, computes all trees in one forward, verifies, commits what was accepted, and moves the
caches to what was committed. Nothing else anywhere decides which token comes next.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

from slipstream.control import Controller, RowOutcome, RowState, build_controller
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest, Observation
from slipstream.core.fault import planted_fault
from slipstream.core.params import GrammarSpec, SamplingParams
from slipstream.core.sequence import Event, Sequence, TokenLogprob
from slipstream.core.stats import DraftCounts, PrefixCounts, Seconds
from slipstream.core.text import Decode, TextStream
from slipstream.core.tree import TokenTree
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.drafting import Work, cut_budget, fit_draft, forced_draft
from slipstream.engine.inputs import check_request
from slipstream.engine.reading import PromptReader
from slipstream.engine.scheduler import Load, Scheduler
from slipstream.errors import DrafterError, ParameterError, met_by
from slipstream.logits.grammar import Grammar, no_grammars
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.cache import WIDTH
from slipstream.model.pack import PackRow
from slipstream.model.runner import CHUNK, Output, Runner
from slipstream.verify import Rule, Verdict, build_views, check_rule, choose_rule
from slipstream.verify.view import ViewRow


class Engine:
    """Decodes many sequences at once with one drafter.

    vocab_size: ids that may be emitted (a head's padding is beyond it). decode turns token ids into
    text; without it there is no text and no stop string. grammars compiles those of requests. rule: see
    `verify.choose_rule`; one that changes the output needs lossy=True, and `Engine.lossy` and every event
    say so, as they do if `fault` is planted (`core.fault`). cache_tokens: most tokens cached for all rows
    together; a request waits until all it may come to need is free. prefix_tokens: see `limit_prefixes`. All
    methods are for one thread.
    """

    def __init__(
        self,
        runner: Runner,
        drafter: Drafter,
        *,
        vocab_size: int | None = None,
        eos_ids: Items[int] | frozenset[int] = (),
        decode: Decode | None = None,
        grammars: Callable[[GrammarSpec], Grammar] = no_grammars,
        controller: Controller | str | None = None,
        max_rows: int = 8,
        context: int | None = None,
        cache_tokens: int | None = None,
        prefix_tokens: int = 0,
        chunk: int = CHUNK,
        rule: str = "auto",
        lossy: bool = False,
    ) -> None:
        self.fault = planted_fault()
        self.lossy = check_rule(rule, lossy) or self.fault is not None
        self._rule: Callable[[Draft], Rule] = partial(choose_rule, rule=rule, lossy=lossy)
        if max_rows < 1:
            raise ParameterError(f"max_rows must be at least 1, not {max_rows}")
        if context is not None and context < 2:
            raise ParameterError(f"context must be at least 2 tokens, not {context}")
        self.runner = runner
        self.vocab_size = min(vocab_size or runner.vocab_size, runner.vocab_size)
        self.eos_ids = frozenset(eos_ids)
        self.context = min(context or runner.context, runner.context)
        self.counts = DraftCounts()
        self.seconds = Seconds()
        self._decode = decode
        self.grammars = grammars
        self._scheduler = Scheduler(max_rows, chunk, cache_tokens, WIDTH, runner.cache.held)
        runner.cache.limit(cache_tokens)
        self._reader = PromptReader(runner, self._scheduler)
        self._pipelines: dict[int, LogitsPipeline] = {}
        self._cancelled: set[int] = set()
        self._next_id = 0
        self._closed = False
        self._plain = NoDrafter(NoConfig(), None)  # type: ignore[arg-type]
        self.set_drafter(drafter, controller)
        self.limit_prefixes(prefix_tokens)
        if self.fault is not None:
            from slipstream.engine.faults import plant

            plant(self, self.fault)

    # -- requests -------------------------------------------------------------------------------

    def set_drafter(self, drafter: Drafter | None, controller: Controller | str | None = None) -> None:
        """Draft with this from now on (None: plain decoding). Only while nothing runs.

        The earlier drafter is not shut down; it may be set again.
        """
        self._require_open()
        if self.has_work:
            raise ParameterError("the drafter cannot be changed while requests are running")
        drafter = drafter or self._plain
        built = build_controller(controller, drafter.num_speculative_tokens, drafter.draft_nodes)
        self.runner.tap(drafter.needs)
        self.drafter, self.controller = drafter, built
        self.drafter_peak_bytes = 0  # the most it has held when a sequence ended: until then rows only grow

    def add(
        self, prompt: Items[int], params: SamplingParams, *, seed: int | None = None, group: int | None = None
    ) -> int:
        """Queue a request; gives its id. Sequences of one `group` have the same prompt."""
        self._require_open()
        check_request(prompt, params, self.runner.vocab_size, self.context, self._decode is not None)
        seed = params.seed if seed is None else seed
        sequence = Sequence(
            id=self._next_id,
            prompt=tuple(prompt),
            params=params,
            seed=secrets.randbits(63) if seed is None else seed,
            eos_ids=self.eos_ids,
            room=self.context - len(prompt),
            stream=TextStream(self._decode, params.stop) if self._decode else None,
            group=group,
            lossy=self.lossy,
        )
        grammar = None if params.grammar is None else self.grammars(params.grammar)
        pipeline = LogitsPipeline(params, self.vocab_size, sequence.stop_ids, len(prompt), grammar)
        self._scheduler.add(sequence)
        self._pipelines[sequence.id] = pipeline
        self._next_id += 1
        return sequence.id

    def cancel(self, seq_id: int) -> None:
        """End a request; takes effect at the next step's boundary, unknown ids are ignored."""
        if self.find(seq_id) is not None:
            self._cancelled.add(seq_id)

    def find(self, seq_id: int) -> Sequence | None:
        """The live sequence of this id."""
        return next((s for s in self._scheduler if s.id == seq_id), None)

    @property
    def has_work(self) -> bool:
        return len(self._scheduler) > 0

    @property
    def load(self) -> Load:
        """What is held and what waits now."""
        return replace(self._scheduler.load, parked=self._reader.parked)

    def limit_cache(self, tokens: int | None) -> None:
        """Admit no more than fit into this many cached tokens from now on."""
        self._scheduler.cache_tokens = tokens
        self.runner.cache.limit(tokens)

    def limit_prefixes(self, tokens: int) -> None:
        """Keep up to so many cached tokens of sequences that ended, for prompts that begin alike, and share
        those of running ones; 0 is neither. They make room for running sequences under `cache_tokens`."""
        if tokens < 0:
            raise ParameterError(f"prefix_tokens must be 0 or more, not {tokens}")
        self._reader.limit(tokens)

    @property
    def prefix_counts(self) -> PrefixCounts:
        """How many prompt tokens were looked for in the prefix cache, and found."""
        return self._reader.counts

    @property
    def memory_bytes(self) -> int:
        """Weights and caches of target and drafter."""
        return self.runner.memory_bytes + self._reader.memory_bytes + self.drafter.memory_bytes

    # -- the loop -------------------------------------------------------------------------------

    def step(self) -> list[Event]:
        """One turn: read prompts, draft, verify, commit. Gives what was added, row by row."""
        began = time.perf_counter()
        before = self.seconds.copy()
        events = self.apply_cancels()
        for sequence in self._scheduler.admit():
            self._reader.open(sequence)
            self.drafter.open(sequence.id, sequence.prompt)
        self._read_prompts()
        rows = list(self._scheduler.running)
        if rows:
            clock, budgets = time.perf_counter(), self._plan(rows)
            work = self._propose(rows, budgets)
            output, verdicts, logprobs = self._verify(work)
            events += self._commit(work, output, verdicts, logprobs, clock)
        told = self.seconds - before
        self.seconds.other += time.perf_counter() - began - told.target - told.prefill - told.drafter
        return events

    def apply_cancels(self) -> list[Event]:
        events = []
        for seq_id in sorted(self._cancelled):
            sequence = self.find(seq_id)
            if sequence is not None:
                events.append(sequence.cancel())
                self._retire(sequence)
        self._cancelled.clear()
        return events

    def _read_prompts(self) -> None:
        clock = time.perf_counter()
        observations = self._reader.step(self.drafter)
        if observations:
            self.seconds.prefill += time.perf_counter() - clock
            self._observe(observations)

    def _plan(self, rows: list[Sequence]) -> list[Budget]:
        """The controller's budgets, cut to what can still be emitted or fits the context.

        The last token a row may emit is never worth drafting: verification gives it for free.
        """
        states = [RowState(s.id, len(s.tokens), s.remaining) for s in rows]
        budgets = []
        for sequence, budget in zip(rows, self.controller.plan(states), strict=True):
            room = self._room(sequence)
            if self.drafter.needs.reads_prompt and sequence.num_output == 0:
                room = 0  # the first token must not wait until the drafter has read the prompt
            budgets.append(cut_budget(budget, room))
        return budgets

    def _room(self, sequence: Sequence) -> int:
        """Tokens that may be drafted."""
        return min(sequence.remaining - 1, self.context - len(sequence.tokens))

    def _propose(self, rows: list[Sequence], budgets: list[Budget]) -> list[Work]:
        requests = [
            DraftRequest(s.id, s.tokens, len(s.prompt), b, s.params, s.seed)
            for s, b in zip(rows, budgets, strict=True)
        ]
        draft_of = {}
        for sequence, request in zip(rows, requests, strict=True):
            draft = forced_draft(request, self._pipelines[sequence.id].grammar, self._room(sequence))
            if draft is not None:
                draft_of[sequence.id] = draft
        asked = [r for r in requests if r.budget.depth > 0 and r.seq_id not in draft_of]
        clock = time.perf_counter()
        drafts = self.drafter.propose(asked) if asked else []
        self.seconds.drafter += time.perf_counter() - clock
        if len(drafts) != len(asked):
            raise DrafterError(
                f"drafter {self.drafter.name!r} gave {len(drafts)} drafts for {len(asked)} requests"
            )
        for r, d in zip(asked, drafts, strict=True):
            grammar = self._pipelines[r.seq_id].grammar
            draft_of[r.seq_id] = fit_draft(r, d, self.vocab_size, self.drafter.name, grammar)
        return [Work(s, draft_of.get(s.id) or Draft(TokenTree.root(s.tokens[-1]))) for s in rows]

    def _verify(self, work: list[Work]) -> tuple[Output, list[Verdict], list[list[TokenLogprob]]]:
        clock = time.perf_counter()
        output = self.runner.forward(
            [PackRow(w.sequence.id, w.draft.tree.tokens, w.draft.tree.parents) for w in work]
        )
        assert output.logits is not None
        self.seconds.target += time.perf_counter() - clock
        spans = output.pack.spans
        rows_of = [(w.sequence, w.draft.tree, span.start) for w, span in zip(work, spans, strict=True)]
        seen = [ViewRow(self._pipelines[s.id], s.tokens, tree, s.seed, start) for s, tree, start in rows_of]
        views = build_views(seen, output.logits)
        verdicts = []
        for w, view in zip(work, views, strict=True):
            with met_by(w.sequence.id):
                verdicts.append(self._rule(w.draft)(w.draft, view))
        chosen_logprobs = [
            seen_row.pipeline.chosen_logprobs(
                output.logits[span.start : span.end],
                (0, *verdict.path),
                (*(w.draft.tree.tokens[n] for n in verdict.path), verdict.token),
            )
            for w, seen_row, span, verdict in zip(work, seen, spans, verdicts, strict=True)
        ]
        return output, verdicts, chosen_logprobs

    def _commit(
        self,
        work: list[Work],
        output: Output,
        verdicts: list[Verdict],
        chosen_logprobs: list[list[TokenLogprob]],
        began: float,
    ) -> list[Event]:
        events, outcomes, observations = [], [], []
        for w, span, verdict, rows in zip(work, output.pack.spans, verdicts, chosen_logprobs, strict=True):
            sequence, tree = w.sequence, w.draft.tree
            start = len(sequence.tokens) - 1
            path_tokens = [tree.tokens[n] for n in verdict.path]
            event = sequence.commit([*path_tokens, verdict.token], len(path_tokens), rows)
            emitted = len(event.tokens)
            # The last emitted token is the new root, so it stays out of the cache.
            kept = (0, *verdict.path)[:emitted]
            self.runner.cache.commit(sequence.id, kept)
            sampled, sources = w.draft.q is not None, w.draft.counts_by_source(verdict.path[:emitted])
            for counts in (sequence.counts, self.counts):
                counts.record(tree.depth, tree.num_drafted, len(path_tokens), emitted, sampled, sources)
            accepted = min(len(path_tokens), emitted)
            outcomes.append(
                RowOutcome(sequence.id, tree.depth, tree.num_drafted, accepted, emitted, sequence.finished)
            )
            observations.append(
                Observation(
                    sequence.id,
                    start,
                    tuple(tree.tokens[n] for n in kept),
                    output.features_of([span.start + n for n in kept]),
                    w.draft,
                    kept[1:],
                    output.logits[span.start : span.end]
                    if self.drafter.needs.node_logits and output.logits is not None
                    else None,
                    sequence.tokens[-1],
                )
            )
            events.append(event)
        self._observe(observations)
        self.controller.record(outcomes, time.perf_counter() - began)
        for w in work:
            if w.sequence.finished:
                self._retire(w.sequence)
        return events

    def _observe(self, observations: list[Observation]) -> None:
        clock = time.perf_counter()
        self.drafter.observe(observations)
        self.seconds.drafter += time.perf_counter() - clock

    def _retire(self, sequence: Sequence) -> None:
        """Free everything the sequence holds, at once; its keys may be kept for later prompts."""
        self._scheduler.retire(sequence)
        self._pipelines.pop(sequence.id, None)
        self.drafter_peak_bytes = max(self.drafter_peak_bytes, self.drafter.memory_bytes)
        self.drafter.close(sequence.id)
        self.controller.forget(sequence.id)
        self._reader.close(sequence)

    def run(self) -> Iterator[Event]:
        """Step until nothing is left."""
        while self.has_work:
            yield from self.step()

    def abandon(self, only: Items[int] | None = None) -> None:
        """Forget every request, or these, wherever they are; who still holds one sees it cancelled."""
        for sequence in list(self._scheduler):
            if only is None or sequence.id in only:
                if not sequence.finished:
                    sequence.cancel()
                self._retire(sequence)

    def _require_open(self) -> None:
        if self._closed:
            raise ParameterError("this session is closed; load the model again")

    def close(self) -> None:
        """Free everything. The model gets its own attention back, so nothing can be decoded any more."""
        self._closed = True
        self._reader.limit(0)
        try:
            self.abandon()
            self.drafter.shutdown()
        finally:
            self.runner.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
