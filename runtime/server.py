"""The OpenAI-compatible HTTP server around the live engine."""

import asyncio
import json
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from dcut.errors import InputError, at_once, heeded, leave
from dcut.policies import DCut, parse_policy
from dcut.runtime.serve import GRACE_S, Config
from runtime.chooser import rehearse
from runtime.drafter import open_drafter
from runtime.engine import Engine
from runtime.engine import Request as EngineRequest
from runtime.models import read_config
from runtime.pair import weights
from runtime.profiler import cached_profile
from runtime.recorder import SLOTS, DensePass, Recorder, describe, empty, read_prompts
from runtime.service import Failed, Refused, Service, Ticket, serveable
from runtime.text import Codec, TextStream
from runtime.verifier import open_pair

MAX_BODY = 4 << 20  # bytes of a request
RETRY_AFTER_S = 1
CONTEXT = 2048  # tokens of a prompt and its output at most, unless asked for more
PROFILED_CONTEXT = 256  # tokens of the contexts that steps are measured with
KEEP_ALIVE_S = 75  # of an idle connection; clients drop theirs sooner, and so never meet one that is closing


# ---- requests -------------------------------------------------------------------------------------------


def only(*values: Any) -> AfterValidator:
    """For an option that this server knows but takes only at values that change nothing."""

    def check(value: Any) -> Any:
        if value is None or any(
            value == v and isinstance(value, bool) == isinstance(v, bool) for v in values
        ):
            return value
        allowed = " or ".join(map(json.dumps, values))
        raise PydanticCustomError(
            "unsupported",
            "{value} is not supported, only {allowed}",
            {"value": json.dumps(value), "allowed": allowed},
        )

    return AfterValidator(check)


def not_empty(stops: str | list[str] | None) -> str | list[str] | None:
    """Refuse the stop string that would end every text before it begins."""
    if stops == "" or (isinstance(stops, list) and "" in stops):
        raise PydanticCustomError("empty", "a stop string must not be empty")
    return stops


class Body(BaseModel):
    """A request's JSON: exact types, and no key that is not named here."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False


class GenerateBody(Body):
    """What both kinds of completion share."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[str | list[str] | None, AfterValidator(not_empty)] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = False  # not OpenAI's: generate on to max_tokens, as vLLM's benchmarks ask
    user: str | None = None  # names the caller, changes nothing
    n: Annotated[Any, only(1)] = None
    top_p: Annotated[Any, only(1)] = None
    top_k: Annotated[Any, only(-1, 0)] = None
    min_p: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    repetition_penalty: Annotated[Any, only(1)] = None
    logit_bias: Annotated[Any, only({})] = None
    logprobs: Annotated[Any, only(False)] = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionBody(GenerateBody):
    prompt: str | list[int]
    best_of: Annotated[Any, only(1)] = None
    echo: Annotated[Any, only(False)] = None
    suffix: Annotated[Any, only("")] = None

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; the API's own default is 16."""
        return self.max_tokens or 16


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def plain(self) -> dict[str, str]:
        parts = self.content if isinstance(self.content, list) else []
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role  # templates do not know the newer name
        return {"role": role, "content": text}


class ChatBody(GenerateBody):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    top_logprobs: Annotated[Any, only(0)] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most; None: as many as the context holds."""
        return self.max_completion_tokens or self.max_tokens


class PolicyBody(Body):
    policy: str


class ApiError(Exception):
    """An answer other than 200, in the API's own shape."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        return JSONResponse(self.body, self.status, self.headers)


B = TypeVar("B", bound=Body)


async def parse(request: Request, kind: type[B]) -> B:
    """The request's body as `kind`; ApiError 413 beyond MAX_BODY, 400 naming the option that is wrong."""
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                raise ApiError(413, f"the request is longer than {MAX_BODY} bytes")
    except ClientDisconnect as error:
        raise ApiError(499, "the client went away") from error
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        # Where a value may be of several kinds, what is wrong deepest in it is of the kind that was meant.
        wrong = max(error.errors(include_url=False), key=lambda found: len(found["loc"]))
        path = ".".join(map(str, wrong["loc"]))
        message = "this server knows no such option" if wrong["type"] == "extra_forbidden" else wrong["msg"]
        raise ApiError(
            400, f"{path}: {message}" if path else message, param=path.partition(".")[0] or None
        ) from error


# ---- answers --------------------------------------------------------------------------------------------


