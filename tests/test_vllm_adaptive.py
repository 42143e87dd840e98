"""Our budgets in vLLM's adaptive verification: against its own code, and against a scripted engine."""

import importlib
import importlib.util
import itertools
import warnings
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcut.cost import CostTable
from dcut.errors import InputError
from dcut.policies import parse_policy
from dcut.protocol import BudgetPolicy
from dcut.rivals import keep_best
from dcut.selector import Selection
from runtime.pair.weights import path
from runtime.vllm import adaptive
from runtime.vllm.adaptive import Prices, Scheduled, Steering

WIDTH = 5
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)


@pytest.fixture(scope="session")
def module() -> Any:
    """vLLM's own module; skips without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test runs this in its environment")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and others on import
        return adaptive._adaptive_verification()


def vllm(name: str) -> Any:
    """A module of vLLM."""
    return importlib.import_module(f"vllm.{name}")


def milliseconds(seed: int = 0, requests: int = 40, tokens: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Times by requests and by tokens, a staircase up to 64 and rising beyond."""
    rng = np.random.default_rng(seed)
    steps = 5 + np.cumsum(rng.random(len(SIZES)))
    verify = steps[np.minimum(np.searchsorted(SIZES, np.arange(tokens + 1)), len(SIZES) - 1)]
    verify[65:] = verify[64] + 2 + 0.05 * np.arange(1, tokens - 63)
    return 1 + 0.02 * np.arange(requests + 1), verify


# ---- prices ---------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 20),
    prompts=st.sampled_from([0, 1, 7, 60, 64, 65, 300]),
    idle=st.integers(0, 3),
    graphs=st.sampled_from([0, 64]),
)
def test_a_table_holds_the_times_that_vllm_measured_for_the_whole_step(
    seed: int, batch: int, prompts: int, idle: int, graphs: int
) -> None:
    draft, verify = milliseconds(seed)
    requests, others, room = batch + idle, batch + prompts, batch * WIDTH
    table = Prices(draft, verify, graphs).table(batch, requests, others, room, room)
    seconds = table.curve(batch, batch + room, extrapolate=True)[batch:]
    assert 1000 * seconds == pytest.approx(verify[others : others + room + 1], rel=1e-12)
    assert 1000 * table.draft_seconds(batch) == pytest.approx(draft[requests], rel=1e-12)
    plain = table.plain_seconds(batch)  # the drafter runs all the same
    assert 1000 * plain == pytest.approx(draft[requests] + verify[others], rel=1e-12)


def test_a_graph_pads_up_and_prompts_use_up_its_rows() -> None:
    prices = Prices(*milliseconds(), 64)
    assert prices.decoding.max_graph_tokens == 64
    assert set(SIZES) >= set(prices.decoding.verify_tokens[0][:9].astype(int))
    assert prices.decoding.seconds(8, 33) == prices.decoding.seconds(8, 48) > prices.decoding.seconds(8, 32)
    shared = prices.table(8, 9, 8 + 20, 8 * WIDTH, 8 * WIDTH)
    assert shared.max_graph_tokens == 64 - 20
    assert shared.seconds(8, 13) == shared.seconds(8, 28) == prices.decoding.seconds(8, 48)


def test_drafts_beyond_what_vllm_verifies_in_one_step_take_forever() -> None:
    table = Prices(*milliseconds(), 64).table(8, 8, 8, 8 * WIDTH, 10)
    assert table.seconds(8, 18) < 1 < 1000 < table.seconds(8, 19) < table.seconds(8, 25, extrapolate=True)


# ---- the engine -----------------------------------------------------------------------------------------


