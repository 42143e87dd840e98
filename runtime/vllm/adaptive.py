"""Our policy's budget in vLLM's adaptive verification: the asynchronous V2 runner on CUDA.

vLLM settles on the host how many drafts a step verifies, by confidences one step old, and shares them out on
the GPU by fresh ones. `install` makes that number our policy's; graphs, compaction and ranking stay vLLM's.
What this way in gives a policy, and what not:

- The drafter always runs. Where a policy would rest it no draft is verified, its time is spent all the same,
  and a plain step is priced so; nor can it be asked for fewer drafts than vLLM's configuration says.
- Costs are vLLM's own, profiled at start-up at one length of context: they do not grow with the contexts.
- Confidences come as vLLM ranks by them: of a drafter without a confidence head they went through vLLM's own
  estimator already. A policy that keeps one length for all (fixed, ema, ...) is obeyed as it stands; any
  other gives the number of drafts alone, and the best of the fresh ones are taken.
- A learning policy hears of a step two steps later: how many drafts of each request were accepted, from the
  tokens that the scheduler took back, and the time, from one arrival of confidences to the next. Not given:
  the outcome of a request that ended or was pre-empted meanwhile (told as no draft verified), that of steps
  beside one without any draft, and the depths, which are ranked again on the host. Where the scheduler
  twice had nothing to run, which is at the end of a run, an outcome may be a step off.
- With tensor parallelism the first rank decides for all where a policy learns, as times differ; else every
  rank comes to the same number by itself, as in vLLM.

Written against vLLM 0.32 and held to its module on CPU with stubbed streams; it has not run on a GPU.
"""

import importlib
import inspect
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.protocol import BudgetPolicy, UniformPolicy
from dcut.rivals import keep_best
from runtime.chooser import Chooser, rehearse

_MODULE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_MANAGER = "AdaptiveVerificationManager"
_NEVER_S = 3600.0  # the time of a step that vLLM could not run


def install(policy: BudgetPolicy, vllm_config: Any) -> None:
    """Let `policy` set the budgets of the runner that this process builds next, with this `VllmConfig`.

    Raises InputError as `check` does.
    """
    check(policy, vllm_config)
    module = _adaptive_verification()
    in_flight = vllm_config.max_concurrent_batches - 1
    setattr(module, _MANAGER, manager_class(module, policy, in_flight))


