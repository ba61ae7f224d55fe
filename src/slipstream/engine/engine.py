"""`Engine`: the loop. Every method, and plain decoding, is these steps.

A running sequence has exactly one token that is not in the target's cache, its root. A step drafts
after the roots, computes all trees in one forward, verifies, commits what was accepted, and moves the
caches to what was committed. Nothing else anywhere decides which token comes next.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Any

from slipstream.control import Controller, RowOutcome, build_controller
from slipstream.core.ask import Later, ask, ask_drafts, check_drafter, held_bytes
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest, Observation
from slipstream.core.fault import planted_fault
from slipstream.core.params import GrammarSpec, SamplingParams
from slipstream.core.sequence import Event, Sequence, TokenLogprob
from slipstream.core.stats import DraftCounts, PrefixCounts, Seconds
from slipstream.core.text import Decode, TextStream
from slipstream.core.tree import TokenTree
from slipstream.drafters.none import NoConfig, NoDrafter
from slipstream.engine.drafting import Work, fit_draft, forced_draft, plan, room_of
from slipstream.engine.inputs import check_request
from slipstream.engine.judging import judge, observed
from slipstream.engine.reading import PromptReader
from slipstream.engine.scheduler import Load, Scheduler
from slipstream.errors import ParameterError, SlipstreamError, met_by
from slipstream.logits.grammar import Grammar, no_grammars
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.cache import WIDTH
from slipstream.model.pack import PackRow
from slipstream.model.runner import CHUNK, Output, Runner
from slipstream.verify import Rule, Verdict, check_rule, choose_rule


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
        # Not the bound method: the cache of a closed runner would live as long as its engine.
        self._scheduler = Scheduler(max_rows, chunk, cache_tokens, WIDTH, lambda n: runner.cache.held(n))
        runner.cache.limit(cache_tokens)
        self._reader = PromptReader(runner, self._scheduler, self._keep_prefixes)
        self._pipelines: dict[int, LogitsPipeline] = {}
        self._cancelled: set[int] = set()
        self._unopened: dict[int, Sequence] = {}  # admitted, but the drafter has not heard of them
        self._untold: list[Event] = []
        self._later = Later()
        self._next_id = 0
        self._closed = False
        self._plain = NoDrafter(NoConfig(), None)  # type: ignore[arg-type]
        self.drafter: Drafter = self._plain
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
        drafter = self._plain if drafter is None else drafter
        check_drafter(drafter)
        built = build_controller(controller, drafter.num_speculative_tokens, drafter.draft_nodes)
        self.runner.tap(drafter.needs)
        if drafter is not self.drafter:
            self._keep_prefixes(0)
        self.drafter, self.controller = drafter, built
        self.drafter_peak_bytes = 0  # the most it has held when a sequence ended: until then rows only grow
        self._later.tell()

    def add(
        self, prompt: Items[int], params: SamplingParams, *, seed: int | None = None, group: int | None = None
    ) -> int:
        """Queue a request; gives its id. Sequences of one `group` have the same prompt."""
        self._require_open()
        check_request(prompt, params, self.runner.vocab_size, self.context, self._decode is not None)
        seed = params.seed if seed is None else seed
        sequence = Sequence(
            id=self._next_id,
            prompt=tuple(map(int, prompt)),
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
        self._reader.make_room()
        self._later.tell()

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
        """One turn: read prompts, draft, verify, commit. Gives what was added, row by row.

        A drafter or controller that fails is told when all else is done. What was added by then is final, and
        is not lost with the error: see `untold`.
        """
        with self._later:
            self._advance()
        self._later.tell()
        return self.untold()

    def turn(self) -> Iterator[Event]:
        """A step, whose events come before its error."""
        try:
            events = self.step()
        except Exception:
            yield from self.untold()
            raise
        yield from events

    def untold(self) -> list[Event]:
        """What was added by a step that raised, once; else the next step gives it."""
        events, self._untold = self._untold, []
        return events

    def _advance(self) -> None:
        began = time.perf_counter()
        before = self.seconds.copy()
        self._untold += self._end_cancelled()
        self._admit()
        self._read_prompts()
        rows = list(self._scheduler.running)
        if rows:
            clock, budgets = time.perf_counter(), plan(rows, self.controller, self.drafter, self.context)
            work = self._propose(rows, budgets)
            output, verdicts, logprobs = self._verify(work)
            self._untold += self._commit(work, output, verdicts, logprobs, clock)
        told = self.seconds - before
        self.seconds.other += time.perf_counter() - began - told.target - told.prefill - told.drafter

    def _admit(self) -> None:
        """A row that the drafter cannot open keeps its place, and is tried again until somebody ends it."""
        for sequence in self._scheduler.admit():
            self._reader.open(sequence)
            self._unopened[sequence.id] = sequence
        for sequence in list(self._unopened.values()):
            with met_by(sequence.id):
                ask(self.drafter, self.drafter.open, sequence.id, sequence.prompt)
            del self._unopened[sequence.id]

    def apply_cancels(self) -> list[Event]:
        """End now what was cancelled."""
        events = self._end_cancelled()
        try:
            self._later.tell()
        except SlipstreamError:
            self._untold += events
            raise
        return events

    def _end_cancelled(self) -> list[Event]:
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
            with self._later:
                self._observe(observations)

    def _propose(self, rows: list[Sequence], budgets: list[Budget]) -> list[Work]:
        requests = [
            DraftRequest(s.id, s.tokens, len(s.prompt), b, s.params, s.seed)
            for s, b in zip(rows, budgets, strict=True)
        ]
        draft_of = {}
        for sequence, request in zip(rows, requests, strict=True):
            draft = forced_draft(
                request, self._pipelines[sequence.id].grammar, room_of(sequence, self.context)
            )
            if draft is not None:
                draft_of[sequence.id] = draft
        asked = [r for r in requests if r.budget.depth > 0 and r.seq_id not in draft_of]
        clock = time.perf_counter()
        drafts = ask_drafts(self.drafter, asked) if asked else []
        self.seconds.drafter += time.perf_counter() - clock
        for r, d in zip(asked, drafts, strict=True):
            grammar = self._pipelines[r.seq_id].grammar
            with met_by(r.seq_id):
                draft_of[r.seq_id] = fit_draft(r, d, self.vocab_size, self.drafter, grammar)
        return [Work(s, draft_of.get(s.id) or Draft(TokenTree.root(s.tokens[-1]))) for s in rows]

    def _verify(self, work: list[Work]) -> tuple[Output, list[Verdict], list[list[TokenLogprob]]]:
        clock = time.perf_counter()
        output = self.runner.forward(
            [PackRow(w.sequence.id, w.draft.tree.tokens, w.draft.tree.parents) for w in work]
        )
        self.seconds.target += time.perf_counter() - clock
        return output, *judge(work, output, self._pipelines, self._rule)

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
            observations.append(observed(w, output, span, kept, start, self.drafter.needs))
            events.append(event)
        with self._later:
            self._observe(observations)
        with self._later:
            ask(self.controller, self.controller.record, outcomes, time.perf_counter() - began)
        for w in work:
            if w.sequence.finished:
                self._retire(w.sequence)
        return events

    def _observe(self, observations: list[Observation]) -> None:
        clock = time.perf_counter()
        ask(self.drafter, self.drafter.observe, observations)
        self.seconds.drafter += time.perf_counter() - clock

    def _keep_prefixes(self, tokens: int) -> None:
        with self._later:
            ask(self.drafter, self.drafter.keep_prefixes, tokens)

    def _retire(self, sequence: Sequence) -> None:
        """Free everything the sequence holds, at once; its keys may be kept for later prompts. What fails
        meanwhile is told later."""
        self._scheduler.retire(sequence)
        self._pipelines.pop(sequence.id, None)
        self._unopened.pop(sequence.id, None)
        self._reader.make_room()
        with self._later:
            self.drafter_peak_bytes = max(self.drafter_peak_bytes, held_bytes(self.drafter))
        with self._later:
            ask(self.drafter, self.drafter.close, sequence.id)
        with self._later:
            ask(self.controller, self.controller.forget, sequence.id)
        self._reader.close(sequence)

    def run(self) -> Iterator[Event]:
        """Step until nothing is left."""
        while self.has_work:
            yield from self.turn()

    def abandon(self, only: Collection[int] | None = None) -> None:
        """Forget every request, or these, wherever they are; who still holds one sees it cancelled."""
        for sequence in list(self._scheduler):
            if only is None or sequence.id in only:
                if not sequence.finished:
                    sequence.cancel()
                self._retire(sequence)
        self._later.tell()

    def _require_open(self) -> None:
        if self._closed:
            raise ParameterError("this session is closed; load the model again")

    def close(self) -> None:
        """Free everything. The model gets its own attention back, so nothing can be decoded any more."""
        self._closed = True
        self._reader.limit(0)
        try:
            with self._later:
                self.abandon()
            with self._later:
                ask(self.drafter, self.drafter.shutdown)
        finally:
            self.runner.close()
        self._later.tell()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