class Diary(BudgetPolicy):
    """Keeps a random share of the drafts, and what it is shown; those started from it write into one book."""

    learns: ClassVar[bool] = True

    def __init__(self, book: list[tuple[Any, ...]] | None = None) -> None:
        self.book: list[tuple[Any, ...]] = [] if book is None else book
        self.seed = 0

    def start(self) -> "Diary":
        return Diary(self.book)

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        self.seed += 1
        self.book.append(("select", self, confidences))
        share = np.random.default_rng(self.seed).random()
        return keep_best(confidences, round(share * confidences.size))

    def drafted(self, confidences: np.ndarray) -> None:
        self.book.append(("drafted", self, confidences))

    def observe(self, keep_depth: np.ndarray, num_accepted: np.ndarray, seconds: float) -> None:
        self.book.append(("observe", self, keep_depth, num_accepted, seconds))


class Buffers:
    """Steering in an engine that holds confidences as vLLM's manager does, without vLLM."""

    def __init__(self, policy: BudgetPolicy, slots: int, in_flight: int, clock: Any) -> None:
        self.steering = Steering(policy, WIDTH, in_flight, clock)
        self.now, self.stale = np.ones((slots, WIDTH), np.float32), np.ones((slots, WIDTH), np.float32)
        self.prices = Prices(*milliseconds(), 64)

    def add(self, name: str, slot: int, prompt: int) -> None:
        self.now[slot] = self.stale[slot] = 1.0

    def depths(self, step: Scheduled) -> np.ndarray:
        """Drafts verified of each request."""
        budget = self.steering.budget(step, self.stale, self.prices, 10**6)
        most = np.minimum(step.drafts, budget.deepest)
        worth = np.where(np.arange(WIDTH) < most[:, None], self.now[step.slots], 0)
        return np.minimum(keep_best(worth.astype(np.float32), budget.drafts).keep_depth, most)

    def record(self, step: Scheduled, fresh: np.ndarray) -> None:
        self.steering.landed(self.now)
        self.stale = self.now.copy()
        self.now[step.slots] = fresh


class Engine:
    """vLLM's asynchronous scheduler and runner, scripted: requests of random lengths, acceptance by chance.

    The scheduler counts all drafts of a step as computed, and takes the rejected ones back when the step's
    outcome is there, `in_flight` steps later.
    """

    def __init__(self, in_flight: int, seed: int = 0, places: int = 6) -> None:
        self.rng, self.in_flight, self.places = np.random.default_rng(seed), in_flight, places
        self.clock_s, self.durations = 0.0, [0.0]
        self.requests: dict[str, SimpleNamespace] = {}
        self.free = list(range(places))
        self.count = 0
        self.outcomes: deque[tuple[Scheduled, np.ndarray]] = deque()
        self.history: list[tuple[Scheduled, np.ndarray, np.ndarray, np.ndarray]] = []

    def clock(self) -> float:
        return self.clock_s

    def schedule(self, manager: Any) -> Scheduled:
        while self.free and self.rng.random() < 0.7:
            slot, name = self.free.pop(), f"r{self.count}"
            request = SimpleNamespace(
                slot=slot,
                prompt=int(self.rng.integers(1, 40)),
                computed=0,
                left=int(self.rng.integers(5, 60)),
            )
            self.requests[name] = request
            self.count += 1
            manager.add(name, slot, request.prompt)
        rows = []
        for request in self.requests.values():
            ahead = request.prompt - request.computed
            others = min(ahead, 25) if ahead > 0 else 1  # prompts come in pieces of 25
            drafts = 0 if ahead > 0 else WIDTH
            rows.append((request.slot, request.computed, others, drafts, request.prompt))
            request.computed += others + drafts
        slots, computed, others, drafts, prompts = np.array(rows, np.int64).reshape(-1, 5).T
        return Scheduled(list(self.requests), slots, computed, others, drafts, computed + others >= prompts)

    def serve(self, manager: Any, steps: int) -> None:
        while len(self.history) < steps:
            step = self.schedule(manager)
            if not step.names:
                continue
            fresh = manager.now[step.slots].copy()
            depths = manager.depths(step) if step.drafts.any() else np.zeros(len(step.names), np.int64)
            hits = np.logical_and.accumulate(self.rng.random(fresh.shape) < 0.7, axis=1).sum(axis=1)
            accepted = np.minimum(hits, depths)
            self.clock_s += self.durations[-1]  # the confidences land when the step before is over
            self.durations.append(float(self.rng.uniform(0.01, 0.02)))
            manager.record(step, self.rng.uniform(0.1, 1, fresh.shape).astype(np.float32))
            self.history.append((step, fresh, depths, accepted))
            self.outcomes.append((step, accepted))
            while len(self.outcomes) > self.in_flight:
                self.settle(*self.outcomes.popleft())

    def settle(self, step: Scheduled, accepted: np.ndarray) -> None:
        for i, name in enumerate(step.names):
            if (request := self.requests.get(name)) and step.sampling[i]:
                request.computed -= int(step.drafts[i] - accepted[i])
                request.left -= 1 + int(accepted[i])
                if request.left <= 0:
                    self.free.append(self.requests.pop(name).slot)