def check(policy: BudgetPolicy, vllm_config: Any) -> None:
    """Raise InputError unless `install` can work: for an oracle or a policy that cannot decide, without
    vLLM's adaptive verification in the configuration, and where vLLM's module is not as expected."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.enable_adaptive_verification:
        raise InputError(
            "vLLM's asynchronous runner takes a budget only with adaptive verification: add "
            '"enable_adaptive_verification": true to --speculative-config, or let dcut use the V1 runner'
        )
    any_times = Prices(np.ones(3), 1.0 + np.arange(100), 0)
    rehearse(policy, speculative.num_speculative_tokens, any_times.decoding)
    _adaptive_verification()


# ---- prices ---------------------------------------------------------------------------------------------


class Prices:
    """vLLM's profiled times as cost tables: one for decoding alone, others for steps that hold prompts too.

    draft_ms: of the drafter, by requests. verify_ms: of the target, by tokens. As the manager's
    `cost_tables`: float64, from 0 up, never falling; flat between captured graphs up to `max_graph_tokens`.
    """

    def __init__(self, draft_ms: np.ndarray, verify_ms: np.ndarray, max_graph_tokens: int) -> None:
        self._draft_s, self._verify_s = draft_ms / 1000, verify_ms / 1000
        self._max_graph_tokens = max_graph_tokens
        self.decoding = self._table(self._verify_s, self._draft_s, max_graph_tokens)

    def table(self, batch_size: int, num_requests: int, others: int, room: int, most: int) -> CostTable:
        """For a step in which `batch_size` of `num_requests` requests decode.

        others: tokens that are no drafts, prompts' included. room: places for drafts in the batch. most:
        drafts that vLLM can verify in one step; where they are fewer than `room`, more take forever.
        """
        if batch_size == num_requests == others and room <= most:
            return self.decoding
        prompts = others - batch_size
        verify_s = self._verify_s[prompts : others + min(room, most) + 1]
        if most < room:
            verify_s = np.append(verify_s, _NEVER_S)
        draft_s = np.full(len(self._draft_s), self._draft_s[num_requests])
        return self._table(verify_s, draft_s, self._max_graph_tokens - prompts)

    @staticmethod
    def _table(verify_s: np.ndarray, draft_s: np.ndarray, max_graph_tokens: int) -> CostTable:
        """From times by tokens of the decoding batch and by its size, both from 0 up."""
        tokens = np.arange(1, len(verify_s))
        graphs = min(max(max_graph_tokens, 0), len(tokens))
        ends = np.append(verify_s[1:-1] != verify_s[2:], True)  # of each stretch at one price
        ends[max(graphs - 1, 0) :] = True
        sizes = np.arange(1, min(len(draft_s), len(verify_s)))
        draft = np.column_stack((sizes, draft_s[sizes]))
        plain = np.column_stack((sizes, draft_s[sizes] + verify_s[sizes]))
        return CostTable(
            verify_tokens=tokens[None, ends].astype(np.float64),
            verify_s=verify_s[None, 1:][:, ends],
            draft=draft,
            plain=plain,
            max_graph_tokens=graphs,
        )


# ---- decisions ------------------------------------------------------------------------------------------


class Scheduled(NamedTuple):
    """A step as vLLM scheduled it; arrays int64 [requests] in its order."""

    names: list[str]
    slots: np.ndarray  # each request's row in vLLM's tables
    computed: np.ndarray  # tokens before the step; in steps under way all drafts count as accepted
    others: np.ndarray  # the step's tokens that are no drafts
    drafts: np.ndarray
    sampling: np.ndarray  # bool: it gives a token, thus is not amid its prompt


class Budget(NamedTuple):
    """How many drafts a step verifies, and at most how many of one request."""

    drafts: int
    deepest: int


@dataclass(slots=True)
class _Flight:
    """A step under way that a learning policy is to hear of."""

    number: int
    step: Scheduled
    rows: np.ndarray  # of the requests that the policy saw
    policy: BudgetPolicy
    width: int  # drafts a request that the policy saw
    budget: Budget
    confidences: np.ndarray | None = None  # of the drafts that may be verified, float32 [rows, width]
    seconds: float = 0.0

    @property
    def most(self) -> np.ndarray:
        """Drafts of each request that may be verified, int64 [rows]."""
        return np.minimum(self.step.drafts[self.rows], self.budget.deepest)


class Steering:
    """A policy where the budget is due before the step's confidences, and the outcome comes two steps later.

    A policy must hear of its step before it selects again, so a learning one runs as two that take turns,
    each of which sees every second step.
    """

    def __init__(
        self,
        policy: BudgetPolicy,
        draft_length: int,
        in_flight: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """in_flight: steps whose outcome the scheduler does not know when it plans the next, 0 or 1.

        Raises InputError for an oracle.
        """
        self.learns = policy.learns
        self.draft_length, self.in_flight, self.clock = draft_length, in_flight, clock
        self._policies = [Chooser(policy).policy for _ in range(2 if policy.learns else 1)]
        self._number = 0  # of the step under way
        self._flights: deque[_Flight] = deque()  # of the last two steps, where they drafted
        self._landed_s = clock()

    def budget(self, step: Scheduled, stale: np.ndarray, prices: Prices, most: int) -> Budget:
        """The policy's, by confidences one step old, float32 [slots, draft_length]; at most `most` drafts.

        A request whose first draft is due in the next step counts with its one token. Ones that are amid
        their prompts count by their rows alone.
        """
        if self.learns:
            self._learn(step)
        rows = np.flatnonzero(step.sampling)
        batch, drafts = len(rows), step.drafts[rows]
        if not batch:
            return Budget(0, 0)
        policy = self._policies[self._number % len(self._policies)]
        room = batch * self.draft_length
        within = most if most < drafts.sum() else room
        cost = prices.table(batch, len(step.names), int(step.others.sum()), room, within)
        width = policy.draft_length(batch, self.draft_length, cost)
        seen = _masked(stale[step.slots[rows], :width], drafts)
        selection = policy.select_lagged(seen, seen, cost) if width else policy.select(seen, cost)
        deepest = int(selection.keep_depth.max()) if isinstance(policy, UniformPolicy) else width
        kept = min(selection.num_verify_tokens - batch, int(np.minimum(drafts, deepest).sum()), most)
        budget = Budget(kept, deepest)
        if self.learns:
            self._flights.append(_Flight(self._number, step, rows, policy, width, budget))
        return budget

    def landed(self, confidences: np.ndarray) -> None:
        """Once a step, when those of the drafts that it verifies are here: float32 [slots, draft_length].

        The step before it is then over.
        """
        now_s = self.clock()
        for flight in self._flights:
            if flight.number == self._number:
                fresh = confidences[flight.step.slots[flight.rows], : flight.width]
                flight.confidences = _masked(fresh, flight.most)
            elif flight.number == self._number - 1:
                flight.seconds = now_s - self._landed_s
        self._landed_s = now_s
        self._number += 1

    def _learn(self, now: Scheduled) -> None:
        """Tell the policy of the step before the last, whose outcome `now` is the first to show."""
        while self._flights and self._flights[0].number < self._number - 2:
            self._flights.popleft()
        if len(self._flights) < 2:
            return
        flight = self._flights.popleft()
        assert flight.confidences is not None
        steps = flight.step, self._flights[0].step, now
        before, after = steps[self.in_flight], steps[self.in_flight + 1]
        names = [flight.step.names[row] for row in flight.rows]
        (at, there), (to, still_there) = _places(names, before), _places(names, after)
        taken_back = before.computed[at] + before.others[at] + before.drafts[at] - after.computed[to]
        accepted = flight.step.drafts[flight.rows] - taken_back
        known = there & still_there & (accepted >= 0) & (accepted <= flight.most)
        if not known.any():
            return
        depth, accepted = np.zeros_like(accepted), np.where(known, accepted, 0)
        if flight.width:
            flight.policy.drafted(flight.confidences)
            depth = np.minimum(keep_best(flight.confidences, flight.budget.drafts).keep_depth, flight.most)
            depth = np.where(known, np.maximum(depth, accepted), 0)  # the GPU may have broken a tie otherwise
        flight.policy.observe(depth, accepted, flight.seconds)


def _masked(confidences: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """With 0 for the places behind the drafts of each request."""
    return np.where(np.arange(confidences.shape[1]) < drafts[:, None], confidences, np.float32(0.0))


def _places(names: list[str], step: Scheduled) -> tuple[np.ndarray, np.ndarray]:
    """Where the requests stand in a step, and whether they do."""
    index = {name: i for i, name in enumerate(step.names)}
    return np.array([index.get(name, 0) for name in names]), np.array([name in index for name in names])


# ---- vLLM -----------------------------------------------------------------------------------------------


def manager_class(module: Any, policy: BudgetPolicy, in_flight: int) -> type:
    """The module's manager with budgets by `policy`; in_flight as for `Steering`."""
    stock = _original(module)

    class SteeredManager(stock):
        """vLLM's AdaptiveVerificationManager, its budget from our policy."""

        original = stock

        def __init__(
            self, req_states: Any, query_start_loc: Any, num_bonus_tokens: int, max_total_logits: int
        ) -> None:
            if num_bonus_tokens != 1:
                raise InputError(
                    f"policies budget drafts behind one token of the target, this model samples "
                    f"{num_bonus_tokens} in a step: run it without a policy"
                )
            super().__init__(req_states, query_start_loc, num_bonus_tokens, max_total_logits)
            self.steering = Steering(policy, self.num_speculative_steps, in_flight)

        def set_cost_curves(self, draft_curve: Any, verify_curve: Any) -> None:
            super().set_cost_curves(draft_curve, verify_curve)
            draft_ms, verify_ms = self.cost_tables
            self.prices = Prices(draft_ms, verify_ms, self._cudagraph_limit)

        def record_confidences(self, confidence_probs: Any, input_batch: Any) -> None:
            super().record_confidences(confidence_probs, input_batch)
            self.steering.landed(self._stale_confidences[self._stale_idx].np)

        def get_num_tokens(
            self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
        ) -> int:
            states = self.req_states
            names = list(num_tokens_per_req)
            slots = np.array([states.req_id_to_index[name] for name in names])
            drafts = np.array([len(draft_tokens.get(name, ())) for name in names])
            others = np.array(list(num_tokens_per_req.values())) - drafts
            computed = states.num_computed_tokens_np[slots].astype(np.int64)
            sampling = computed + others >= states.prefill_len.np[slots]
            step = Scheduled(names, slots, computed, others, drafts, sampling)
            budget = self._agreed_budget(step)
            depths = np.where(sampling, np.minimum(drafts, budget.deepest), 0)
            self._batch_budget = (
                dict(zip(names, depths.tolist(), strict=True)),
                dict(zip(names, others.tolist(), strict=True)),
                budget.drafts,
            )
            return int(others.sum()) + budget.drafts

        def _agreed_budget(self, step: Scheduled) -> Budget:
            group = module.get_tp_group() if self.steering.learns else None
            if group is None or group.world_size == 1:
                return self._budget(step)
            mine = self._budget(step) if group.rank_in_group == 0 else None
            return group.broadcast_object(mine, src=0)

        def _budget(self, step: Scheduled) -> Budget:
            most = max(0, self._max_total_logits - len(step.names) * self.num_bonus_tokens)
            stale = self._stale_confidences[self._stale_idx].np
            return self.steering.budget(step, stale, self.prices, most)

    return SteeredManager


