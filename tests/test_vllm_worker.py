# pyright: reportMissingImports=false
"""Our worker inside vLLM itself: the same texts as without it, the same law, and nothing left behind."""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_vllm  # noqa: F401
import numpy as np
import pytest
from scipy.stats import chi2_contingency

from dcut.cost import CostTable, Sample
from dcut.policies import parse_policy
from dcut.protocol import BudgetPolicy
from dcut.selector import Selection
from runtime.engine import Step, empty_step
from runtime.pair import weights
from runtime.profiler import cache_directory

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # engines in this process

ROOT = Path(__file__).resolve().parents[1]
METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"model": "dflash16", "num_speculative_tokens": 15},
    "eagle3": {"model": "eagle3", "num_speculative_tokens": 7},
    "draft_model": {"model": "draft", "num_speculative_tokens": 7},
    "ngram": {"num_speculative_tokens": 7, "prompt_lookup_max": 4},
}
NUM_PROMPTS, MAX_TOKENS = 64, 48


def prompts(number: int = NUM_PROMPTS) -> list[str]:
    """As many from each domain, as far as possible."""
    lines = [json.loads(line) for line in weights.PROMPTS.read_text(encoding="utf-8").splitlines()]
    return [line["prompt"] for line in lines[:: max(1, len(lines) // number)]][:number]


def start(method: str | None = None, **options: Any) -> Any:
    """vLLM on the built-in target, in this process; a method: with that drafter and our worker."""
    from vllm import LLM

    from runtime.vllm.plugin import let_vllm_scan_llvmlite

    let_vllm_scan_llvmlite()  # without a policy the plugin leaves it alone
    if method:
        speculative = {"method": method, **METHODS[method]}
        if "model" in speculative:
            speculative["model"] = str(weights.path(speculative["model"]))
        options["speculative_config"] = speculative
        options["additional_config"] = {"dcut": {"policy": "full", "profile_s": 0}}
    settings = {"dtype": "float32", "max_num_seqs": 32, "max_model_len": 1024, "seed": 0}
    return LLM(str(weights.path("target")), enforce_eager=True, **settings | options)


def worker(llm: Any) -> Any:
    return core(llm).model_executor.driver_worker.worker


def core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def generate(llm: Any, texts: list[str], **params: Any) -> list[Any]:
    from vllm import SamplingParams

    given = {"temperature": 0, "max_tokens": MAX_TOKENS, **params}
    return [r.outputs[0] for r in llm.generate(texts, SamplingParams(**given), use_tqdm=False)]


def tokens(llm: Any, texts: list[str], **params: Any) -> list[list[int]]:
    return [list(output.token_ids) for output in generate(llm, texts, **params)]


def running(method: str | None = None, **options: Any) -> Iterator[Any]:
    """`start`, and an end that gives the memory back: vLLM hides its objects from the garbage collector.

    The end of an engine takes from the others what those of a process share, until the next one starts.
    """
    llm = start(method, **options)
    yield llm
    del llm
    gc.unfreeze()
    gc.collect()


@pytest.fixture(scope="module")
def plain() -> Iterator[Any]:
    yield from running()


@pytest.fixture(scope="module")
def spoken(plain: Any) -> list[list[int]]:
    """What the target says alone."""
    return tokens(plain, prompts())


@pytest.fixture(scope="module", params=METHODS)
def pruning(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from running(request.param)


class Random(BudgetPolicy):
    """Any depth for any request, and in one step of four no drafts at all."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
        return int(self.random.choice([0, 1, longest, longest]))

    def select(
        self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
    ) -> Selection:
        batch, drafts = confidences.shape
        depth = self.random.integers(drafts, endpoint=True, size=batch)
        return Selection(depth, int(depth.sum()) + batch, 0, float(batch))


COST = CostTable.from_samples(
    [
        *(Sample("verify", b, b * n, 0.002 + 0.0001 * b * n) for b in (1, 32) for n in (1, 4, 16)),
        *(Sample("draft", b, None, 0.002) for b in (1, 32)),
        *(Sample("plain", b, None, 0.002 + 0.0001 * b) for b in (1, 32)),
    ]
)


@pytest.mark.parametrize("policy", ["full", "random", "dcut:buckets=0.25", "off"])
def test_the_text_is_that_of_plain_decoding(policy: str, pruning: Any, spoken: list[list[int]]) -> None:
    method = pruning.llm_engine.vllm_config.speculative_config.method
    if method == "ngram" and "dcut" in policy:
        pytest.skip("n-gram drafts have no confidences; the configuration is refused")
    pruner = worker(pruning).dcut
    pruner.cost = COST
    pruner.policy = Random() if policy == "random" else parse_policy(policy)
    pruner.take_steps()
    assert tokens(pruning, prompts()) == spoken
    steps = pruner.take_steps()
    first_tokens = sum(len(s.emissions) - len(s.request_id) for s in steps)
    assert first_tokens == NUM_PROMPTS
    assert first_tokens + sum(s.num_emitted for s in steps) == sum(map(len, spoken)), "the log holds them all"
    for step in steps:
        assert (step.num_accepted <= step.selection.keep_depth).all()
        assert step.draft_s + step.select_s + step.verify_s <= step.step_s + 1e-9 or not len(step.request_id)
    kept = sum(int(s.selection.keep_depth.sum()) for s in steps)
    accepted = sum(int(s.num_accepted.sum()) for s in steps)
    assert (kept > 0) == (policy != "off")
    if policy == "full" and method != "ngram":
        assert kept == pruner.draft_length * sum(len(s.request_id) for s in steps)
        assert accepted > 0
    if "dcut" in policy:
        whole = (pruner.draft_length + 1) * sum(len(s.request_id) for s in steps)
        assert 0.24 < sum(s.selection.num_verify_tokens for s in steps) / whole < 0.3


@pytest.fixture(scope="module")
def dflash() -> Iterator[Any]:
    yield from running("dflash")


def test_confidences_are_the_drafters_own_probabilities_and_name_its_drafts(dflash: Any) -> None:
    pruner = worker(dflash).dcut
    pruner.policy = parse_policy("full")
    pruner.collect, seen = {}, []
    model = worker(dflash).model_runner.drafter.model
    listening = model.compute_logits
    model.compute_logits = lambda *given: seen.append(listening(*given)) or seen[-1]
    try:
        tokens(dflash, prompts(3), max_tokens=4)
        collected = pruner.collect
    finally:
        model.compute_logits, pruner.collect = listening, None
    assert len(collected) == 3
    probs = seen[-1].float().softmax(-1).view(-1, 15, seen[-1].shape[-1])
    drafts, confidences = next(reversed(collected.values()))
    rows = [row for row in range(len(probs)) if (probs[row].argmax(-1).numpy() == drafts).all()]
    assert any(np.allclose(probs[row].amax(-1).numpy(), confidences, atol=1e-6) for row in rows)


def test_a_rest_of_the_drafter_leaves_its_next_drafts_as_they_were(dflash: Any) -> None:
    """Without the context that it missed it would propose something else."""

    class Late(BudgetPolicy):
        """Rests for some steps, then drafts."""

        def __init__(self, rests: int) -> None:
            self.steps, self.rests = 0, rests

        def draft_length(self, batch_size: int, longest: int, cost: CostTable | None = None) -> int:
            self.steps += 1
            return 0 if self.steps <= self.rests else longest

        def select(
            self, confidences: np.ndarray, cost: CostTable | None, context_tokens: float | None = None
        ) -> Selection:  # nothing is verified: every position of the output is drafted from
            return Selection(np.zeros(len(confidences), np.int64), len(confidences), 0, 1.0)

    pruner, found = worker(dflash).dcut, []
    for rests in (0, 9):
        pruner.policy, pruner.collect = Late(rests), {}
        tokens(dflash, prompts(1), max_tokens=12, ignore_eos=True)
        ((drafts, confidences),) = pruner.collect.values()
        found.append((drafts, confidences))
        pruner.collect = None
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-5)


# ---- sampling -------------------------------------------------------------------------------------------

SAMPLES = 1000


def pairs(llm: Any, seed: int) -> Counter[tuple[int, ...]]:
    """The second and third token of many samples; the first comes from the prompt's own step."""
    from vllm import SamplingParams

    text = "Question: What is 3 + 4?\nAnswer:"
    params = [
        SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True, seed=seed + i) for i in range(SAMPLES)
    ]
    found = llm.generate([text] * SAMPLES, params, use_tqdm=False)
    return Counter(tuple(r.outputs[0].token_ids[1:3]) for r in found)


def likeness(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """The p-value of both being draws of one law; what is seen fewer than ten times is taken together."""
    common = [key for key in one | other if one[key] + other[key] >= 20]
    table = np.array(
        [[c[key] for key in common] + [c.total() - sum(c[k] for k in common)] for c in (one, other)]
    )
    test: Any = chi2_contingency(table[:, table.sum(0) > 0])
    return float(test.pvalue)


@pytest.fixture(scope="module")
def drawn(plain: Any) -> Counter[tuple[int, ...]]:
    return pairs(plain, 0)


def test_sampled_text_follows_the_law_of_plain_sampling(dflash: Any, drawn: Counter[tuple[int, ...]]) -> None:
    worker(dflash).dcut.policy = parse_policy("ratio:0.25")
    assert likeness(drawn, pairs(dflash, 10**6)) > 1e-3


def test_without_the_repair_for_cpus_the_law_is_another(
    dflash: Any, drawn: Counter[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    expand = rejection_sampler._expand

    def left(output: Any, *rest: Any) -> None:
        """vLLM's kernel, into memory in which somebody left something."""
        output.fill_(0.05 if output.is_floating_point() else 0)
        expand(output, *rest)

    def broken(
        x: Any, cu_num_tokens: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        expanded = x.new_empty(num_tokens)
        left(expanded, x, cu_num_tokens, replace_from, replace_to)
        return expanded

    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", broken)
    assert likeness(drawn, pairs(dflash, 10**6)) < 1e-6


def test_values_of_requests_are_repeated_for_their_tokens() -> None:
    import torch

    from runtime.vllm.worker import expand_batch_to_tokens

    ends = torch.tensor([2, 5, 5, 6])
    expanded = expand_batch_to_tokens(torch.tensor([0.5, 0.0, 3.0, 2.0]), ends, 6, 0, 1)
    assert expanded.tolist() == [0.5, 0.5, 1, 1, 1, 2]


# ---- what else requests may ask for ---------------------------------------------------------------------


def test_probabilities_of_the_output_are_those_of_plain_decoding(plain: Any, dflash: Any) -> None:
    worker(dflash).dcut.policy = parse_policy("ratio:0.5")
    asked = {"logprobs": 3, "max_tokens": 24}
    for one, other in zip(
        generate(plain, prompts(8), **asked), generate(dflash, prompts(8), **asked), strict=True
    ):
        assert one.token_ids == other.token_ids
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.keys() == theirs.keys()
            for token, found in ours.items():
                assert found.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)


def test_stop_strings_and_penalties_are_obeyed(plain: Any, dflash: Any) -> None:
    worker(dflash).dcut.policy = parse_policy("ratio:0.5")
    stop = {"stop": ["e"], "max_tokens": 40}
    assert [o.text for o in generate(dflash, prompts(8), **stop)] == [
        o.text for o in generate(plain, prompts(8), **stop)
    ]
    penalty = {"repetition_penalty": 1.3, "max_tokens": 24}
    assert tokens(dflash, prompts(8), **penalty) == tokens(plain, prompts(8), **penalty)


def test_structured_output_keeps_its_form(plain: Any, dflash: Any) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    worker(dflash).dcut.policy = parse_policy("ratio:0.5")
    form = {"structured_outputs": StructuredOutputsParams(regex=r"[0-9]{3}-[a-c]{4}"), "max_tokens": 24}
    texts = [o.text for o in generate(dflash, prompts(6), **form)]
    assert texts == [o.text for o in generate(plain, prompts(6), **form)]
    assert all(len(text) == 8 and text[3] == "-" for text in texts)


def test_requests_that_are_aborted_leave_nothing_behind(dflash: Any) -> None:
    from vllm import SamplingParams

    pruner, engine = worker(dflash).dcut, dflash.llm_engine
    pruner.cost = COST
    pruner.policy = parse_policy("vllm-adaptive")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    names = [engine.add_request(str(i), text, params) for i, text in enumerate(prompts(40))]
    for step in range(12):
        engine.step()
        if step % 3 == 2:  # running ones and waiting ones, in the midst of decoding and before it
            engine.abort_request([names.pop(0), names.pop()], internal=True)
    engine.abort_request(names, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    tokens(dflash, prompts(1), max_tokens=2)  # tells the worker who ended
    scheduler = core(dflash).scheduler
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.usage == 0
    core(dflash).step()
    assert not worker(dflash).model_runner.requests
    assert all(not seen for seen in pruner.chooser.history)
    ran = [s for s in pruner.take_steps() if len(s.request_id)]
    assert all(len(set(s.request_id.tolist())) == len(s.request_id) for s in ran)


@pytest.fixture(scope="module")  # its end takes what engines of a process share: not before the others'
def cramped() -> Iterator[Any]:
    """An engine with too little memory for all the requests that it takes in."""
    yield from running("dflash", block_size=32, num_gpu_blocks_override=22, max_model_len=512, max_num_seqs=8)


def test_requests_that_lose_their_memory_and_resume_say_the_same(
    cramped: Any, spoken: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pruner, scheduler = worker(cramped).dcut, core(cramped).scheduler
    pruner.policy = parse_policy("ratio:0.5")
    lost, preempt = [], scheduler._preempt_request

    def losing(request: Any, *rest: Any, **named: Any) -> None:
        lost.append(request.request_id)
        preempt(request, *rest, **named)

    monkeypatch.setattr(scheduler, "_preempt_request", losing)
    assert tokens(cramped, prompts()[:24]) == spoken[:24]
    assert lost, "there was memory enough: the test is in vain"
    told = Counter[int]()
    for step in pruner.take_steps():
        for emission in step.emissions:
            told[emission.request_id] += len(emission.tokens)
    assert [told[i] for i in range(24)] == [len(output) for output in spoken[:24]]


def test_requests_about_to_end_do_not_compete(dflash: Any) -> None:
    """Each step's batch is who gets another token: nothing is kept for one that its last token ended."""
    pruner = worker(dflash).dcut
    pruner.policy = parse_policy("ratio:0.5")
    pruner.take_steps()
    tokens(dflash, prompts(16), max_tokens=9)
    steps = [s for s in pruner.take_steps() if len(s.request_id)]
    for step in steps:
        budget = -(-step.request_id.size * 16 // 2) - step.request_id.size
        assert step.selection.keep_depth.sum() == budget
    assert max(int(s.position.max()) for s in steps) == 7


# ---- more than one rank ---------------------------------------------------------------------------------


def test_only_the_first_rank_decides_and_the_others_draft_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.vllm import worker as module

    said: list[int] = []

    class Group:
        """Two ranks, of which the first has said something."""

        world_size = 2

        def broadcast_object(self, width: int, src: int) -> int:
            assert src == 0
            said.append(width)
            return 5

    monkeypatch.setattr(module, "get_tp_group", Group)
    other: Any = module.Worker.__new__(module.Worker)
    other._decides = False
    other.dcut = SimpleNamespace(decide=lambda: pytest.fail("only the first rank decides"))
    assert other._agreed(3) == 5
    assert said == [3]
    drafts = SimpleNamespace(req_ids=["0"], draft_token_ids=[[1, 2]])
    other.model_runner = SimpleNamespace(take_draft_token_ids=lambda: drafts)
    assert other.take_draft_token_ids() is drafts


def test_the_scheduler_hears_of_drafts_from_the_first_rank_alone() -> None:
    """vLLM's own executor: were it to ask another rank, our depths would be lost."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    asked: list[Any] = []
    executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.parallel_config = SimpleNamespace(tensor_parallel_size=2, prefill_context_parallel_size=1)
    executor.world_size = 2
    executor.output_rank = executor._get_output_rank()
    executor.collective_rpc = lambda *_, **named: asked.append(named["unique_reply_rank"])
    executor.take_draft_token_ids()
    assert asked == [0]


@pytest.mark.slow
def test_two_ranks_say_what_one_says(spoken: list[list[int]]) -> None:
    script = f"""
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    drafter = {{"method": "dflash", "model": {str(weights.path("dflash16"))!r}, "num_speculative_tokens": 15}}
    llm = LLM({str(weights.path("target"))!r}, dtype="float32", enforce_eager=True, max_num_seqs=32, seed=0,
              max_model_len=1024, tensor_parallel_size=2, distributed_executor_backend="mp",
              speculative_config=drafter)
    params = SamplingParams(temperature=0, max_tokens={MAX_TOKENS})
    outputs = llm.generate(json.load(sys.stdin), params, use_tqdm=False)
    steps = llm.collective_rpc("dcut_steps")
    print(json.dumps([[list(o.outputs[0].token_ids) for o in outputs], [len(found) for found in steps],
                      sorted({{s.draft_s > 0 for s in steps[0] if len(s.request_id)}})]))
"""
    environment = os.environ | {
        "DCUT_POLICY": "dsd:1x0/8x15",  # drafts for the full batch, none for what is left at the end
        "DCUT_PROFILE_S": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    command = [sys.executable, "-c", script]
    asked = json.dumps(prompts(16))
    done = subprocess.run(command, env=environment, cwd=ROOT, input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said, logged, drafted = json.loads(done.stdout.splitlines()[-1])
    alone = dict(zip(prompts(), spoken, strict=True))
    assert said == [alone[prompt] for prompt in prompts(16)]
    assert logged[0] > 0
    assert logged[1] == 0, "the other rank logs nothing"
    assert drafted == [False, True]


# ---- how a user starts it -------------------------------------------------------------------------------


def test_a_policy_in_the_environment_is_all_it_takes_and_costs_are_measured(tmp_path: Path) -> None:
    script = f"""
import json
from vllm import LLM, SamplingParams
drafter = {{"method": "dflash", "model": {str(weights.path("dflash16"))!r}, "num_speculative_tokens": 15}}
llm = LLM({str(weights.path("target"))!r}, dtype="float32", enforce_eager=True, max_num_seqs=2,
          max_model_len=768, speculative_config=drafter)
worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
llm.generate(["def add(a, b):"] * 2, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
steps = [s for s in worker.dcut.take_steps() if len(s.request_id)]
print(json.dumps([type(worker.dcut.policy).__name__, worker.dcut.cost.to_dict(), worker.dcut.drift.ratio,
                  [int(s.request_id.min()) for s in steps]]))
"""
    environment = os.environ | {
        "DCUT_POLICY": "dcut",
        "DCUT_PROFILE_S": "1",
        "XDG_CACHE_HOME": str(tmp_path),  # ours; vLLM's own holds what it knows of models, slow to find out
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(cache_directory().parents[1] / "vllm")),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    policy, table, drift, requests = json.loads(done.stdout.splitlines()[-1])
    assert policy == "DCut"
    cost = CostTable.from_dict(table)
    assert cost.batch_sizes is not None
    sizes = cost.batch_sizes.tolist()
    assert sizes in ([1], [1, 2]), "as far as a second goes"
    assert cost.verify_tokens.tolist() == [[n * b for n in (1, 2, 4, 8, 12, 16)] for b in sizes]
    assert min(cost.verify_s.min(), cost.draft[:, 1].min(), cost.plain[:, 1].min(), cost.prefill_token_s) > 0
    assert drift > 0
    assert requests
    assert min(requests) == 0, "the log begins with the user's requests"
    assert len(list((tmp_path / "dcut" / "profiles").glob("*.json"))) == ("is noisy" not in done.stderr)


def test_a_profile_keeps_to_its_time_and_to_batches_that_vllm_runs_whole(
    dflash: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.vllm import profiler

    config = core(dflash).vllm_config
    monkeypatch.setattr(config.scheduler_config, "max_num_seqs", 256)
    monkeypatch.setattr(config.scheduler_config, "max_num_batched_tokens", 2048)
    monkeypatch.setattr(config.cache_config, "num_gpu_blocks", 10**6)
    profiling = profiler.Profiling(core(dflash))
    assert profiling.sizes[-1] == 66  # of more, a step would leave some out: 16 rows and 15 drafts for each
    now_s = 0.0

    def steps(size: int, context: int, policies: list[str]) -> list[Step]:
        nonlocal now_s
        now_s += 0.01 * size * len(policies)
        found = [empty_step(0.0, 100, 0.1, [])]
        for depth, policy in enumerate(policies):
            tokens, draft_s = size * (1 + depth), 0.0 if policy == "off" else 0.001
            selection = Selection(np.full(size, depth), tokens, 0, 1.0)
            times = 0.0, 0, 0.0, context * size, draft_s, 0.0, 0.001 * tokens, draft_s + 0.001 * tokens, None
            ids = np.arange(size)
            found += [Step(*times, ids, ids, selection, ids, size, [])] * 3
        return found

    monkeypatch.setattr(profiling, "steps", steps)
    monkeypatch.setattr(profiler.time, "perf_counter", lambda: now_s)
    reached = []
    for budget_s in (1, 4, 16, 64):
        now_s = 0.0
        cost = profiling.profile(budget_s, whole=False).cost
        assert 0.5 * budget_s < now_s < budget_s
        assert cost.batch_sizes is not None
        reached.append(cost.batch_sizes[-1])
    assert reached == [4, 16, 64, 66]


def test_the_server_ends_with_one_line_before_a_model_loads() -> None:
    speculative = '{"method": "ngram", "num_speculative_tokens": 3}'
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", "0"]
    done = subprocess.run(
        [*server, "--model", str(weights.path("target")), "--speculative-config", speculative],
        env=os.environ | {"DCUT_POLICY": "dcut"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ngram drafts come without confidences")
    assert "Traceback" not in done.stderr
    assert "Loading" not in done.stderr


# ---- last, for the engines that end here take from the others what they share -----------------------------


@pytest.fixture(scope="module")
def spoken_in_bfloat16() -> list[list[int]]:
    engine = running(dtype="bfloat16")
    said = tokens(next(engine), prompts())
    next(engine, None)
    return said


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_in_bfloat16_too_the_text_is_that_of_plain_decoding(
    method: str, spoken_in_bfloat16: list[list[int]]
) -> None:
    engine = running(method, dtype="bfloat16")
    llm = next(engine)
    worker(llm).dcut.cost = COST
    policies = [parse_policy("full"), Random(), parse_policy("off")]
    if method != "ngram":
        policies.append(parse_policy("dcut:buckets=0.25"))
    for policy in policies:
        worker(llm).dcut.policy = policy
        assert tokens(llm, prompts()) == spoken_in_bfloat16
    del llm
    next(engine, None)