def check_diary(engine: Engine, diary: Diary) -> None:
    """All that a policy was told is what happened, to the step that it had selected last."""
    of_policy: dict[Diary, int] = {}
    num_selected = num_told = num_known = 0
    drafted = np.zeros((0, WIDTH))
    steps = [at for at, (step, *_) in enumerate(engine.history) if step.drafts.any() and step.sampling.any()]
    for kind, policy, *told in diary.book:
        if kind == "select":
            of_policy[policy] = steps[num_selected]
            num_selected += 1
            continue
        if kind == "drafted":
            drafted = told[0]
            continue
        at = of_policy[policy]
        assert steps[num_selected] == at + 2  # before the step that selects next
        step, fresh, depths, accepted = engine.history[at]
        keep_depth, num_accepted, seconds = told
        rows = np.flatnonzero(step.sampling)
        places = np.arange(WIDTH) < step.drafts[rows][:, None]
        assert drafted.tolist() == np.where(places, fresh[rows], 0).astype(np.float32).tolist()
        assert seconds == pytest.approx(engine.durations[at + 1])
        later = engine.history[at + 1][0].names, engine.history[at + 2][0].names
        known = np.array([step.names[row] in later[0] and step.names[row] in later[1] for row in rows])
        if not engine.in_flight:
            known = np.array([step.names[row] in later[0] for row in rows])
        assert keep_depth.tolist() == np.where(known, depths[rows], 0).tolist()
        assert num_accepted.tolist() == np.where(known, accepted[rows], 0).tolist()
        num_told += 1
        num_known += int(known.sum())
    assert num_told > 0.6 * num_selected
    assert num_known > 2 * num_told


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_a_learning_policy_hears_two_steps_later_what_became_of_its_step(in_flight: int, seed: int) -> None:
    engine, diary = Engine(in_flight, seed), Diary()
    engine.serve(Buffers(diary, engine.places, in_flight, engine.clock), 300)
    check_diary(engine, diary)


def decoding(batch: int, drafts: int = WIDTH) -> Scheduled:
    """Requests that all decode, with equally many drafts."""
    places = np.arange(batch)
    ones = np.ones(batch, np.int64)
    names = [f"r{i}" for i in places]
    return Scheduled(names, places, 50 * ones, ones, drafts * ones, np.ones(batch, bool))


def budget(spec: str, step: Scheduled, confidences: np.ndarray, most: int = 10**6) -> adaptive.Budget:
    steering = Steering(parse_policy(spec), WIDTH, 1)
    return steering.budget(step, confidences, Prices(*milliseconds(), 64), most)


def test_one_length_for_all_is_obeyed_and_other_policies_give_a_number() -> None:
    confidences = np.random.default_rng(0).uniform(0.2, 1, (8, WIDTH)).astype(np.float32)
    assert budget("off", decoding(8), confidences) == (0, 0)
    assert budget("full", decoding(8), confidences) == (40, 5)
    assert budget("fixed:3", decoding(8), confidences) == (24, 3)
    assert budget("dsd:1x4/8x2", decoding(8), confidences) == (16, 2)
    assert budget("tetris:2", decoding(8), confidences) == (16, 5)
    assert budget("ratio:0.5", decoding(8), confidences) == (16, 5)  # 24 tokens of 48