def _original(module: Any) -> Any:
    """vLLM's own manager, also where ours stands in its place; None where there is none."""
    manager = getattr(module, _MANAGER, None)
    return getattr(manager, "original", manager)


_PARAMETERS = {
    "__init__": ["self", "req_states", "query_start_loc", "num_bonus_tokens", "max_total_logits"],
    "set_cost_curves": ["self", "draft_curve", "verify_curve"],
    "record_confidences": ["self", "confidence_probs", "input_batch"],
    "get_num_tokens": ["self", "num_tokens_per_req", "draft_tokens"],
}
_NAMES = {  # what the code of these functions must mention
    "__init__": [
        "req_states",
        "num_speculative_steps",
        "num_bonus_tokens",
        "_max_total_logits",
        "_cudagraph_limit",
        "_stale_confidences",
        "_stale_idx",
    ],
    "set_cost_curves": ["cost_tables"],
    "record_confidences": ["_stale_idx"],
    "get_num_tokens": [
        "_batch_budget",
        "req_id_to_index",
        "num_computed_tokens_np",
        "prefill_len",
        "_stale_confidences",
    ],
    "compact_batch": ["_batch_budget"],
    "reallocate_drafts": ["_batch_budget"],
}


def _adaptive_verification() -> ModuleType:
    """vLLM's module, as expected; else InputError."""
    try:
        version = importlib.import_module("vllm").__version__
    except ImportError as error:
        raise InputError("vLLM is not installed: pip install 'dcut[vllm]'") from error
    try:
        module = importlib.import_module(_MODULE)
    except ImportError:
        found = ["no adaptive verification"]
    else:
        found = differences(module)
        if not found:
            return module
    raise InputError(
        f"vLLM {version} has {'; '.join(found)}: its asynchronous runner takes our budgets as of vLLM 0.32; "
        "install that, or leave enable_adaptive_verification out, so that dcut uses the V1 runner"
    )


def differences(module: Any) -> list[str]:
    """What an adaptive-verification module lacks or has otherwise than vLLM 0.32, in words."""
    found = []
    manager = _original(module)
    if manager is None:
        return [f"no {_MANAGER}"]
    for name in _PARAMETERS | _NAMES:
        method = getattr(manager, name, None)
        if not inspect.isfunction(method):
            found.append(f"no {_MANAGER}.{name}")
            continue
        parameters = list(inspect.signature(method).parameters)
        if parameters != _PARAMETERS.get(name, parameters):
            found.append(f"{name}({', '.join(parameters)}) instead of ({', '.join(_PARAMETERS[name])})")
        found += [f"no {known} in {name}" for known in _NAMES[name] if known not in method.__code__.co_names]
    maker = getattr(module, "maybe_create_adaptive_verification_manager", None)
    if not inspect.isfunction(maker) or _MANAGER not in maker.__code__.co_names:
        found.append(f"no function that makes an {_MANAGER}")
    if not hasattr(module, "get_tp_group"):
        found.append("no get_tp_group")
    return found
