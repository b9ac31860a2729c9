"""A router that asks P and D at once: D asks P for the offer by name. Needs vLLM; without it these tests are skipped."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kv_connector import ConfigError  # noqa: E402
from vllm_engine import PROMPT, TOKENS, Engine, a_request, aborted, until  # noqa: E402


class Both(SimpleNamespace):
    """P and D, and a router that asks both at once."""

    def __init__(self, p=None, **options):
        p, d = Engine("p", rendezvous_port=0, **(p or {})), Engine("d", **options)
        super().__init__(p=p, d=d, address=f"http://127.0.0.1:{p.scheduler._scheduler._rendezvous.port}")

    def for_p(self):
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}

    def for_d(self, **more):
        params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": "x"}
        return params | {"remote_bootstrap_addr": self.address, "remote_engine_id": "p"} | more

    def ask_d(self, **more):
        request = a_request("dr", PROMPT, self.for_d(**more))
        self.d.scheduler.on_new_request(request)
        return request

    def prefill(self, end="FINISHED_LENGTH_CAPPED"):
        request = a_request("pr", PROMPT, self.for_p())
        self.p.scheduler.on_new_request(request)
        self.p.step()
        request.status = SimpleNamespace(name=end)
        held, _ = self.p.scheduler.request_finished_all_groups(request, ([4, 5, 6],))
        self.p.step()
        return held

    def matched(self, request):
        """What D is told once it need not wait."""
        told = []

        def asked():
            told.append(self.d.scheduler.get_num_new_matched_tokens(request, 0))
            return told[-1][0] is not None

        until(asked, self.d)
        return told[-1]


@pytest.mark.parametrize("first", ["p", "d"])
def test_asked_at_once_d_waits_for_ps_offer_and_loads_it(first):
    both = Both()
    both.p.cache[[4, 5, 6]] = np.arange(24, dtype=np.float32).reshape(3, TOKENS, 2)
    if first == "p":
        assert both.prefill()
    request = both.ask_d()
    if first == "d":
        assert both.d.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        assert both.prefill()
    assert both.matched(request) == (len(PROMPT), True)
    both.d.scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([9, 8, 7],)), len(PROMPT))
    until(lambda: both.p.sent == {"pr"} and both.d.received == {"dr"}, both.p, both.d)
    assert np.array_equal(both.d.cache[[9, 8, 7]], both.p.cache[[4, 5, 6]]) and not both.d.bad


def test_asked_at_once_a_prefill_that_ended_without_an_offer_makes_d_compute():
    both = Both()
    request = both.ask_d()
    assert not both.prefill(end="FINISHED_ABORTED")
    assert both.matched(request) == (0, False)
    both.d.step()
    assert both.d.stats.data["offers_missed"] == 1


def test_asked_at_once_d_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr("kv_connector.vllm.rendezvous.SILENT_S", 0.2)
    monkeypatch.setattr("kv_connector.vllm.rendezvous.UNKNOWN_S", 0.2)
    both = Both(rendezvous_wait_ms=700)
    # P has not heard of it; nobody is there; another engine is there; P never ends it.
    assert both.matched(both.ask_d()) == (0, False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        assert both.matched(both.ask_d(remote_bootstrap_addr=address)) == (0, False)
        # One that takes connections and says nothing.
        monkeypatch.setattr("kv_connector.vllm.rendezvous.ASK_S", 0.1)
        monkeypatch.setattr("kv_connector.vllm.rendezvous.LATE_S", 0.1)
        nobody.listen()
        mute = Both(rendezvous_wait_ms=700)
        assert mute.matched(mute.ask_d(remote_bootstrap_addr=address)) == (0, False)
    assert both.matched(both.ask_d(remote_engine_id="q")) == (0, False)
    both.p.scheduler.on_new_request(a_request("pr", PROMPT, both.for_p()))
    assert both.matched(both.ask_d()) == (0, False)
    both.d.step()
    assert both.d.stats.data["offers_missed"] == 4


def test_asked_at_once_a_client_that_left_gives_the_late_offer_back():
    both = Both()
    request = both.ask_d()
    assert aborted(both.d, request) == (False, None)
    assert not both.d.scheduler.has_pending_push_work(), "nothing is to be done while P computes"
    assert both.prefill()
    until(both.d.scheduler.has_pending_push_work)
    until(lambda: both.p.sent == {"pr"}, both.p, both.d)
    assert both.p.stats.data["leases_ended"] == {"released": 1} and not both.d.received
    until(lambda: not both.d.scheduler.has_pending_push_work(), both.d)


def test_asked_at_once_an_offer_is_told_no_longer_than_its_lease_lives():
    both = Both(p=dict(lease_ttl_ms=300, lease_renewal_ms=300))
    assert both.prefill()
    until(lambda: both.p.sent == {"pr"}, both.p)
    assert both.matched(both.ask_d()) == (0, False)
    # Nor after the blocks have lost their meaning, nor in place of a later one of the same name.
    other = Both()
    assert other.prefill()
    other.p.scheduler.reset_cache()
    assert other.matched(other.ask_d()) == (0, False)
    other.d.step()
    assert other.d.stats.data["offers_missed"] == 1
    again = a_request("pr2", PROMPT, other.for_p())
    other.p.scheduler.on_new_request(again)
    request = other.ask_d()
    assert other.d.scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    other.p.step()
    again.status = SimpleNamespace(name="FINISHED_LENGTH_CAPPED")
    other.p.scheduler.request_finished_all_groups(again, ([4, 5, 6],))
    other.p.step()
    assert other.matched(request) == (len(PROMPT), True)


@pytest.mark.parametrize(
    "answer",
    [
        {"state": "offered", "kv_transfer_params": {"do_remote_decode": True}},
        {"state": "offered", "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}},
        {"state": "offered", "kv_transfer_params": [1]},
        {"state": "other"},
        {"state": "promised"},
        [1, 2],
    ],
)
def test_asked_at_once_a_stranger_that_answers_anything_costs_its_request_a_limit(answer):
    body = json.dumps(answer | {"engine_id": "p"} if isinstance(answer, dict) else answer).encode()
    asked = []

    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(time.monotonic())
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stranger)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        both = Both(rendezvous_wait_ms=600)
        request = both.ask_d(remote_bootstrap_addr=f"http://127.0.0.1:{server.server_port}")
        assert both.matched(request) == (0, False)
        # It is asked again with pauses, whatever it does.
        assert 1 <= len(asked) <= 8
        # And D has become no producer by it.
        request.status = SimpleNamespace(name="FINISHED_STOPPED")
        assert both.d.scheduler.request_finished_all_groups(request, ([1, 2, 3],)) == (False, None)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "spoil",
    [
        {"transfer_id": 5},
        {"transfer_id": ""},
        {"transfer_id": "x" * 300},
        {"transfer_id": "a\nb"},
        {"remote_bootstrap_addr": 5},
        {"remote_bootstrap_addr": "http://"},
        {"remote_bootstrap_addr": "file:///etc/passwd"},
        {"remote_bootstrap_addr": "http://host:99999999"},
        {"remote_bootstrap_addr": "http://name:word@host:80"},
        {"remote_bootstrap_addr": "http://host:80/admin/shutdown"},
    ],
)
def test_names_and_addresses_that_cannot_be_are_computed_here(spoil):
    both = Both()
    assert both.matched(both.ask_d(**spoil)) == (0, False)
    both.d.step()
    assert both.d.stats.data["requests_refused"] == 1 and both.d.stats.data["offers_missed"] == 0


def test_the_port_that_offers_are_told_at_answers_as_routers_expect_and_bears_garbage():
    both = Both()
    with urllib.request.urlopen(both.address + "/query") as answer:
        assert json.load(answer)["0"]["engine_id"] == "p"
    for path in ("/offers/..%2f..%2fx", "/offers/" + "y" * 5000, "/nothing", "/offers/%ff"):
        try:
            urllib.request.urlopen(both.address + path).read()
        except urllib.error.HTTPError as error:
            assert error.code < 500
    with socket.create_connection(("127.0.0.1", both.p.scheduler._scheduler._rendezvous.port)) as raw:
        raw.sendall(b"\x00\xff garbage\r\n\r\n")
        raw.recv(100)
    assert both.prefill()
    assert both.matched(both.ask_d()) == (len(PROMPT), True)


def test_a_port_that_is_taken_stops_the_start_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"rendezvous_port is {port}, which cannot be bound"):
            Engine("p", rendezvous_port=port)
