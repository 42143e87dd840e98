"""The thread that owns the engine: requests, cancellations and policy changes go in, tokens come out.

A request is *submitted* from the event loop, *added* to the engine before its next step, *emitted* to step by
step, and *ended* by its last tokens, by a cancellation, or by the engine's failure. The service itself is
starting (the engine is being built), ready, closing (nothing new, what runs is finished), then closed.
"""

import asyncio
import contextlib
import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import BudgetPolicy, parse_policy
from runtime.chooser import rehearse
from runtime.engine import Emission, LiveEngine, Request
from runtime.metrics import Metrics
from runtime.profiler import Drift
from runtime.recorder import Recorder


class Refused(Exception):
    """The service takes no request now, but may later; the message says why."""


class Failed(Exception):
    """The engine broke while it held the request."""


class Ticket:
    """One request in the service, held by the event loop that submitted it."""

    def __init__(self, end: Callable[[str], None]) -> None:
        """end: free the place, for "stop" or "cancelled"; nothing where the request has ended."""
        self.emissions: asyncio.Queue[Emission] = asyncio.Queue()
        self.end = end

    async def next(self) -> tuple[Sequence[int], str | None]:
        """The next tokens, and with the last of them why the output ended: "stop" or "length".

        Raises Failed where the engine broke.
        """
        emission = await self.emissions.get()
        if emission.finish_reason == "failed":
            raise Failed("the engine failed; see the server's log")
        return emission.tokens, emission.finish_reason


Command = Callable[[LiveEngine], None]
MOST_BACKLOG = 512  # served requests whose dense pass waits until the engine is idle
WRITTEN_AT_ONCE = 32  # served requests until an idle engine writes the trace anew
State = Literal["starting", "ready", "closing", "closed"]


