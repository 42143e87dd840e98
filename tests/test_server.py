"""The OpenAI-compatible server around an engine that speaks from a script."""

import asyncio
import itertools
import json
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.serve import load, report
from dcut.cost import CostTable, Sample
from dcut.policies import BudgetPolicy, DCut, Off
from dcut.selector import Selection
from runtime.engine import Emission, Request, Step
from runtime.recorder import Log
from runtime.server import Server, create_app, listen
from runtime.service import Service
from runtime.text import Codec, TextStream

KEY = "sesame"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
SCRIPT = "Ein Fuß, 漢字 and 😀 are four words.\n" * 8


def byte_codec() -> Codec:
    """One token a byte, so that every character beyond ASCII is split among tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return Codec(tokenizer, TEMPLATE, {})


CODEC = byte_codec()


COST = CostTable.from_samples([Sample("verify", b, b * n, 0.002) for b in (1, 64) for n in (1, 16)])


@dataclass
class ScriptedEngine:
    """Emits three tokens of SCRIPT a request and step; does nothing while `held`."""

    policy: BudgetPolicy = field(default_factory=DCut)
    cost: CostTable | None = COST
    max_batch_size: int = 4
    max_context: int = 400
    draft_length: int = 15
    requests: dict[int, Request] = field(default_factory=dict)
    emitted: dict[int, int] = field(default_factory=dict)
    free: threading.Event = field(default_factory=threading.Event)
    broken: bool = False

    def __post_init__(self) -> None:
        self.free.set()
        self.script = CODEC.encode(SCRIPT)

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.emitted[request.request_id] = 0

    def cancel(self, request_id: int) -> None:
        self.requests.pop(request_id, None)

    def step(self) -> Step | None:
        self.free.wait(0.01)
        if self.broken:
            raise RuntimeError("the scripted engine was told to break")
        batch = list(self.requests)[: self.max_batch_size]
        if not (batch and self.free.is_set()):
            return None
        emissions = []
        for request_id in batch:
            request, done = self.requests[request_id], self.emitted[request_id]
            until = min(done + 3, request.max_tokens, len(self.script))
            reason = (
                "stop" if until == len(self.script) else "length" if until == request.max_tokens else None
            )
            emissions.append(Emission(request_id, self.script[done:until], reason))
            self.emitted[request_id] = until
            if reason:
                del self.requests[request_id]
        depth = np.full(len(batch), 3)
        return Step(
            start_s=0.0,
            prefill_tokens=5,
            prefill_s=0.001,
            context_tokens=10,
            draft_s=0.001,
            select_s=0.001,
            verify_s=0.002,
            step_s=0.004,
            graph_tokens=None,
            request_id=np.array(batch),
            position=np.zeros(len(batch), int),
            selection=Selection(depth, 4 * len(batch), 0, 2.5 * len(batch)),
            num_accepted=depth - 1,
            num_emitted=3 * len(batch),
            emissions=emissions,
        )


@dataclass
class Running:
    """A server on a loopback port, its engine and its service."""

    url: str
    engine: ScriptedEngine
    service: Service
    server: Server

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=60, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        with self.client() as client:
            return client.post(path, json=body, **options)

    def metric(self, name: str) -> float:
        with self.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


@contextmanager
def running(
    engine: ScriptedEngine | None = None,
    api_key: str | None = None,
    max_waiting: int = 100,
    build: Callable[[], ScriptedEngine] | None = None,
    recorder: Any = None,
) -> Iterator[Running]:
    """A server in threads of this process, ready unless `build` is given."""
    engine = engine or ScriptedEngine()
    service = Service(lambda: (build() if build else engine, recorder), "dcut", max_waiting)
    app = create_app(service, CODEC, "scripted", api_key)
    server = Server(service, app)
    with listen("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([listener],))
        service.start()
        thread.start()
        try:
            until(lambda: service.state == "ready" or build is not None)
            yield Running(url, engine, service, server)
        finally:
            engine.free.set()
            server.should_exit = True
            thread.join()
            if not engine.broken:
                service.close()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about in 60 s")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


def events(response: httpx.Response) -> list[Any]:
    """What a stream of server-sent events said, without the closing [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


# ---- text -----------------------------------------------------------------------------------------------

texts = st.text(alphabet="ab\n é漢😀", max_size=24)


def streamed(stream: TextStream, tokens: Sequence[int], cuts: Sequence[int]) -> list[str]:
    """What a stream returns when its tokens come in pieces of these sizes."""
    pieces, tokens, sizes = [], list(tokens), itertools.cycle(cuts)
    while tokens and not stream.stopped:
        size = next(sizes)
        pieces.append(stream.push(tokens[:size]))
        tokens = tokens[size:]
    return [*pieces, stream.finish()]


@given(
    tokens=texts.map(CODEC.encode) | st.lists(st.integers(0, 255), max_size=16),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_streamed_text_is_the_decoded_text_however_it_is_cut(tokens: list[int], cuts: list[int]) -> None:
    pieces = streamed(TextStream(CODEC), tokens, cuts)
    assert "".join(pieces) == CODEC.decode(tokens)


@given(text=texts, cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_no_piece_of_streamed_text_holds_half_a_character(text: str, cuts: list[int]) -> None:
    assert not any("\ufffd" in piece for piece in streamed(TextStream(CODEC), CODEC.encode(text), cuts))


@given(
    text=texts,
    stops=st.lists(st.text(alphabet="ab\n é漢", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_text_ends_before_the_first_stop_string_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = TextStream(CODEC, stops)
    tokens = CODEC.encode(text)
    said = "".join(streamed(stream, tokens, cuts))
    # The first to be complete stops; of those complete at once, the one that began first.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert said == text
        assert not stream.stopped
        assert stream.num_tokens == len(tokens)
        return
    seen = text[: min(ends)]
    assert said == min((seen[: seen.find(stop)] for stop in stops if stop in seen), key=len)
    assert stream.stopped
    assert stream.num_tokens == len(CODEC.encode(seen))


# ---- answers --------------------------------------------------------------------------------------------


def test_a_completion_is_the_engine_s_text_with_its_usage(server: Running) -> None:
    answer = server.post("/v1/completions", {"model": "scripted", "prompt": "abc", "max_tokens": 24}).json()
    text = CODEC.decode(CODEC.encode(SCRIPT)[:24])
    assert answer["object"] == "text_completion"
    assert answer["model"] == "scripted"
    assert answer["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 24, "total_tokens": 27}


def test_a_completion_has_sixteen_tokens_unless_asked_for_more_and_a_chat_as_many_as_fit(
    server: Running,
) -> None:
    assert server.post("/v1/completions", {"model": "scripted", "prompt": [7, 8]}).json()["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 16,
        "total_tokens": 18,
    }
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "hello"}]}
    answer = server.post("/v1/chat/completions", chat).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": SCRIPT}
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("stop", [None, "are", ["zebra", "字 and 😀", "words"]])
def test_a_stream_says_the_same_as_the_whole_answer(server: Running, chat: bool, stop: Any) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    body = {"model": "scripted", "max_tokens": 70, "stop": stop, **asked}
    whole = server.post(path, body).json()
    chunks = events(server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    *told, last = chunks
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in told)
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in told]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert (
        choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"] == ("stop" if stop else "length")
    )
    if chat:
        assert "".join(c["delta"]["content"] for c in choices) == whole["choices"][0]["message"]["content"]
        assert [c["delta"].get("role") for c in choices] == ["assistant"] + [None] * (len(choices) - 1)
        assert last["object"] == "chat.completion.chunk"
    else:
        assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
    assert len(choices) > 5


def test_a_stop_string_ends_the_text_before_it_and_frees_the_place(server: Running) -> None:
    body = {"model": "scripted", "prompt": "x", "max_tokens": 300, "stop": ["漢字"]}
    answer = server.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "Ein Fuß, "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len("Ein Fuß, 漢字".encode())
    until(lambda: not server.engine.requests and server.service.num_requests == 0)


def test_what_a_request_asks_reaches_the_engine() -> None:
    with running() as server:
        server.engine.free.clear()
        body = {"model": "scripted", "prompt": "abc", "seed": 5, "temperature": 0.5, "max_tokens": 2}
        thread = threading.Thread(target=server.post, args=("/v1/completions", {**body, "ignore_eos": True}))
        thread.start()
        until(lambda: bool(server.engine.requests))
        assert list(server.engine.requests.values()) == [Request(0, CODEC.encode("abc"), 2, 0.5, 5, ())]
        server.engine.free.set()
        thread.join()


def test_a_chat_is_what_the_model_s_template_makes_of_it(server: Running) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    body = {"model": "scripted", "messages": messages, "max_completion_tokens": 1}
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert usage["prompt_tokens"] == len("<system>be brief<user>ab<assistant>")


def test_the_models_are_listed(server: Running) -> None:
    with server.client() as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == "scripted"
        assert client.get("/v1/models/scripted").json() == card
        assert client.get("/v1/models/gpt-9").json()["error"]["code"] == "model_not_found"


# ---- refusals -------------------------------------------------------------------------------------------

GOOD = {"model": "scripted", "prompt": "x"}
CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("completions", "{", 400, None, "Invalid JSON"),
        ("completions", "", 400, None, "Invalid JSON"),
        ("completions", "[" * 100_000, 400, None, "Invalid JSON"),
        ("completions", "[]", 400, None, "object"),
        ("completions", b"\xff\xfe", 400, None, "Invalid JSON"),
        ("completions", '{"model": "scripted", "prompt": "\\ud800"}', 400, None, "Invalid JSON"),
        ("completions", {"prompt": "x"}, 400, "model", "required"),
        ("completions", {"model": "scripted"}, 400, "prompt", "required"),
        ("completions", {**GOOD, "model": "gpt-9"}, 404, "model", "'scripted'"),
        ("completions", {**GOOD, "prompt": 5}, 400, "prompt", "string"),
        ("completions", {**GOOD, "prompt": ["a", "b"]}, 400, "prompt", "integer"),
        ("completions", {**GOOD, "prompt": ""}, 400, "prompt", "empty"),
        ("completions", {**GOOD, "prompt": [1, 256]}, 400, "prompt", "256"),
        ("completions", {**GOOD, "prompt": [-1]}, 400, "prompt", "-1"),
        ("completions", {**GOOD, "prompt": "x" * 400}, 400, "prompt", "400 tokens"),
        ("completions", {**GOOD, "prompt": "x" * 390, "max_tokens": 11}, 400, "prompt", "context"),
        ("completions", {**GOOD, "prompt": "x" * (5 << 20)}, 413, None, "longer"),
        ("completions", {**GOOD, "max_tokens": "5"}, 400, "max_tokens", "integer"),
        ("completions", {**GOOD, "max_tokens": 0}, 400, "max_tokens", "greater"),
        ("completions", {**GOOD, "max_tokens": True}, 400, "max_tokens", "integer"),
        ("completions", {**GOOD, "temperature": -1}, 400, "temperature", "greater"),
        ("completions", {**GOOD, "temperature": 3}, 400, "temperature", "less"),
        (
            "completions",
            '{"model": "scripted", "prompt": "x", "temperature": NaN}',
            400,
            "temperature",
            "finite",
        ),
        ("completions", {**GOOD, "seed": 1.5}, 400, "seed", "integer"),
        ("completions", {**GOOD, "seed": 2**70}, 400, "seed", "less"),
        ("completions", {**GOOD, "stop": [1]}, 400, "stop", "string"),
        ("completions", {**GOOD, "stop": ""}, 400, "stop", "empty"),
        ("completions", {**GOOD, "stop": ["a", ""]}, 400, "stop", "empty"),
        ("completions", {**GOOD, "stream": "yes"}, 400, "stream", "boolean"),
        ("completions", {**GOOD, "n": 2}, 400, "n", "only 1"),
        ("completions", {**GOOD, "top_p": 0.9}, 400, "top_p", "only 1"),
        ("completions", {**GOOD, "logprobs": 3}, 400, "logprobs", "only"),
        ("completions", {**GOOD, "echo": True}, 400, "echo", "only false"),
        ("completions", {**GOOD, "logit_bias": {"5": 1}}, 400, "logit_bias", "only {}"),
        ("completions", {**GOOD, "min_tokens": 3}, 400, "min_tokens", "no such option"),
        ("completions", {**GOOD, "stream_options": {"x": 1}}, 400, "stream_options", "no such option"),
        ("chat/completions", {**CHAT, "messages": []}, 400, "messages", "at least 1"),
        ("chat/completions", {**CHAT, "messages": "hi"}, 400, "messages", "array"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, 400, "messages", "required"),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "king", "content": "x"}]},
            400,
            "messages",
            "user",
        ),
        (
            "chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "Input should be 'text'",
        ),
        ("chat/completions", {**CHAT, "tools": [{}]}, 400, "tools", "only []"),
        ("chat/completions", {**CHAT, "response_format": {"type": "json"}}, 400, "response_format", "text"),
        ("embeddings", {"model": "scripted"}, 404, None, "Not Found"),
    ],
)
def test_a_bad_request_is_refused_in_the_api_s_own_shape(
    server: Running, path: str, body: Any, status: int, param: str | None, says: str
) -> None:
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    with server.client() as client:
        response = client.post(f"/v1/{path}", content=content)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert len(error["message"]) < 300


