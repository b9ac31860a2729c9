"""The connector's hooks as vLLM calls them, over real sockets. Needs vLLM; without it these tests are skipped."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402
    KVConnectorBase_V1,
    KVConnectorRole,
    supports_hma,
)

from kv_connector import ConfigError, InternalError  # noqa: E402
from kv_connector.vllm import KvConnector  # noqa: E402
from kv_connector.vllm.metrics import PromMetrics, Stats  # noqa: E402
from vllm_engine import PROMPT, TOKENS, Engine, a_request, aborted, cache_config, until, vllm_config  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))


def test_it_is_what_vllm_looks_for():
    assert issubclass(KvConnector, KVConnectorBase_V1) and supports_hma(KvConnector)
    assert not KvConnector.__abstractmethods__


def test_a_hand_over_ends_both_requests_transfers_in_the_step_that_heard_of_it():
    p, d = Engine("p"), Engine("d")
    p.cache[[4, 5, 6]] = np.arange(24, dtype=np.float32).reshape(3, TOKENS, 2)
    held, params = p.prefill("pr", PROMPT, [4, 5, 6])
    assert held and params["do_remote_prefill"] is True
    request, tokens = d.begin_load("dr", PROMPT, params, [9, 8, 7])
    assert tokens == len(PROMPT)
    until(lambda: p.sent == {"pr"} and d.received == {"dr"}, p, d)
    assert np.array_equal(d.cache[[9, 8, 7]], p.cache[[4, 5, 6]]) and not d.bad
    # Asked again after the load, as vLLM does, nothing remote is left.
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.scheduler.update_state_after_alloc(request, None, 0)
    request.status = SimpleNamespace(name="FINISHED_STOPPED")
    assert d.scheduler.request_finished_all_groups(request, ([9, 8, 7],)) == (False, None)
    assert len(d.stats.data["load_bytes"]) == 1 and d.stats.data["load_bytes"][0] == 3 * TOKENS * 8
    assert p.stats.data["leases_ended"] == {"confirmed": 1}
    until(lambda: not p.scheduler.has_pending_push_work() and not d.scheduler.has_pending_push_work(), p, d)


def test_blocks_that_are_here_are_not_loaded_again():
    p, d = Engine("p"), Engine("d")
    p.cache[:] = 1.0
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    _, tokens = d.begin_load("dr", PROMPT, params, [9, 8, 7], local_tokens=TOKENS)
    assert tokens == len(PROMPT) - TOKENS
    until(lambda: d.received == {"dr"}, p, d)
    assert not d.cache[9].any() and d.cache[[8, 7]].all()


def test_a_request_whose_whole_prompt_is_here_gives_the_offer_back():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request = a_request("dr", PROMPT, params)
    d.scheduler.on_new_request(request)
    d.scheduler.update_state_after_alloc(request, None, 0)
    assert d.scheduler.has_pending_push_work(), "P must hear of it although nothing runs"
    until(lambda: p.sent == {"pr"}, p, d)
    assert p.stats.data["leases_ended"] == {"released": 1} and not d.received


def test_an_abort_while_loading_is_reported_once_and_p_has_its_blocks_back():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request, _ = d.begin_load("dr", PROMPT, params, [9, 8, 7])
    # vLLM itself keeps the blocks of a request that it waits for.
    assert aborted(d, request) == (False, None)
    until(lambda: p.sent == {"pr"} and d.received == {"dr"}, p, d)


def test_an_abort_before_the_load_gives_the_offer_back():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request = a_request("dr", PROMPT, params)
    d.scheduler.on_new_request(request)
    assert aborted(d, request) == (False, None)
    until(lambda: p.sent == {"pr"}, p, d)
    assert not d.received


def test_an_aborted_prefill_holds_nothing():
    p = Engine("p")
    request = a_request("pr", PROMPT, {"do_remote_decode": True})
    p.scheduler.on_new_request(request)
    p.step()
    assert aborted(p, request) == (False, None)
    p.step()
    assert not p.sent


def test_a_load_from_a_dead_producer_ends_with_the_blocks_that_are_wrong():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    p.worker.shutdown()
    p.scheduler.shutdown()
    d.begin_load("dr", PROMPT, params, [3, 9, 8, 7], local_tokens=TOKENS)
    until(lambda: d.received == {"dr"}, d)
    assert d.bad == {9, 8}, "neither what was here nor what is for later tokens"
    assert sum(d.stats.data["loads_failed"].values()) == 1


def test_a_load_that_cannot_begin_ends_in_the_next_step():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    # Fewer blocks than the tokens need.
    d.begin_load("dr", PROMPT, params, [9, 8])
    d.step()
    assert d.received == {"dr"} and d.bad == {9, 8}
    until(lambda: p.sent == {"pr"}, p, d)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.pop("kv_connector"),
        lambda p: p.update(remote_port="x"),
        lambda p: p.update(remote_block_ids=[[-1]]),
        lambda p: p.update(do_remote_decode=True),
        lambda p: p.update(remote_num_tokens=10**9),
    ],
)
def test_parameters_that_cannot_be_are_computed_here_and_counted(spoil):
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    spoil(params)
    request, tokens = d.begin_load("dr", PROMPT, params, [9, 8, 7])
    assert tokens == 0
    d.step()
    assert d.stats.data["requests_refused"] == 1 and not d.received
    assert aborted(d, request) == (False, None)


def test_an_engine_does_what_its_role_says_and_no_more():
    p, d = Engine("p", role="kv_producer"), Engine("d", role="kv_consumer")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    assert p.begin_load("x", PROMPT, params, [9, 8, 7])[1] == 0
    assert d.prefill("y", PROMPT, [4, 5, 6]) == (False, None)


def test_requests_of_no_concern_cost_nothing():
    d = Engine("d")
    for params in (None, {}, {"other": 1}, {"do_remote_prefill": False, "do_remote_decode": False}):
        request, tokens = d.begin_load("r", PROMPT, params, [1])
        assert tokens == 0 and aborted(d, request) == (False, None)
    assert not d.scheduler.has_pending_push_work() and d.stats.data["requests_refused"] == 0


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lease_tll_ms": 5}, "lease_tll_ms is not known; known are advertise_host, checksums"),
        ({"lease_ttl_ms": -5}, "lease_ttl_ms"),
        ({"kv_lease_duration": 0}, "kv_lease_duration is 0"),
        ({"engine_id": "x"}, "engine_id belongs into kv_transfer_config"),
        ({"model": 5}, "model is 5"),
        ({"transport": "rdma"}, "rdma"),
        ({"rendezvous_port": 70000}, "rendezvous_port is 70000"),
        ({"rendezvous_wait_ms": 0}, "rendezvous_wait_ms is 0"),
    ],
)
def test_options_that_cannot_be_stop_the_start_by_name(extra, words):
    with pytest.raises(ConfigError, match=words):
        KvConnector(vllm_config("e", **extra), KVConnectorRole.SCHEDULER, cache_config())


def test_a_prompt_that_its_tokens_do_not_name_is_computed_here():
    d = Engine("d")
    _, params = Engine("p").prefill("pr", PROMPT, [4, 5, 6])
    for extra in ({"mm_features": ["a picture"]}, {"lora_request": "an adapter"}, {"prompt_embeds": "numbers"}):
        request = a_request("dr", PROMPT, params)
        request.__dict__.update(extra)
        d.scheduler.on_new_request(request)
        assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    d.step()
    assert d.stats.data["requests_refused"] == 3


@pytest.mark.parametrize("prompt", [[-1], [2**40], ["a"], [1.5], [None]])
def test_tokens_that_are_none_cost_their_request_alone(prompt):
    d = Engine("d")
    request = a_request("r", prompt, {"do_remote_decode": True})
    d.scheduler.on_new_request(request)
    assert aborted(d, request) == (False, None)
    d.step()
    assert d.stats.data["requests_refused"] == 1


def test_a_fault_of_ours_does_not_reach_vllms_loop():
    d = Engine("d")
    d.scheduler._scheduler._core = object()
    request = a_request("r", PROMPT, {"do_remote_decode": True})
    d.scheduler.on_new_request(request)
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert d.scheduler.has_pending_push_work() is False
    assert d.scheduler.build_connector_meta(None).plan is None


def test_what_a_step_must_tell_the_workers_outlives_a_fault_of_ours():
    d = Engine("d")
    side = d.scheduler._scheduler
    side._meta.leases[7] = "pr"

    class Faulty:
        def events(self):
            raise InternalError("a panic")

        def plan_step(self):
            raise InternalError("another")

    side._core = Faulty()
    assert d.scheduler.build_connector_meta(None).leases == {7: "pr"}


def test_a_worker_whose_thread_is_gone_ends_what_was_in_its_hands(monkeypatch):
    monkeypatch.setattr("kv_connector.vllm.worker_side.QUIET_AFTER_DEATH_S", 0.05)
    p, d = Engine("p"), Engine("d")
    held, params = p.prefill("pr", PROMPT, [4, 5, 6])
    assert held
    # As after a panic: the thread has ended, nobody asked for it here, and nothing is reported.
    p.core.shut_down(1.0)
    p.core.report()
    d.begin_load("dr", PROMPT, params, [9, 8, 7])
    d.core.shut_down(1.0)
    d.core.report()
    until(lambda: p.sent == {"pr"} and d.received == {"dr"}, p, d)
    assert d.bad == {9, 8, 7}


def test_before_weights_change_everything_that_is_lent_or_loaded_ends():
    p, d = Engine("p"), Engine("d")
    _, params = p.prefill("pr", PROMPT, [4, 5, 6])
    request = a_request("dr", PROMPT, params)
    d.scheduler.on_new_request(request)
    assert d.scheduler.reset_cache() is True
    assert d.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    _, again = p.prefill("pr2", PROMPT, [7, 8, 9])
    assert p.scheduler.reset_cache() is False, "a lease is being taken back"
    until(lambda: p.sent == {"pr", "pr2"}, p, d)
    assert p.scheduler.reset_cache() is True
    # And it works again.
    assert p.prefill("pr3", PROMPT, [4, 5, 6])[0]


def test_what_decides_the_meaning_of_bytes_is_in_the_fingerprint():
    from kv_connector.vllm.options import fingerprint

    def config(cache_dtype="auto", isa="vec", rope=1e4):
        attention = SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa=isa)
        hf_config = SimpleNamespace(to_dict=lambda: {"rope_theta": rope, "_name_or_path": str(time.time())})
        return SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            model_config=SimpleNamespace(dtype="bfloat16", hf_config=hf_config),
            compilation_config=SimpleNamespace(static_forward_context={"layer": attention}),
        )

    one = fingerprint("m", config(), ["layer"])
    assert one == fingerprint("m", config(), ["layer"])
    others = [config(cache_dtype="fp8_e5m2"), config(isa="amx"), config(rope=1e6)]
    assert len({one, *(fingerprint("m", other, ["layer"]) for other in others)}) == 4
    assert "CPU_ATTN/vec" in one and "kv_cache_dtype=auto" in one


def test_it_is_known_by_name_too():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert KVConnectorFactory.get_connector_class_by_name("KvConnector") is KvConnector


def test_the_stock_connectors_name_of_the_lease_is_taken():
    made = KvConnector(vllm_config("e", kv_lease_duration=12), KVConnectorRole.SCHEDULER, cache_config())
    assert made._options.config["lease_ttl_ms"] == made._options.config["lease_renewal_ms"] == 12_000


def test_models_of_several_groups_and_pipelines_are_refused_by_name():
    with pytest.raises(ConfigError, match="2 KV cache groups"):
        KvConnector(vllm_config("e"), KVConnectorRole.SCHEDULER, cache_config(2))
    config = vllm_config("e")
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2"):
        KvConnector(config, KVConnectorRole.SCHEDULER, cache_config())


def test_observations_of_ranks_and_intervals_add_up():
    one, two = Stats(), Stats()
    assert one.take() is None and one.is_empty()
    one.loaded(1_000_000, 0.5, 0.1)
    two.loaded(3_000_000, 1.5, 0.1)
    two.failed("lapsed")
    two.lease_ended("expired")
    two.refused()
    # As vLLM does, by way of plain data.
    total = KvConnector.build_kv_connector_stats(one.to_dict()).aggregate(Stats(two.to_dict()))
    said = total.reduce()
    assert said["loads"] == 2 and said["MB/s"] == 2.0 and said["MB per load"] == 2.0
    assert said["failed: lapsed"] == 1 and said["leases expired"] == 1 and said["requests refused"] == 1
    assert total.take() is not None and total.is_empty()


def test_prometheus_has_our_names_with_units():
    registry = CollectorRegistry()

    def bound(kind):
        return lambda **kwargs: kind(registry=registry, **kwargs)

    config = SimpleNamespace(kv_transfer_config=None)
    types = {Gauge: bound(Gauge), Counter: bound(Counter), Histogram: bound(Histogram)}
    metrics = PromMetrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    observed = Stats()
    observed.loaded(4096, 0.002, 0.001)
    observed.failed("peer_lost")
    observed.failed("other")
    observed.lease_ended("confirmed")
    metrics.observe(observed.to_dict(), 0)

    def value(name, **labels):
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0"} | labels)

    assert value("vllm:kv_connector_load_bytes_sum") == 4096
    assert value("vllm:kv_connector_load_seconds_count") == 1
    assert value("vllm:kv_connector_loads_failed_total", reason="peer_lost") == 1
    assert value("vllm:kv_connector_loads_failed_total", reason="other") == 1
    assert value("vllm:kv_connector_loads_failed_total", reason="lapsed") == 0
    assert value("vllm:kv_connector_leases_ended_total", end="confirmed") == 1


def test_the_measurement_of_a_step_runs(monkeypatch, capsys):
    import hooks

    monkeypatch.setattr(sys, "argv", ["hooks.py", "--requests", "3", "--steps", "20", "--prompt-tokens", "40"])
    hooks.main()
    assert "in flight at the end: 3 loads" in capsys.readouterr().out