class Service:
    """An engine in a thread of its own, and the requests in it.

    All but `start` and `close` belong to the event loop.
    """

    def __init__(
        self, build: Callable[[], tuple[LiveEngine, Recorder | None]], policy: str, max_waiting: int
    ) -> None:
        """build: makes the engine, with `policy`, and what records it, in the thread that then owns both.

        max_waiting: requests beyond the engine's batch before `submit` refuses.
        """
        self.metrics = Metrics()
        self.policy = policy
        self.error: BaseException | None = None
        self.state: State = "starting"
        self.max_batch_size = self.max_context = self.draft_length = 0  # the engine's, once it is ready
        self.cost: CostTable | None = None  # likewise
        self._build, self._max_waiting = build, max_waiting
        self._recorder: Recorder | None = None
        self._ids = itertools.count()
        self._tickets: dict[int, Ticket] = {}
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, on_end: Callable[[], None] = lambda: None) -> None:
        """Start building the engine. on_end is called, in its thread, when it has ended or failed."""
        # A daemon, so that a process that is told to end while it still profiles does so.
        self._thread = threading.Thread(target=self._main, args=(on_end,), name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Cancel what is left, wait for the engine to end, and raise what broke it, if anything did.

        For the thread that called `start`, once the event loop is done. An engine that is still being built
        is left to itself.
        """
        if self.state == "starting":
            return
        for request_id in list(self._tickets):
            self._end(request_id, "cancelled")
        self._inbox.put(lambda engine: self._set_state("closing"))
        self._thread.join()
        if self.error is not None:
            raise self.error

    # ---- the event loop's side --------------------------------------------------------------------------

    @property
    def num_requests(self) -> int:
        """Requests that wait or run."""
        return len(self._tickets)

    def check_ready(self) -> None:
        """Raise Refused unless requests are taken."""
        if self.state != "ready":
            raise Refused(f"the server is {self.state}")

    def submit(
        self, prompt: Sequence[int], max_tokens: int, temperature: float, seed: int | None, ignore_eos: bool
    ) -> Ticket:
        """Queue a request that fits the context. Raises Refused while not ready, and on overload."""
        self.check_ready()
        if self.num_requests >= self.max_batch_size + self._max_waiting:
            self.metrics.requests.labels("refused").inc()
            raise Refused(f"{self.num_requests} requests run or wait, as many as this server holds")
        request_id = next(self._ids)
        request = Request(request_id, prompt, max_tokens, temperature, seed, () if ignore_eos else None)
        ticket = Ticket(lambda reason: self._end(request_id, reason))
        self._tickets[request_id] = ticket
        self._loop = asyncio.get_running_loop()
        self._inbox.put(lambda engine: self._add(engine, request))
        return ticket

    def change_policy(self, policy: str) -> None:
        """Let the next step, and so all requests to come, follow another policy.

        Raises InputError where it cannot be served, Refused while not ready.
        """
        self.check_ready()
        parsed = serveable(policy)
        rehearse(parsed, self.draft_length, self.cost)
        self._inbox.put(lambda engine: setattr(engine, "policy", parsed))
        self.policy = policy

    def exposition(self) -> bytes:
        """The metrics in Prometheus' text format."""
        running = min(self.num_requests, self.max_batch_size)  # the engine leaves no place empty
        self.metrics.running.set(running)
        self.metrics.waiting.set(self.num_requests - running)
        return self.metrics.exposition()

    def _end(self, request_id: int, reason: str) -> None:
        if request_id in self._tickets:
            self._inbox.put(lambda engine: self._drop(engine, request_id, reason))

    def _hand_out(self, emissions: Sequence[Emission]) -> None:
        for emission in emissions:
            ticket = self._tickets.get(emission.request_id)
            if ticket is None:  # it was cancelled meanwhile
                continue
            ticket.emissions.put_nowait(emission)
            if emission.finish_reason is not None:
                del self._tickets[emission.request_id]
                self.metrics.requests.labels(emission.finish_reason).inc()

    def _fail_all(self) -> None:
        self._hand_out([Emission(request_id, [], "failed") for request_id in self._tickets.copy()])

    # ---- the engine's side ------------------------------------------------------------------------------

    def _main(self, on_end: Callable[[], None]) -> None:
        try:
            engine, self._recorder = self._build()
            self.max_batch_size, self.max_context = engine.max_batch_size, engine.max_context
            self.draft_length, self.cost = engine.draft_length, engine.cost
            self._set_state("ready")
            self._serve(engine)
            self._save(partial=False)
        except BaseException as error:
            self.error = error
            self._save(partial=True)
        finally:
            self._set_state("closed")
            self._call(self._fail_all)
            on_end()

    def _set_state(self, state: State) -> None:
        self.state = state

    def _serve(self, engine: LiveEngine) -> None:
        drift, warned = None if engine.cost is None else Drift(engine.cost), False
        while engine.busy or self.state == "ready":
            recording = self._recorder is not None and self._record(self._recorder, engine.busy)
            for command in self._commands(wait=not (engine.busy or recording)):
                command(engine)
            step = engine.step()
            if step is None:
                continue
            self._deliver(step.emissions)
            self.metrics.observe(step, engine.policy.labels, engine.draft_length)
            if self._recorder is not None:
                self._recorder.add(step, engine.policy.labels[step.selection.bucket])
            if drift is not None:
                drift.add(step)
                self.metrics.profile_drift.set(drift.ratio)
                if not warned and len(drift.ratios) == drift.ratios.maxlen and (warning := str(drift)):
                    warned = True
                    print(warning, file=sys.stderr, flush=True)

    @staticmethod
    def _record(recorder: Recorder, busy: bool) -> bool:
        """Work on the trace, a little at a time, while the engine is idle; whether there is more to do."""
        if recorder.backlog > (MOST_BACKLOG if busy else 0):
            recorder.advance()
            return True
        if not busy and len(recorder.finished) >= WRITTEN_AT_ONCE:
            recorder.flush()
        return False

    def _commands(self, wait: bool) -> Iterator[Command]:
        """Those that have come; where there is nothing else to do, wait for one."""
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(block=wait)
            while True:
                yield self._inbox.get_nowait()

    def _add(self, engine: LiveEngine, request: Request) -> None:
        if self._recorder is not None:
            self._recorder.expect(request)
        engine.add(request)

    def _drop(self, engine: LiveEngine, request_id: int, reason: str) -> None:
        engine.cancel(request_id)
        if self._recorder is not None:
            self._recorder.end(request_id, "stop" if reason == "stop" else "cut")
        self._deliver([Emission(request_id, [], reason)])

    def _save(self, partial: bool) -> None:
        """Finish the trace on disk, if one is recorded and any request was served."""
        if self._recorder is not None:
            try:
                self._recorder.close(partial)
            except InputError as error:
                print(error, file=sys.stderr)

    def _deliver(self, emissions: Sequence[Emission]) -> None:
        self._call(lambda: self._hand_out(emissions))

    def _call(self, function: Callable[[], None]) -> None:
        """Let the event loop call a function; nothing where it is gone."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)


def serveable(spec: str) -> BudgetPolicy:
    """A policy by its spelling; InputError where it is unknown or an oracle, which only a replay can feed."""
    policy = parse_policy(spec)
    if policy.sees != "confidences":
        raise InputError(f"policy {spec!r} sees what only a replay knows: choose another one to serve")
    return policy