def test_options_at_their_neutral_values_are_taken(server: Running) -> None:
    neutral = {
        **{
            "n": 1,
            "top_p": 1.0,
            "top_k": -1,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "user": "me",
        },
        **{"best_of": 1, "echo": False, "logprobs": None, "logit_bias": {}, "suffix": None, "stop": None},
    }
    assert server.post("/v1/completions", {**GOOD, **neutral}).status_code == 200


def test_a_wrong_method_is_refused(server: Running) -> None:
    with server.client() as client:
        response = client.get("/v1/completions")
    assert response.status_code == 405
    assert "Method Not Allowed" in response.json()["error"]["message"]


def test_with_a_key_nothing_under_v1_answers_without_it() -> None:
    with running(api_key=KEY) as server, server.client() as client:
        for shown in (None, b"Bearer wrong", KEY.encode(), "Bearer s\u00e9same".encode()):
            headers = {} if shown is None else {b"Authorization": shown}
            for method, path in (
                ("GET", "models"),
                ("POST", "completions"),
                ("POST", "policy"),
                ("GET", "policy"),
            ):
                answer = client.request(method, f"/v1/{path}", json=GOOD, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": f"Bearer {KEY}"}
        assert client.post("/v1/completions", json=GOOD, headers=right).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200


# ---- policy and metrics ---------------------------------------------------------------------------------


def test_the_policy_changes_while_requests_run_but_only_with_a_key() -> None:
    right = {"Authorization": f"Bearer {KEY}"}
    with running(api_key=KEY) as server, server.client(headers=right) as client:
        assert client.get("/v1/policy").json() == {"policy": "dcut"}
        with client.stream(
            "POST", "/v1/completions", json={**GOOD, "max_tokens": 300, "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            assert client.post("/v1/policy", json={"policy": "off"}).json() == {"policy": "off"}
            until(lambda: server.engine.policy == Off())
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        refused = client.post("/v1/policy", json={"policy": "dcat"})
        assert refused.status_code == 400
        assert "'dcut'" in refused.json()["error"]["message"]
        assert client.post("/v1/policy", json={"policy": 5}).status_code == 400
        assert client.get("/v1/policy").json() == {"policy": "off"}
    with running() as server:
        assert server.post("/v1/policy", {"policy": "off"}).status_code == 403


def test_metrics_count_what_the_steps_did() -> None:
    with running() as server, server.client() as client:
        client.post("/v1/completions", json={**GOOD, "max_tokens": 30})
        until(lambda: server.metric("dcut_step_seconds_count") == 10)
        assert server.metric("dcut_batch_size_sum") == 10
        assert server.metric("dcut_keep_ratio_sum") == pytest.approx(10 * 4 / 16)
        assert server.metric("dcut_expected_tokens_total") == 25
        assert server.metric("dcut_emitted_tokens_total") == 30
        assert server.metric("dcut_prefill_tokens_total") == 50
        assert server.metric('dcut_bucket_steps_total{bucket="0.25"}') == 10
        assert server.metric('dcut_verified_drafts_total{position="2"}') == 10
        assert server.metric('dcut_accepted_drafts_total{position="1"}') == 10
        assert 'dcut_accepted_drafts_total{position="2"}' not in client.get("/metrics").text
        assert server.metric("dcut_profile_drift") == pytest.approx(2)  # 4 ms a step instead of 2
        assert server.metric('dcut_requests_total{end="length"}') == 1
        assert server.metric("dcut_requests_running") == 0


# ---- life -----------------------------------------------------------------------------------------------


def test_the_server_is_healthy_only_when_the_engine_is_ready() -> None:
    built = threading.Event()

    def build() -> ScriptedEngine:
        built.wait()
        return ScriptedEngine()

    with running(build=build) as server, server.client() as client:
        for response in (client.get("/health"), client.post("/v1/completions", json=GOOD)):
            assert response.status_code == 503
            assert int(response.headers["Retry-After"]) >= 1
            assert "starting" in response.json()["error"]["message"]
        for wrong, status in (({"model": "gpt-9"}, 404), ({"prompt": []}, 400), ({"max_tokens": "9"}, 400)):
            assert client.post("/v1/completions", json=GOOD | wrong).status_code == status
        built.set()
        until(lambda: client.get("/health").status_code == 200)
        assert client.post("/v1/completions", json=GOOD).status_code == 200


def test_an_idle_connection_outlives_the_pool_of_a_client(server: Running) -> None:
    expiry_s = httpx.Limits().keepalive_expiry
    assert expiry_s is not None
    assert server.server.config.timeout_keep_alive > 2 * expiry_s


def test_overload_is_refused_and_passes() -> None:
    with running(max_waiting=2) as server, ExitStack() as stack:
        server.engine.free.clear()
        long = {**GOOD, "max_tokens": 300, "stream": True}
        clients = [stack.enter_context(server.client()) for _ in range(6)]
        streams = [stack.enter_context(c.stream("POST", "/v1/completions", json=long)) for c in clients]
        assert [stream.status_code for stream in streams] == [200] * 6
        assert server.metric("dcut_requests_running") == 4
        assert server.metric("dcut_requests_waiting") == 2
        for _ in range(3):
            refused = server.post("/v1/completions", GOOD)
            assert refused.status_code == 503
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.json()["error"]["type"] == "server_error"
        assert server.metric('dcut_requests_total{end="refused"}') == 3
        server.engine.free.set()
        for stream in streams:
            assert stream.read().endswith(b"[DONE]\n\n")
        assert server.post("/v1/completions", GOOD).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away_free_their_places(stream: bool) -> None:
    engine = ScriptedEngine(max_batch_size=8)
    with running(engine) as server:
        engine.free.clear()
        body = json.dumps({**GOOD, "max_tokens": 300, "stream": stream})
        host, port = server.url.removeprefix("http://").split(":")
        sockets = [socket.create_connection((host, int(port))) for _ in range(16)]
        for connection in sockets:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall((head + body).encode())
        until(lambda: server.service.num_requests == 16 == len(engine.requests))
        for connection in sockets[::2]:
            connection.close()
        until(lambda: server.service.num_requests == 8 == len(engine.requests))
        engine.free.set()
        for connection in sockets[1::2]:
            with connection, connection.makefile("rb") as reply:
                assert b"200 OK" in reply.readline()
        until(lambda: server.service.num_requests == 0 == len(engine.requests))
        assert server.metric('dcut_requests_total{end="cancelled"}') >= 8


def test_a_client_that_goes_away_before_its_request_is_whole_is_no_error(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"mod')
        until(lambda: len(server.server.server_state.tasks) == 1)
    until(lambda: not server.server.server_state.tasks)
    assert not caplog.records


@pytest.mark.parametrize("abandon", [0.0, 0.5])
def test_sixty_four_streams_at_once_meet_no_error_and_leave_no_place_taken(
    abandon: float, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Namespace(requests=200, concurrency=64, max_tokens=30, temperature=0.0, seed=0, abandon=abandon)
    with running(ScriptedEngine(max_batch_size=16)) as server:
        outcomes, taken_s, metrics = asyncio.run(load(server.url, None, ["hello", "x"], wanted))
        assert report("scripted", outcomes, taken_s, metrics)
        assert not server.engine.requests
    whole = [outcome for outcome in outcomes if not outcome.abandoned]
    assert all(outcome.num_tokens == 30 for outcome in whole)
    assert len(whole) == 200 if not abandon else 60 < len(whole) < 140
    assert f"{len(whole)} of 200 requests answered" in capsys.readouterr().out


def test_a_server_told_to_end_finishes_what_runs() -> None:
    with running() as server, server.client() as client:
        server.engine.free.clear()
        with client.stream(
            "POST", "/v1/completions", json={**GOOD, "max_tokens": 100, "stream": True}
        ) as reply:
            server.server.should_exit = True
            server.engine.free.set()
            assert reply.read().endswith(b"[DONE]\n\n")
        with pytest.raises(httpx.TransportError):  # refused, or cut off while it closes
            until(lambda: server.post("/v1/completions", GOOD).is_error)


def test_an_engine_that_breaks_fails_its_requests_and_takes_no_more() -> None:
    with running() as server, server.client() as client:
        server.engine.free.clear()
        with client.stream("POST", "/v1/completions", json={**GOOD, "stream": True}) as reply:
            server.engine.broken = True
            said = reply.read().decode()
        assert json.loads(said.removeprefix("data: "))["error"]["type"] == "server_error"
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json=GOOD).status_code == 503
        with pytest.raises(RuntimeError, match="told to break"):
            server.service.close()


class Notes(Log):
    """A log whose dense pass only counts."""

    partial: bool | None = None
    num_passed = 0

    @property
    def backlog(self) -> int:
        return len(self.finished) - self.num_passed

    def advance(self) -> None:
        self.num_passed += 1

    def close(self, partial: bool) -> None:
        self.partial = partial


def test_what_is_served_is_logged_with_how_it_ended() -> None:
    notes = Notes()
    with running(recorder=notes) as server:
        for body in (GOOD, {**GOOD, "stop": "Fuß", "max_tokens": 300}):
            assert server.post("/v1/completions", body).status_code == 200
        long = {**GOOD, "max_tokens": 300, "stream": True}
        engine, step = server.engine, server.engine.step

        def one_step() -> Step | None:
            done = step()
            if done:
                engine.free.clear()
            return done

        engine.step = one_step
        with server.client() as client, client.stream("POST", "/v1/completions", json=long) as reply:
            next(reply.iter_lines())
        until(lambda: server.service.num_requests == 0 == notes.backlog)
        assert notes.num_passed == 3
    assert [text.finish_reason for text in notes.finished] == ["length", "stop", "cut"]
    assert notes.finished[0].output == CODEC.encode(SCRIPT)[:16]
    assert notes.partial is False
    assert not notes.under_way


def test_a_broken_engine_leaves_a_partial_log() -> None:
    notes = Notes()
    with running(recorder=notes) as server:
        server.engine.broken = True
        assert server.post("/v1/completions", GOOD).status_code == 500
    assert notes.partial is True
