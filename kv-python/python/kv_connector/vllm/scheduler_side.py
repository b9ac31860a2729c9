"""The half in vLLM's scheduler process: policy is the native core's, this is the translation of hooks."""

from typing import Any

from .. import Identity, InternalError, KvConnectorError, LoadEnded, SchedulerCore, WorkersSilent
from .log import Limited, log
from .meta import Handshake, Loading, Reports, StepMeta
from .metrics import Stats
from .options import Options
from .rendezvous import Missed, Offered, Rendezvous, address_of, name_of

# Ends after which a request's blocks hold its prompt.
GOOD_ENDS = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")


class SchedulerSide:
    """One per engine. Every hook answers at once."""

    def __init__(self, options: Options, block_tokens: int) -> None:
        self._options = options
        self._block_tokens = block_tokens
        self._core: SchedulerCore | None = None
        # What a request is to us, from its arrival to its end.
        self._roles: dict[str, str] = {}
        self._local_tokens: dict[str, int] = {}
        self._meta = StepMeta()
        self._stats = Stats()
        self._limited = Limited()
        self._rendezvous = Rendezvous(
            options.config["engine_id"],
            options.config.get("handshake_host", "127.0.0.1"),
            options.rendezvous_port,
            options.keep_offers_s,
            options.rendezvous_wait_s,
        )
        # Producers' requests whose offer may be asked for, and the name they have for it.
        self._promised: dict[str, str] = {}
        # Consumers' requests that wait for an offer, and those that ended meanwhile: theirs is to be given back.
        self._awaited: dict[str, int] = {}
        self._left: dict[int, Any] = {}
        if self._rendezvous.port is not None:
            log.info("offers are told by name at port %d", self._rendezvous.port)

    # ---- start and end

    def publish(self, handshakes: dict[int, Handshake]) -> None:
        """The workers have registered their caches: consumers can shake hands from now on."""
        if self._core is not None:
            # Leases and loads of the first one would be lost, and its port is taken.
            log.warning("the workers' cards came a second time; the first ones stay")
            return
        cards = [handshakes[rank].card for rank in sorted(handshakes)]
        identity = Identity.from_bytes(handshakes[min(handshakes)].identity)
        self._core = SchedulerCore(self._options.config, identity, cards)
        log.info(
            "engine %s, life %s, listens for handshakes at port %d",
            identity.engine_id,
            identity.incarnation,
            self._core.handshake_port,
        )

    def shut_down(self) -> None:
        self._rendezvous.close()
        self._core = None

    # ---- requests

    def arrived(self, request: Any) -> None:
        params = request.kv_transfer_params
        if not params or self._core is None:
            return
        wants = params.get("do_remote_prefill") if isinstance(params, dict) else True
        serves = params.get("do_remote_decode") if isinstance(params, dict) else True
        if not (wants or serves):
            return
        try:
            name, address = (name_of(params), address_of(params)) if isinstance(params, dict) else (None, None)
        except ValueError as error:
            self._refused(request, str(error))
            return
        if serves and name is not None:
            self._promised[request.request_id] = name
            self._rendezvous.promise(name)
        if (wants and not self._options.consumes) or (serves and not self._options.produces):
            role = "kv_consumer" if wants else "kv_producer"
            self._refused(request, f"this engine's kv_role is not {role}")
            return
        why = _not_told_by_tokens(request)
        if why:
            self._refused(request, why)
            return
        if wants and name is not None and address is not None:
            engine_id = params.get("remote_engine_id")
            wanted = str(engine_id) if engine_id is not None else None
            self._awaited[request.request_id] = self._rendezvous.ask(name, address, wanted)
            return
        self._admit(request, params)

    def _admit(self, request: Any, params: Any) -> None:
        assert self._core is not None
        try:
            role = self._core.request_arrived(request.request_id, request.prompt_token_ids, params)
        except (KvConnectorError, OverflowError, TypeError, ValueError) as error:
            self._refused(request, str(error))
            return
        if role != "plain":
            self._roles[request.request_id] = role

    def _refused(self, request: Any, why: str) -> None:
        self._stats.refused()
        self._told(request.request_id, Missed(why))
        self._limited.warning("refused", "request %s is computed here: %s", request.request_id, why)

    def _told(self, request: str, answer: Offered | Missed) -> None:
        """Whoever asks for the offer of a producer's request gets this from now on."""
        name = self._promised.pop(request, None)
        if name is not None:
            self._rendezvous.keep(name, answer)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self._awaited:
            answer = self._rendezvous.answer(self._awaited[request.request_id])
            if answer is None:
                # vLLM asks again in its next step.
                return None, False
            del self._awaited[request.request_id]
            self._answered(request, answer)
        if self._core is None or self._roles.get(request.request_id) != "consumer":
            return 0, False
        tokens = self._core.remote_tokens(request.request_id, computed_tokens)
        # A request that was preempted may know more tokens than its prompt had; never fewer.
        tokens = min(tokens, max(0, request.num_tokens - computed_tokens))
        self._local_tokens[request.request_id] = computed_tokens
        return tokens, tokens > 0

    def _answered(self, request: Any, answer: Offered | Missed) -> None:
        if self._core is None:
            return
        if isinstance(answer, Offered):
            self._admit(request, answer.params)
            return
        self._stats.missed()
        self._limited.warning("missed", "request %s is computed here: %s", request.request_id, answer.why)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        name = request.request_id
        if self._core is None or self._roles.get(name) != "consumer":
            return
        if external_tokens == 0:
            # All of it is here, or another connector brings it: what was offered is given back. After a load there is
            # nothing left to give back.
            self._core.request_declined(name)
            return
        groups = tuple(list(group) for group in blocks.get_block_ids())
        local_tokens = self._local_tokens.get(name, 0)
        first = local_tokens // self._block_tokens
        # A last block may be there for tokens that are still to come.
        count = -(-(local_tokens + external_tokens) // self._block_tokens)
        loading = Loading(name, tuple(group[first:count] for group in groups))
        try:
            load = self._core.blocks_allocated(name, local_tokens, external_tokens, groups)
        except (KvConnectorError, OverflowError, TypeError, ValueError) as error:
            load = None
            self._limited.warning("not begun", "load of request %s cannot begin: %s", name, error)
        if load is not None:
            self._meta.loads[load] = loading
            return
        # vLLM waits for it, so that its end must be told.
        self._meta.refused.append(loading)
        self._core.request_declined(name)

    def finished(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        role = self._roles.pop(name, None)
        self._local_tokens.pop(name, None)
        question = self._awaited.pop(name, None)
        if question is not None:
            self._left[question] = request
        params = None
        try:
            held, params = self._ended_as(role, request, blocks)
        finally:
            self._told(name, Offered(params) if params else Missed("it ended without an offer"))
        return held, params

    def _ended_as(
        self, role: str | None, request: Any, blocks: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        name = request.request_id
        if self._core is None or role is None:
            return False, None
        try:
            if request.status.name in GOOD_ENDS:
                end = self._core.request_finished(name, request.num_computed_tokens, [list(g) for g in blocks])
            else:
                end = self._core.request_aborted(name)
        except InternalError:
            # A lease may have been granted: rather blocks that stay held than blocks that are read by two.
            log.exception("the end of request %s was not taken", name)
            return role == "producer", None
        if end.lease is None:
            # Blocks that a load still writes are kept by vLLM itself, until the load's end is reported.
            return False, end.params
        self._meta.leases[end.lease] = name
        return True, end.params

    # ---- steps

    def step(self) -> StepMeta:
        # Whatever else fails, workers must hear of what vLLM waits for.
        meta, self._meta = self._meta, StepMeta()
        if self._core is None:
            return meta
        try:
            self._give_back_late_offers()
            self._take_events()
            meta.plan = self._core.plan_step()
        except Exception as error:  # Of whatever kind: what was begun must reach the workers.
            # A plan that could not be made stays in the core, and goes out with the next step.
            self._limited.warning("plan", "the plan of a step could not be made: %s", error)
        return meta

    def _give_back_late_offers(self) -> None:
        for question in [question for question in self._left if self._rendezvous.has_answer(question)]:
            request = self._left.pop(question)
            answer = self._rendezvous.answer(question)
            if not isinstance(answer, Offered) or self._core is None:
                continue
            # Its own id may be in use again by now.
            alias = f"{request.request_id} left-{question}"
            try:
                self._core.request_arrived(alias, request.prompt_token_ids, answer.params)
                self._core.request_aborted(alias)
            except (KvConnectorError, OverflowError, TypeError, ValueError) as error:
                self._limited.warning("left", "a late offer could not be given back: %s", error)

    def _take_events(self) -> None:
        for event in self._core.events() if self._core is not None else ():
            if isinstance(event, LoadEnded):
                self._ended(event)
            elif isinstance(event, WorkersSilent):
                log.error("workers %s have not reported the end of %s", event.missing, event.hold)

    def _ended(self, event: LoadEnded) -> None:
        if not event.loaded:
            self._limited.warning(
                event.reason,
                "load of request %s failed: %s (%s); the first %d tokens are good",
                event.request,
                event.reason,
                event.detail,
                event.valid_tokens,
            )

    def heard(self, output: Any) -> None:
        reports = output.kv_connector_worker_meta
        if self._core is None or not isinstance(reports, Reports):
            return
        for report in reports.reports:
            try:
                self._core.take_report(report)
            except KvConnectorError as error:
                self._limited.warning("report", "a worker's report was refused: %s", error)
        # Before vLLM asks again for a request whose load has failed: another producer may have the same.
        self._take_events()

    def has_work(self) -> bool:
        """Whether something must be carried although no request runs."""
        meta = self._meta
        waiting = bool(meta.loads or meta.leases or meta.refused)
        waiting = waiting or any(self._rendezvous.has_answer(question) for question in self._left)
        return waiting or (self._core is not None and self._core.has_plan())

    def take_stats(self) -> Stats | None:
        return self._stats.take()

    def reset(self) -> bool:
        """Blocks are about to mean something else: offers go back, loads are cancelled, leases are taken back. Whether
        nothing is left; what is left ends within moments."""
        if self._core is None:
            return True
        self._rendezvous.withdraw("the blocks have lost their meaning")
        self._core.drain(0.0)
        self._core.resume()
        return self._core.stats()["holds"] == 0

    def counters(self) -> dict[str, Any]:
        """The native core's counters; empty before the workers have started."""
        return self._core.stats() if self._core is not None else {}


def _not_told_by_tokens(request: Any) -> str | None:
    """Why the tokens of a prompt do not say what its KV is; None if they do. An offer names a prompt by its tokens."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "its prompt is not made of tokens alone"
    if getattr(request, "prompt_is_token_ids", None) is not None:
        return "its prompt is not made of tokens alone"
    if getattr(request, "mm_features", None):
        return "its prompt has pictures or sounds, which its tokens do not name"
    if getattr(request, "lora_request", None) is not None:
        return "it uses an adapter, which its tokens do not name"
    return None
