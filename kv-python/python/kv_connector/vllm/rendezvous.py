"""For routers that ask P and D at once: D has a name for the hand-over and P's address, and asks P for the offer by that name.

Such routers put a `transfer_id` into both requests' `kv_transfer_params`, and into D's also `remote_bootstrap_addr`, an
`http://host:port` of P; vLLM's example proxy for its Mooncake connector is one, and asks `/query` there which engine it is.
One thread with an event loop serves all of it; the scheduler's hooks only look into dictionaries.
"""

import asyncio
import itertools
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from .. import ConfigError
from .log import log

NAME_CHARS_MAX = 256
ANSWER_BYTES_MAX = 4 << 20
PROMISES_MAX = 100_000
# Questions of this engine that are under way at a time; the others wait, within their limit.
ASKING_MAX = 256
# A connection to P's port that says nothing is closed after so long.
QUIET_CONNECTION_S = 10.0
# P holds an asked question so long; then D asks again.
ASK_S = 2.0
# An answer may be so late before D asks again.
LATE_S = 2.0
AGAIN_S = 0.1
# So long P may not answer, or not know of the hand-over, before D computes.
SILENT_S = 5.0
UNKNOWN_S = 10.0
START_S = 10.0


@dataclass(frozen=True)
class Offered:
    """P has computed the prompt."""

    params: dict[str, Any]


@dataclass(frozen=True)
class Missed:
    """There will be no offer."""

    why: str


class Promise:
    """What P says of one hand-over: nothing yet, an offer, or why there is none. Only an answer has an end: a prefill that
    is queued for long is still to come."""

    def __init__(self) -> None:
        self.until = math.inf
        self.answer: Offered | Missed | None = None
        self.told = asyncio.Event()


def name_of(params: dict[str, Any]) -> str | None:
    """The hand-over's name in a request's parameters; None if there is none. Raises ValueError if it cannot be one."""
    name = params.get("transfer_id")
    if name is None:
        return None
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX or not name.isprintable():
        raise ValueError(f"transfer_id is {str(name)[:40]!r}, which is no name of 1 to {NAME_CHARS_MAX} characters")
    return name


def address_of(params: dict[str, Any]) -> str | None:
    """Where D asks for an offer that did not come along; None if it is not to ask. Raises ValueError if it cannot be one."""
    address = params.get("remote_bootstrap_addr")
    if address is None or params.get("remote_block_ids"):
        return None
    problem = f"remote_bootstrap_addr is {str(address)[:80]!r}, which is not http://host:port"
    if not isinstance(address, str) or len(address) > 512:
        raise ValueError(problem)
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError as error:
        raise ValueError(problem) from error
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/") or parts.username is not None:
        raise ValueError(problem)
    return f"http://{parts.netloc}"