class Generation:
    """One running request and its answer in the API's words, as a whole or as a stream of chunks."""

    def __init__(self, ticket: Ticket, text: TextStream, body: GenerateBody, num_prompt_tokens: int):
        self.ticket = ticket
        self._text = text
        self._chat = isinstance(body, ChatBody)
        self._num_prompt_tokens = num_prompt_tokens
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": body.model,
        }

    async def pieces(self) -> AsyncIterator[tuple[str, str | None]]:
        """Text as it becomes certain; with the last piece why the generation ended."""
        reason = None
        while reason is None:
            tokens, reason = await self.ticket.next()
            piece = self._text.push(tokens)
            if reason is not None:
                piece += self._text.finish()
            if self._text.stopped:
                self.ticket.end("stop")
                reason = "stop"
            if piece or reason:
                yield piece, reason

    async def whole(self) -> dict[str, Any]:
        pieces = [piece async for piece in self.pieces()]
        text, reason = "".join(text for text, _ in pieces), pieces[-1][1]
        said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._head, "choices": [self._choice(said, reason)], "usage": self._usage}

    async def events(self, include_usage: bool) -> AsyncIterator[str]:
        """Server-sent events: a chunk for each engine step that makes text certain, then [DONE]."""
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        usage = {"usage": None} if include_usage else {}
        role = {"role": "assistant"}
        try:
            async for text, reason in self.pieces():
                said = {"delta": {**role, "content": text}} if self._chat else {"text": text}
                yield event({**head, "choices": [self._choice(said, reason)], **usage})
                role = {}
            if include_usage:
                yield event({**head, "choices": [], "usage": self._usage})
            yield "data: [DONE]\n\n"
        except Failed as error:
            yield event(ApiError(500, str(error)).body)

    @staticmethod
    def _choice(said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": reason}

    @property
    def _usage(self) -> dict[str, int]:
        prompt, output = self._num_prompt_tokens, self._text.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """A generation's events; its place is freed however the response ends."""

    def __init__(self, generation: Generation, include_usage: bool):
        super().__init__(generation.events(include_usage), media_type="text/event-stream")
        self._generation = generation

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.ticket.end("cancelled")


async def whole_unless_gone(request: Request, generation: Generation) -> Response:
    """The whole answer; a client that goes away before frees the place."""
    answer = asyncio.ensure_future(generation.whole())
    gone = asyncio.ensure_future(request.receive())  # the body is read: only a disconnect can come
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(answer.result()) if answer.done() else Response(status_code=499)
    except Failed as error:
        raise ApiError(500, str(error)) from error
    finally:
        answer.cancel()
        gone.cancel()
        generation.ticket.end("cancelled")


# ---- the application ------------------------------------------------------------------------------------


def create_app(service: Service, codec: Codec, model: str, api_key: str | None = None) -> FastAPI:
    """The HTTP application over a service.

    model: the name that clients ask for. api_key: what clients must show under /v1, None for no check;
    without one the policy cannot be changed from outside.
    """

    async def authorize(request: Request) -> None:
        shown = request.headers.get("Authorization", "").encode("latin-1")  # the header's bytes
        if api_key is not None and not secrets.compare_digest(shown, f"Bearer {api_key}".encode()):
            raise ApiError(401, "wrong or missing API key", code="invalid_api_key")

    def check_model(name: str) -> None:
        if name != model:
            message = f"there is no model {name!r}, this server has {model!r}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def answer(request: Request, body: GenerateBody, prompt: list[int], limit: int | None) -> Response:
        """Check what only the model can tell, take a place, and answer as a whole or as a stream."""
        check_model(body.model)
        if outside := [token for token in prompt if not 0 <= token < codec.vocab_size]:
            raise ApiError(400, f"prompt: token {outside[0]} is outside the vocabulary", param="prompt")
        if not prompt:
            raise ApiError(400, "the prompt is empty", param="prompt")
        service.check_ready()  # only the engine knows its context
        room = service.max_context - len(prompt)
        if (limit or 1) > room:
            message = (
                f"{len(prompt)} tokens of prompt and {limit or 1} of output are more than the "
                f"{service.max_context} tokens of this model's context"
            )
            raise ApiError(400, message, code="context_length_exceeded", param="prompt")
        temperature = 1.0 if body.temperature is None else body.temperature
        ticket = service.submit(prompt, limit or room, temperature, body.seed, bool(body.ignore_eos))
        generation = Generation(ticket, TextStream(codec, body.stops), body, len(prompt))
        if body.stream:
            return EventStream(generation, bool(body.stream_options and body.stream_options.include_usage))
        return await whole_unless_gone(request, generation)

    api = APIRouter(prefix="/v1", dependencies=[Depends(authorize)])
    card = {"id": model, "object": "model", "created": int(time.time()), "owned_by": "dcut"}

    @api.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @api.get("/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name)
        return card

    @api.post("/completions")
    async def completions(request: Request) -> Response:
        body = await parse(request, CompletionBody)
        text = body.prompt  # in a thread of its own: a long one must not hold up every stream
        prompt = await asyncio.to_thread(codec.encode, text) if isinstance(text, str) else text
        return await answer(request, body, prompt, body.limit)

    @api.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await parse(request, ChatBody)
        prompt = await asyncio.to_thread(codec.encode_chat, [message.plain for message in body.messages])
        return await answer(request, body, prompt, body.limit)

    @api.get("/policy")
    async def policy() -> dict[str, str]:
        return {"policy": service.policy}

    @api.post("/policy")
    async def change_policy(request: Request) -> dict[str, str]:
        if api_key is None:
            raise ApiError(403, "the policy can be changed only on a server that was started with --api-key")
        body = await parse(request, PolicyBody)
        service.change_policy(body.policy)
        return {"policy": service.policy}

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(api)

    @app.get("/health")
    async def health() -> dict[str, str]:
        service.check_ready()
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response

    @app.exception_handler(InputError)
    async def input_error(request: Request, error: InputError) -> Response:
        return ApiError(400, str(error)).response

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        return ApiError(503, str(error), retry=True).response

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}").response

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return ApiError(500, "the server failed to answer; see its log").response

    return app


# ---- the process ----------------------------------------------------------------------------------------


def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then finish what runs.

    Raises InputError or OSError where the models, the policy, the address or the place for the trace cannot
    be used; before anything slow is done wherever possible.
    """
    serveable(config.policy)
    directory = Path(config.target or weights.path("target"))
    codec = Codec.load(directory)
    if config.record and not empty(Path(config.record)):
        raise InputError(f"{config.record} is not empty: give another place")
    with listen(config.host, config.port) as listener:
        host = f"[{config.host}]" if ":" in config.host else config.host
        model = directory.name if config.target else "tiny-pair"
        print(f"http://{host}:{listener.getsockname()[1]} serves {model}: starting", flush=True)
        service = Service(lambda: build(config, directory, codec), config.policy, config.max_waiting)
        serve(service, create_app(service, codec, model, config.api_key), listener)


def build(config: Config, directory: Path, codec: Codec) -> tuple[Engine, Recorder | None]:
    """Load and measure the models: the engine, and what records it if asked to."""
    longest = int(read_config(directory).get("max_position_embeddings", CONTEXT))
    max_context = min(CONTEXT, longest) if config.max_context is None else config.max_context
    if max_context > longest:
        raise InputError(f"--max-context {max_context} is more than the model's {longest}")
    spec = config.drafter or weights.path("dflash16")
    verifier, drafter = open_pair(
        directory, spec, config.max_batch_size, max_context, config.device, config.dtype
    )
    policy = parse_policy(config.policy)
    policy.check_drafts(drafter.draft_length)
    prompts = [prompt.tokens for prompt in read_prompts(weights.PROMPTS, codec)]
    context = min(PROFILED_CONTEXT, max_context // 2)
    measured = cached_profile(verifier, drafter, prompts, context, budget_s=config.profile_s, progress=True)
    engine = Engine(verifier, drafter, DCut(), measured.cost, config.max_batch_size)
    # What compiles at its first use does so now, whether the profile was measured or found in the cache.
    engine.add(EngineRequest(0, prompts[0][:8], max_tokens=2))
    while engine.step():
        pass
    rehearse(policy, engine.draft_length, engine.cost)
    engine.policy = policy
    recorder = None
    if config.record:
        alone = open_drafter(spec, verifier.model, SLOTS + 1, max_context + drafter.draft_length)
        asked = {"temperature": None, "policy": config.policy, "batch_size": config.max_batch_size}
        meta = describe(verifier, drafter, directory, Path(spec).name) | asked
        dense = DensePass(verifier.model, alone, max_context)
        recorder = Recorder(config.record, dense, meta, measured.cost, every=None)
    print(f"{measured}; ready with policy {config.policy}", flush=True)
    return engine, recorder


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything slow is done; OSError where the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]  # what follows says the address again
        raise OSError(error.errno, f"cannot listen on port {port}: {reason}", host) from error


class Server(uvicorn.Server):
    """uvicorn's, which ends at once on a signal while there is nothing to finish, and on a second Ctrl-C."""

    def __init__(self, service: Service, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        again = self.should_exit and sig == signal.SIGINT
        if again or self._service.state == "starting":
            leave(sig)  # the thread that builds the engine cannot be told to end
        super().handle_exit(sig, frame)


def serve(service: Service, app: FastAPI, listener: socket.socket) -> None:
    """Run the service and its application until a signal or the engine's end; finish what runs.

    Raises what broke the engine, KeyboardInterrupt after SIGINT.
    """
    server = Server(service, app)
    # uvicorn has its own handlers while it runs, and raises the signal once more after that.
    for number in set(heeded()) - {signal.SIGINT}:
        signal.signal(number, server.handle_exit)
    service.start(on_end=lambda: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[listener])
    finally:
        with at_once():  # a further signal does not wait for what is still to be written
            service.close()