def test_no_more_is_asked_than_was_drafted_and_than_vllm_can_take() -> None:
    confidences = np.ones((8, WIDTH), np.float32)
    short = decoding(8)._replace(drafts=np.array([5, 5, 1, 0, 5, 2, 0, 3]))
    assert budget("full", short, confidences) == (21, 5)
    assert budget("fixed:3", short, confidences) == (15, 3)
    assert budget("full", decoding(8), confidences, most=17).drafts == 17
    assert budget("vllm-adaptive", decoding(8), confidences, most=17).drafts <= 17
    prompts = decoding(3)._replace(sampling=np.zeros(3, bool), drafts=np.zeros(3, np.int64))
    assert budget("full", prompts, confidences) == (0, 0)


def test_dcut_plus_learns_to_trust_no_draft_where_none_is_accepted() -> None:
    seconds = itertools.count(step=0.01)
    steering = Steering(parse_policy("dcut-plus"), WIDTH, 1, lambda: next(seconds))
    step, prices, confidences = decoding(8), Prices(*milliseconds(), 0), np.full((8, WIDTH), 0.9, np.float32)
    asked = []
    for _ in range(400):
        asked.append(steering.budget(step, confidences, prices, 10**6).drafts)
        steering.landed(confidences)
        step = step._replace(computed=step.computed + 1)
    assert np.mean(asked[:4]) > 20
    assert np.mean(asked[-100:]) < 2


# ---- vLLM's own -----------------------------------------------------------------------------------------


class OneRank:
    """The only rank of a tensor-parallel group."""

    world_size, rank_in_group = 1, 0

    def broadcast_object(self, value: Any, src: int) -> Any:
        return value