class Rendezvous:
    """P's answers and D's questions. Any thread may call; no call but the first waits for anything.

    `port` None: this engine asks, and is not asked. Raises ConfigError if the port cannot be bound.
    """

    def __init__(self, engine_id: str, host: str, port: int | None, keep_s: float, wait_s: float) -> None:
        self._engine_id = engine_id
        self._keep_s = keep_s
        self._wait_s = wait_s
        self._promises: dict[str, Promise] = {}
        # By question: None while P is asked.
        self._answers: dict[int, Offered | Missed | None] = {}
        self._questions = itertools.count()
        self._room = asyncio.Semaphore(ASKING_MAX)
        self._asking: set[asyncio.Task[None]] = set()
        self._session: ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.port: int | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-rendezvous", daemon=True)
        self._thread.start()
        if port is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(self._listen(host, port), self._loop).result(START_S)
        except (OSError, OverflowError, TimeoutError) as error:
            self.close()
            raise ConfigError(
                f"kv_connector_extra_config: rendezvous_port is {port}, which cannot be bound at {host}: {error}"
            ) from error

    # ---- P

    def promise(self, name: str) -> None:
        """A request came whose offer may be asked for by this name. What was said of a former one of that name is void."""

        def promised() -> None:
            former = self._promises.get(name)
            if former is not None and former.answer is not None:
                del self._promises[name]
            self._known(name)

        self._on_loop(promised)

    def keep(self, name: str, answer: Offered | Missed) -> None:
        """The request has ended; this is what whoever asks gets."""

        def told() -> None:
            promise = self._known(name)
            promise.answer = answer
            promise.until = time.monotonic() + self._keep_s
            # At its end again, so that the oldest stand first.
            self._promises[name] = self._promises.pop(name)
            promise.told.set()

        self._on_loop(told)

    def withdraw(self, why: str) -> None:
        """What was offered so far cannot be read any more."""

        def withdrawn() -> None:
            for promise in self._promises.values():
                if isinstance(promise.answer, Offered):
                    promise.answer = Missed(why)

        self._on_loop(withdrawn)

    def _known(self, name: str) -> Promise:
        now = time.monotonic()
        for other in [other for other, promise in self._promises.items() if promise.until <= now]:
            del self._promises[other]
        while len(self._promises) >= PROMISES_MAX:
            del self._promises[next(iter(self._promises))]
        return self._promises.setdefault(name, Promise())

    async def _listen(self, host: str, port: int) -> None:
        app = web.Application()
        app.router.add_get("/query", self._query)
        app.router.add_get("/offers/{name}", self._offer)
        self._runner = web.AppRunner(app, access_log=None, keepalive_timeout=QUIET_CONNECTION_S, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _query(self, _: web.Request) -> web.Response:
        # One engine a port, which such routers call data parallel rank 0.
        return web.json_response({"0": {"engine_id": self._engine_id, "worker_addr": {}}})

    async def _offer(self, request: web.Request) -> web.Response:
        promise = self._promises.get(request.match_info["name"])
        said: dict[str, Any] = {"engine_id": self._engine_id}
        if promise is not None and promise.answer is None:
            try:
                await asyncio.wait_for(promise.told.wait(), ASK_S)
            except TimeoutError:
                pass
        if promise is None:
            # A request that is still on its way to P is not known either.
            await asyncio.sleep(AGAIN_S)
            said["state"] = "unknown"
        elif promise.answer is None:
            said["state"] = "promised"
        elif promise.until <= time.monotonic():
            said |= {"state": "missed", "why": "its offer has ended"}
        elif isinstance(promise.answer, Offered):
            said |= {"state": "offered", "kv_transfer_params": promise.answer.params}
        else:
            said |= {"state": "missed", "why": promise.answer.why}
        return web.json_response(said)

    # ---- D

    def ask(self, name: str, address: str, engine_id: str | None) -> int:
        """Begins to ask for an offer. What is returned is the question, of which `answer` says what came; some seconds after
        `wait_s` at the latest."""
        question = next(self._questions)
        self._answers[question] = None

        def begin() -> None:
            task = self._loop.create_task(self._ask(question, name, address, engine_id))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

        if not self._on_loop(begin):
            self._answers[question] = Missed("the engine ends")
        return question

    def answer(self, question: int) -> Offered | Missed | None:
        """None while P is asked. Once an answer was returned it is forgotten."""
        answer = self._answers.get(question, Missed("nobody asks for it"))
        if answer is not None:
            self._answers.pop(question, None)
        return answer

    def has_answer(self, question: int) -> bool:
        return self._answers.get(question) is not None

    async def _ask(self, question: int, name: str, address: str, engine_id: str | None) -> None:
        answer: Offered | Missed = Missed("asking for it failed")
        try:
            async with asyncio.timeout(self._wait_s), self._room:
                answer = await self._asked(name, address, engine_id)
        except TimeoutError:
            answer = Missed(f"{address} has no offer within {self._wait_s:.0f} s")
        except Exception as error:  # Whatever it is, the request must not wait for it.
            log.exception("asking %s for %s", address, name)
            answer = Missed(str(error))
        finally:
            if question in self._answers:
                self._answers[question] = answer

    async def _asked(self, name: str, address: str, engine_id: str | None) -> Offered | Missed:
        if self._session is None:
            self._session = ClientSession(
                timeout=ClientTimeout(total=ASK_S + LATE_S), connector=TCPConnector(limit=0), auto_decompress=False
            )
        begun = heard = time.monotonic()
        while (now := time.monotonic()) < begun + self._wait_s:
            try:
                said = await self._asked_once(f"{address}/offers/{quote(name, safe='')}")
            except (ClientError, TimeoutError, OSError, ValueError) as error:
                if time.monotonic() > heard + SILENT_S:
                    return Missed(f"no answer from {address} within {SILENT_S:.0f} s: {error!r:.200}")
                await asyncio.sleep(AGAIN_S)
                continue
            heard = time.monotonic()
            if engine_id is not None and said.get("engine_id") != engine_id:
                return Missed(f"engine {engine_id} is wanted, but {str(said.get('engine_id'))[:80]} is at {address}")
            match said.get("state"):
                case "offered" if _is_offer(said.get("kv_transfer_params")):
                    return Offered(said["kv_transfer_params"])
                case "missed":
                    return Missed(f"the producer says: {str(said.get('why'))[:200]}")
                case "promised":
                    pass
                case "unknown":
                    if now > begun + UNKNOWN_S:
                        return Missed(f"{address} has not heard of it within {UNKNOWN_S:.0f} s")
                case other:
                    return Missed(f"{address} answers something else: state is {str(other)[:40]!r}")
            # P holds the question for a while; one that does not must not be asked without a pause.
            await asyncio.sleep(AGAIN_S)
        return Missed(f"{address} has no offer within {self._wait_s:.0f} s")

    async def _asked_once(self, url: str) -> dict[str, Any]:
        assert self._session is not None
        async with self._session.get(url, allow_redirects=False) as answer:
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > ANSWER_BYTES_MAX:
                    raise ValueError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            said = json.loads(body)
            if not isinstance(said, dict):
                raise ValueError("an answer that is no object")
            return said

    # ---- end

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(START_S)
        except Exception:  # Whatever it is, the thread must end.
            log.exception("questions for offers did not end well")
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(START_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _close(self) -> None:
        for promise in self._promises.values():
            promise.answer = promise.answer or Missed("the engine ends")
            promise.told.set()
        for task in list(self._asking):
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    def _on_loop(self, call: Callable[[], Any]) -> bool:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop has ended with the engine.
            return False
        return True


def _is_offer(params: Any) -> bool:
    """Whether these are parameters of a request that is to be loaded, and nothing else."""
    return isinstance(params, dict) and params.get("do_remote_prefill") is True and not params.get("do_remote_decode")