def bare_manager(kind: Any, module: Any, slots: int, width: int, most_logits: int) -> Any:
    """A manager with what its host side needs, and nothing on a GPU."""
    manager = object.__new__(kind)
    manager.num_speculative_steps, manager.num_bonus_tokens = width, 1
    manager._max_total_logits = most_logits
    manager._stale_idx, manager._stale_confidences = 0, [SimpleNamespace(np=None)]
    manager.req_states = SimpleNamespace(
        max_num_reqs=slots, max_num_batched_tokens=2000, num_computed_tokens_np=np.zeros(slots, np.int32)
    )
    return manager


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 20),
    width=st.integers(1, 15),
    graphs=st.booleans(),
    prompts=st.booleans(),
    cut=st.booleans(),
    scarce=st.booleans(),
)
def test_with_vllm_s_own_rule_the_manager_settles_on_vllm_s_own_number(
    module: Any, seed: int, batch: int, width: int, graphs: bool, prompts: bool, cut: bool, scarce: bool
) -> None:
    """Random batches: prompts amid and at their end, drafts cut short, too little room for logits."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(32)[:batch]
    decodes = rng.random(batch) < (0.6 if prompts else 1.1)
    ends = rng.random(batch) < 0.5  # the last piece of its prompt
    prefill = rng.integers(60, 90, batch)
    others = np.where(decodes, 1, rng.integers(1, 50, batch))
    computed = np.where(decodes, prefill + rng.integers(0, 50, batch), np.where(ends, prefill - others, 3))
    drafts = np.where(decodes, rng.integers(0, width + 1, batch) if cut else width, 0)
    names = [f"r{i}" for i in range(batch)]
    stale = rng.beta(rng.uniform(0.5, 3), 0.7, (32, width)).astype(np.float32)
    stale[rng.random(32) < 0.1] = 1.0  # new ones
    most_logits = batch + int(rng.integers(0, 1 + drafts.sum())) if scarce else 10**6
    sizes = np.unique(rng.choice(np.arange(1, 400), 12))
    verify_curve = [(int(n), float(2 + 0.02 * n + rng.random())) for n in sizes]
    draft_curve = [(b, float(0.3 + 0.02 * b + 0.2 * rng.random())) for b in (1, 2, 4, 8, 16, 24)]
    totals, stashed = [], []
    for kind in (
        module.AdaptiveVerificationManager,
        adaptive.manager_class(module, parse_policy("vllm-adaptive"), 1),
    ):
        manager = bare_manager(kind, module, 32, width, most_logits)
        manager._stale_confidences[0].np = stale
        manager.req_states.req_id_to_index = dict(zip(names, slots.tolist(), strict=True))
        manager.req_states.num_computed_tokens_np[slots] = computed
        prefill_len = np.zeros(32, np.int32)
        prefill_len[slots] = prefill
        manager.req_states.prefill_len = SimpleNamespace(np=prefill_len)
        manager._cudagraph_limit = int(sizes[len(sizes) // 2]) if graphs else 0
        manager.steering = Steering(parse_policy("vllm-adaptive"), width, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "get_tp_group", OneRank)
            manager.set_cost_curves(draft_curve, verify_curve)
            tokens = dict(zip(names, (others + drafts).tolist(), strict=True))
            proposed = {name: [-1] * int(k) for name, k in zip(names, drafts, strict=True) if k}
            totals.append(manager.get_num_tokens(tokens, proposed))
        stashed.append(manager._batch_budget)
    assert totals[0] == totals[1]
    assert stashed[0] == stashed[1]


def test_where_more_drafts_never_make_a_plateau_the_first_peak_is_vllm_s_choice() -> None:
    confidences = np.random.default_rng(0).beta(2, 0.7, (20, 8, WIDTH)).astype(np.float32)
    tokens = np.arange(601)
    for one, slope in zip(confidences, np.linspace(0.02, 1, 20), strict=True):
        prices = Prices(np.full(41, 1.0), 5 + slope * tokens, 0)
        chosen = [
            Steering(parse_policy(spec), WIDTH, 1).budget(decoding(8), one, prices, 10**6)
            for spec in ("dspark", "vllm-adaptive")
        ]
        assert chosen[0] == chosen[1]


class Managed:
    """vLLM's manager steered by a policy, its streams on the CPU; vLLM's own code spends the budget."""

    def __init__(self, module: Any, policy: BudgetPolicy, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        torch = pytest.importorskip("torch")
        self.torch, self.slots = torch, engine.places
        nothing = SimpleNamespace(synchronize=int, record=int, wait_stream=bool)
        for name in ("Stream", "Event", "current_stream"):
            patch.setattr(torch.cuda, name, lambda *_, **__: nothing)
        patch.setattr(module, "stream", lambda *_: nullcontext())
        patch.setattr(module, "get_tp_group", OneRank)
        patch.setattr(
            module, "_assign_draft_token_budget_compiled", module._assign_draft_token_budget
        )  # on a GPU compiled
        self.states = SimpleNamespace(
            num_speculative_steps=WIDTH,
            device="cpu",
            max_num_reqs=self.slots,
            max_num_batched_tokens=600,
            req_id_to_index={},
            num_computed_tokens_np=np.zeros(self.slots, np.int32),
            prefill_len=SimpleNamespace(np=np.zeros(self.slots, np.int32)),
        )
        kind = adaptive.manager_class(module, policy, engine.in_flight)
        starts = torch.zeros(self.slots + 1, dtype=torch.int32)
        self.manager: Any = kind(self.states, starts, 1, 10**6)
        self.manager.steering.clock = engine.clock
        list(self.manager.batches_to_profile([1, 2, 4, 8, 16, 24, 32]))
        self.manager.set_cost_curves(
            [(b, 1 + 0.02 * b) for b in (1, 2, 4, 8)], [(n, 5 + 0.1 * n) for n in (*SIZES, 600)]
        )

    @property
    def now(self) -> np.ndarray:
        return self.manager._confidence_probs.numpy()

    def add(self, name: str, slot: int, prompt: int) -> None:
        self.states.req_id_to_index[name] = slot
        self.states.prefill_len.np[slot] = prompt
        self.manager.add_request(slot)

    def depths(self, step: Scheduled) -> np.ndarray:
        """Drafts verified of each request, as vLLM's ranking leaves them."""
        self.states.num_computed_tokens_np[step.slots] = step.computed
        order = np.argsort(-step.drafts, kind="stable")  # its runner puts those with drafts first
        names = [step.names[i] for i in order]
        drafts, scheduled = step.drafts[order], (step.others + step.drafts)[order]
        total = self.manager.get_num_tokens(
            dict(zip(step.names, (step.others + step.drafts).tolist(), strict=True)),
            {name: [-1] * int(k) for name, k in zip(names, drafts, strict=True) if k},
        )
        rows = np.append(0, np.cumsum(drafts + 1)).astype(np.int32)
        compact, _ = self.manager.compact_batch(drafts, scheduled, rows)
        assert compact.sum() == total
        slots = self.torch.from_numpy(step.slots[order])
        logits, starts, kept = self.manager.reallocate_drafts(names, slots)
        depths = np.diff(logits.numpy()) - 1
        assert np.diff(starts.numpy()).tolist() == (step.others[order] + depths).tolist() + [0] * (
            self.slots - len(order)
        )
        assert depths.sum() == kept == total - step.others.sum()
        back = np.empty_like(depths)
        back[order] = depths
        return back.astype(np.int64)

    def record(self, step: Scheduled, fresh: np.ndarray) -> None:
        batch = SimpleNamespace(num_reqs=len(step.names), idx_mapping=self.torch.from_numpy(step.slots))
        self.manager.record_confidences(self.torch.from_numpy(fresh), batch)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_vllm_s_manager_verifies_as_the_policy_says_and_the_policy_hears_of_it(
    module: Any, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, diary = Engine(in_flight), Diary()
    engine.serve(Managed(module, diary, engine, monkeypatch), 300)
    check_diary(engine, diary)


def test_vllm_s_manager_gives_each_request_the_one_length_of_a_uniform_policy(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(1)
    engine.serve(Managed(module, parse_policy("fixed:3"), engine, monkeypatch), 50)
    for step, _, depths, _ in engine.history:
        assert depths.tolist() == np.minimum(step.drafts, 3).tolist()


def test_dcut_plus_serves_through_vllm_s_manager(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(1)
    engine.serve(Managed(module, parse_policy("dcut-plus"), engine, monkeypatch), 400)
    drafted = sum(int(step.drafts.sum()) for step, *_ in engine.history)
    kept = sum(int(depths.sum()) for _, _, depths, _ in engine.history)
    assert 0.05 * drafted < kept < 0.95 * drafted


class VllmSchedule(Engine):
    """The scripted runner behind vLLM's real scheduler, with one step in flight."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(in_flight=1)
        self.scheduler, self.outputs = scheduler, deque[Any]()
        self.prompts: dict[str, int] = {}
        self.slots: dict[str, int] = {}

    def schedule(self, manager: Any) -> Scheduled:
        while len(self.scheduler.waiting) < 2:
            name, prompt = f"r{len(self.prompts)}", int(self.rng.integers(1, 40))
            self.prompts[name] = prompt
            asked = vllm("sampling_params").SamplingParams(max_tokens=int(self.rng.integers(5, 60)))
            request = vllm("v1.request").Request(name, list(range(prompt)), asked, None)
            self.scheduler.add_request(request)
        out = self.scheduler.schedule()
        for name in out.finished_req_ids:
            self.free.append(self.slots.pop(name))
        for new in out.scheduled_new_reqs:
            self.slots[new.req_id] = self.free.pop()
            manager.add(new.req_id, self.slots[new.req_id], self.prompts[new.req_id])
        cached = out.scheduled_cached_reqs
        computed_of = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(out.num_scheduled_tokens)
        if names:
            self.outputs.append(out)
        drafts = np.array([len(out.scheduled_spec_decode_tokens.get(name, ())) for name in names], np.int64)
        others = np.array(list(out.num_scheduled_tokens.values()), np.int64) - drafts
        computed = np.array([computed_of.get(name, 0) for name in names], np.int64)
        slots = np.array([self.slots[name] for name in names], np.int64)
        sampling = computed + others >= np.array([self.prompts[name] for name in names])
        return Scheduled(names, slots, computed, others, drafts, sampling)

    def settle(self, step: Scheduled, accepted: np.ndarray) -> None:
        tokens = [
            [7] * (1 + int(k)) if samples else [] for k, samples in zip(accepted, step.sampling, strict=True)
        ]
        index = {name: i for i, name in enumerate(step.names)}
        output = vllm("v1.outputs").ModelRunnerOutput(
            req_ids=step.names, req_id_to_index=index, sampled_token_ids=tokens
        )
        self.scheduler.update_from_output(self.outputs.popleft(), output)


@pytest.fixture
def scheduler(module: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's asynchronous scheduler of the built-in target, with drafts."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch, cache = importlib.import_module("torch"), vllm("v1.kv_cache_interface")
        config = (
            vllm("engine.arg_utils")
            .EngineArgs(
                model=str(path("target")),
                max_model_len=256,
                max_num_seqs=6,
                max_num_batched_tokens=64,
                enforce_eager=True,
                enable_prefix_caching=False,
                speculative_config={
                    "method": "ngram",
                    "num_speculative_tokens": WIDTH,
                    "prompt_lookup_max": 3,
                },
            )
            .create_engine_config()
        )
        config.scheduler_config.async_scheduling = (
            True  # ngram alone would forbid it, and needs no checkpoint
        )
        config.cache_config.num_gpu_blocks = 400
        spec = cache.FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
        blocks = cache.KVCacheConfig(400, [], [cache.KVCacheGroupSpec(["layer"], spec)])
        grammars = vllm("v1.structured_output").StructuredOutputManager(config)
        make = vllm("v1.core.sched.async_scheduler").AsyncScheduler
        return make(config, blocks, grammars, block_size=16, hash_block_size=16)


def test_outcomes_are_read_right_from_the_books_of_vllm_s_asynchronous_scheduler(scheduler: Any) -> None:
    assert scheduler.vllm_config.max_concurrent_batches - 1 == 1
    engine, diary = VllmSchedule(scheduler), Diary()
    engine.serve(Buffers(diary, engine.places, 1, engine.clock), 300)
    check_diary(engine, diary)
    assert len(engine.prompts) > 20


class Group:
    """One rank of a tensor-parallel group; what the first sends, all receive."""

    world_size = 2
    sent: ClassVar[list[Any]] = []

    def __init__(self, rank: int) -> None:
        self.rank_in_group = rank

    def broadcast_object(self, value: Any, src: int) -> Any:
        assert src == 0
        if self.rank_in_group == 0:
            self.sent.append(value)
        return self.sent[-1]


def test_ranks_agree_on_the_budget_that_the_first_decides(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, book = Engine(1), Diary()
    ranks = [Managed(module, policy, engine, monkeypatch) for policy in (book, Diary())]
    step, depths = decoding(6), []
    for ranked in ranks:
        for name, slot in zip(step.names, step.slots, strict=True):
            ranked.add(name, int(slot), 3)
    for _ in range(20):
        fresh = engine.rng.uniform(0.1, 1, (6, WIDTH)).astype(np.float32)
        for rank, ranked in enumerate(ranks):
            monkeypatch.setattr(module, "get_tp_group", lambda rank=rank: Group(rank))
            depths.append(ranked.depths(step).tolist())
            ranked.record(step, fresh)
    assert depths[::2] == depths[1::2]
    assert len(Group.sent) == 20
    assert not ranks[1].manager.steering._flights  # only the first rank learns


# ---- whether it can work --------------------------------------------------------------------------------


def config(adaptive_verification: bool = True) -> Any:
    """Of vLLM, as far as it matters here."""
    speculative = SimpleNamespace(
        enable_adaptive_verification=adaptive_verification, num_speculative_tokens=WIDTH
    )
    return SimpleNamespace(speculative_config=speculative, max_concurrent_batches=2)


def test_installed_vllm_makes_the_steered_manager_and_is_still_known(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = module.AdaptiveVerificationManager
    monkeypatch.setattr(module, "AdaptiveVerificationManager", stock)  # to be put back
    managed = Managed(module, parse_policy("full"), Engine(1), monkeypatch)
    for policy in (parse_policy("full"), parse_policy("off")):  # the later one holds
        adaptive.install(policy, config())
    for name in ("get_query_lens_mismatch_unsupported_backend", "get_varlen_cudagraph_unsupported_backend"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    made = module.maybe_create_adaptive_verification_manager(
        enable_adaptive_verification=True,
        attn_groups=[],
        req_states=managed.states,
        query_start_loc=managed.manager.query_start_loc,
        num_bonus_tokens=1,
        max_total_logits=100,
        vllm_config=None,
    )
    assert type(made).__mro__[1] is stock
    assert (made.steering.draft_length, made.steering.in_flight) == (WIDTH, 1)
    made.cost_tables = managed.manager.cost_tables
    made.prices = managed.manager.prices
    managed.manager = made
    step = decoding(6)
    for name, slot in zip(step.names, step.slots, strict=True):
        managed.add(name, int(slot), 3)
    assert managed.depths(step).tolist() == [0] * 6
    assert adaptive.differences(module) == []
    with pytest.raises(InputError, match="this model samples 0 in a step"):
        module.AdaptiveVerificationManager(managed.states, made.query_start_loc, 0, max_total_logits=100)


@pytest.mark.parametrize(
    ("policy", "configured", "message"),
    [
        ("full", config(False), '"enable_adaptive_verification": true'),
        ("full", SimpleNamespace(speculative_config=None), '"enable_adaptive_verification": true'),
        ("oracle", config(), "only a replay can run it"),
        ("dsd", config(), "dsd needs a table, such as"),
    ],
)
def test_what_cannot_be_steered_is_refused(policy: str, configured: Any, message: str) -> None:
    for function in (adaptive.check, adaptive.install):
        with pytest.raises(InputError, match=message):
            function(parse_policy(policy), configured)


def test_a_missing_or_older_vllm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    def older(name: str) -> Any:
        return SimpleNamespace(__version__="0.27.1") if name == "vllm" else absent(name)

    monkeypatch.setattr(adaptive.importlib, "import_module", absent)
    with pytest.raises(InputError, match=r"vLLM is not installed: pip install 'dcut\[vllm\]'"):
        adaptive.check(parse_policy("full"), config())
    monkeypatch.setattr(adaptive.importlib, "import_module", older)
    with pytest.raises(InputError, match=r"vLLM 0\.27\.1 has no adaptive verification: .* install that, or"):
        adaptive.check(parse_policy("full"), config())


def test_a_vllm_that_differs_is_refused_with_what_differs(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(module.AdaptiveVerificationManager):
        def get_num_tokens(self, scheduled: Any) -> Any:
            return self._batch_budget

        compact_batch = None

    later = SimpleNamespace(**{**vars(module), "AdaptiveVerificationManager": Later})
    found = adaptive.differences(later)
    assert "get_num_tokens(self, scheduled) instead of (self, num_tokens_per_req, draft_tokens)" in found
    assert "no AdaptiveVerificationManager.compact_batch" in found
    assert "no _stale_confidences in get_num_tokens" in found
    assert adaptive.differences(SimpleNamespace()) == ["no AdaptiveVerificationManager"]
    importing = adaptive.importlib.import_module
    monkeypatch.setattr(
        adaptive.importlib, "import_module", lambda name: later if "adaptive" in name else importing(name)
    )
    with pytest.raises(InputError, match=r"vLLM 0\.\S+ has get_num_tokens\(self, scheduled\) instead of"):
        adaptive.check(parse_policy("full"), config())
