#!/usr/bin/env python3
"""Real vLLM (its CPU build) as a prefill engine P and a decode engine D, with a proxy between them, all on 127.0.0.1: D's
greedy tokens are compared with those of one engine that has no connector. Prints PASS or FAIL and exits 0 or 1.

  python pd_run.py --model DIR                                    # our connector
  python pd_run.py --model DIR --connector NixlConnector --module-path ''  # the stock one
  python pd_run.py --model DIR --negative-control                 # must see wrong tokens: proves that the check bites
  python pd_run.py --model DIR --fault kill-p --policy recompute  # P dies in the middle

README.md beside this file has the steps and the meaning of each check.
"""

import argparse
import asyncio
import hashlib
import json
import os
import signal
import sys
import time
import urllib.request

from edge import bad_input, edge_cases
from engines import Engine, Router, cpu_s, free_ports, msum, pss_mib, threads_cpu_s, tree
from load import KINDS, drive, judge, make_prompts, show


async def reference(a, prompts, engines):
    key = hashlib.sha256(
        json.dumps([prompts, a.max_tokens, a.dtype, a.block_size, a.max_batched, a.kv_blocks]).encode()
        + open(os.path.join(a.model, "model.safetensors"), "rb").read()
    ).hexdigest()[:24]
    path = os.path.join(a.logs, f"ref-{key}.json")
    if os.path.exists(path) and not a.fresh_reference:
        print(f"reference tokens: from {os.path.basename(path)}")
        return json.load(open(path))
    print("reference: one engine, no connector")
    e = Engine("ref", a, *free_ports(2))
    engines.append(e.start())
    e.wait()
    await drive(e.url, prompts[:1], a, 1)  # warm up
    one_by_one, wall1 = await drive(e.url, prompts, a, 1)
    show("one at a time", one_by_one, wall1)
    together, wall2 = await drive(e.url, prompts, a, a.concurrency)
    show(f"{a.concurrency} at a time", together, wall2)
    e.stop()
    bad = [r[1] for r in one_by_one + together if r[1]]
    if bad:
        raise SystemExit(f"FAIL: the reference engine gave errors: {bad[:3]}")
    want = [r[0] for r in one_by_one]
    same = sum(r[0] == w for r, w in zip(together, want))
    print(
        f"  reference is the same one at a time and {a.concurrency} at a time for {same}/{len(want)} prompts; "
        f"{len({tuple(w) for w in want})} different answers"
    )
    if same != len(want):
        print("  WARNING: greedy tokens depend on the batch; use --concurrency 1 or --dtype float32")
    json.dump(want, open(path, "w"))
    return want


def settle(e, seconds, what):
    """Seconds until the engine's KV usage is 0, or None."""
    t0 = time.time()
    while time.time() - t0 < seconds:
        m = e.metrics()
        use = [v for k, v in m.items() if k.startswith("vllm:kv_cache_usage_perc")]
        if use and max(use) == 0:
            return time.time() - t0
        # NIXL-style connectors free expired blocks only inside an engine step: make one.
        try:
            urllib.request.urlopen(
                urllib.request.Request(
                    e.url + "/v1/completions",
                    json.dumps(dict(model="m", prompt=[5, 6, 7], max_tokens=1)).encode(),
                    {"content-type": "application/json"},
                ),
                timeout=30,
            ).read()
        except OSError:
            pass
        time.sleep(0.5)
    return None


async def main_async(a, engines):
    from aiohttp import web
    from proxy import PDProxy

    prompts = make_prompts(a)
    want = await reference(a, prompts, engines)
    report = dict(connector=a.connector, module=a.module_path, fault=a.fault, policy=a.policy)

    def kv(role, extra):
        c = dict(
            kv_connector=a.connector,
            kv_role=role,
            kv_load_failure_policy=a.policy,
            kv_buffer_device="cpu",
            kv_connector_extra_config={**json.loads(a.extra), **json.loads(extra)},
        )
        if a.module_path:
            c["kv_connector_module_path"] = a.module_path
        return c

    ports = free_ports(6)
    meet = a.at_once or bool(a.router)
    if meet:
        a.p_extra = json.dumps({"rendezvous_port": ports[5], **json.loads(a.p_extra)})
    print(
        f"P/D pair: {a.connector}{' from ' + a.module_path if a.module_path else ' (registered in vLLM)'}, "
        f"policy {a.policy}"
    )
    P = Engine("P", a, ports[0], ports[1], kv(a.p_role, a.p_extra))
    D = Engine("D", a, ports[2], ports[3], kv(a.d_role, a.d_extra))
    engines += [P.start(), D.start()]
    P.wait()
    D.wait()

    trace, state = [], dict(n=0, done=False, extra=[])
    at = a.prompts // 2
    slots = asyncio.Event()

    async def after_prefill(rid, params):
        if a.fault == "none" or not rid.startswith("q"):
            return
        state["n"] += 1
        if state["n"] == at and not state["done"]:
            state["done"] = True
            print(
                f"  fault {a.fault} after prefill {at}, D request not sent yet", flush=True
            ) if a.fault_delay_ms < 0 else None
            if a.fault in ("kill-p", "stop-p") and a.fault_delay_ms < 0:
                P.signal_all(signal.SIGKILL if a.fault == "kill-p" else signal.SIGSTOP)
                await asyncio.sleep(0.2)
            if a.fault == "kill-d":
                D.signal_all(signal.SIGKILL)
            slots.set()

    def after_decode_sent(rid):
        if a.fault in ("kill-p", "stop-p") and a.fault_delay_ms >= 0 and slots.is_set() and not state["extra"]:
            state["extra"].append(1)

            def hit():
                print(f"  fault {a.fault} {a.fault_delay_ms} ms after D's request {at}", flush=True)
                P.signal_all(signal.SIGKILL if a.fault == "kill-p" else signal.SIGSTOP)

            asyncio.get_running_loop().call_later(a.fault_delay_ms / 1e3, hit)

    at_once = [f"http://127.0.0.1:{ports[5]}"] if meet else []
    proxy = PDProxy([P.url], [D.url], after_prefill, after_decode_sent, a.hang_limit, a.prefill_timeout, trace, at_once)
    runner = web.AppRunner(proxy.app())
    await runner.setup()
    url = f"http://127.0.0.1:{ports[4]}"
    if a.router:
        print(f"  router: {os.path.basename(a.router)}, as it is, which asks P and D at once")
        engines.append(Router(a, P, D, ports[4], ports[5]).start())
        engines[-1].wait()
    else:
        await web.TCPSite(runner, "127.0.0.1", ports[4]).start()
    checks = []
    try:
        warm, _ = await drive(
            url, [[9] * (a.block_size * 2 + 3)], argparse.Namespace(**{**vars(a), "max_tokens": 2}), 1
        )
        print(f"  warm-up: {warm[0][1] or 'ok'}, {warm[0][3] * 1e3:.0f} ms (has the handshake)")
        state["n"] = 0
        pids = {e.name: tree(e.proc.pid) for e in (P, D)}
        c0, t0 = {n: cpu_s(p) for n, p in pids.items()}, time.time()
        o0 = {n: threads_cpu_s(p, "kv-") for n, p in pids.items()}
        await asyncio.sleep(a.idle_s)
        idle = {n: (cpu_s(p) - c0[n]) / (time.time() - t0) for n, p in pids.items()}
        ours = {n: (threads_cpu_s(p, "kv-") - o0[n]) / (time.time() - t0) for n, p in pids.items()}
        print("  of it in the connector's own threads: " + ", ".join(f"{n} {v:.3f}" for n, v in ours.items()))
        report["idle_cores_own_threads"] = ours
        print("  idle CPU (cores): " + ", ".join(f"{n} {v:.2f}" for n, v in idle.items()))
        report["idle_cores"] = idle
        before = D.metrics()
        c0 = {n: cpu_s(p) for n, p in pids.items()}
        res, wall = await drive(url, prompts, a, a.concurrency)
        report["load"] = show("through the proxy", res, wall)
        if a.fault == "none":
            used = {n: cpu_s(p) - c0[n] for n, p in pids.items()}
            report["cpu_s"] = used
            print("  CPU seconds under load: " + ", ".join(f"{n} {v:.2f}" for n, v in used.items()))
        for n in range(1, a.repeat):
            more, wall = await drive(url, prompts, a, a.concurrency)
            show(f"again ({n + 1})", more, wall)
            res += more
        prompts, want = prompts * a.repeat, want * a.repeat
        verdict = judge(res, want)
        report["verdict"] = verdict
        count = {k: verdict.count(k) for k in KINDS}
        print("  tokens vs reference:", ", ".join(f"{v} {k}" for k, v in count.items()), flush=True)
        for i, (v, r) in enumerate(zip(verdict, res)):
            if v in ("WRONG", "error", "hang") and (a.verbose or i < 3 or v == "WRONG"):
                print(f"    prompt {i} ({len(prompts[i])} tokens): {v} after {r[3]:.2f} s {r[1] or ''}")
                if v == "WRONG" and a.verbose:
                    print(f"      want {want[i]}\n      got  {r[0]}")
        if a.fault == "none":
            checks.append(("every answer equal to the reference", count["equal"] == len(prompts)))
            after = D.metrics()
            ext = msum(after, "vllm:prompt_tokens_by_source_total", "external") - msum(
                before, "vllm:prompt_tokens_by_source_total", "external"
            )
            comp = msum(after, "vllm:prompt_tokens_by_source_total", "local_compute") - msum(
                before, "vllm:prompt_tokens_by_source_total", "local_compute"
            )
            total = sum(map(len, prompts))
            print(f"  D's prompt tokens: {ext:.0f} from the connector, {comp:.0f} computed by D, of {total}")
            report["external_tokens"], report["computed_tokens"] = ext, comp
            report["transfer"] = moved = {
                what: sum(msum(after, n) - msum(before, n) for n in names)
                for what, names in {
                    "seconds": ("vllm:kv_connector_load_seconds_sum", "vllm:nixl_xfer_time_seconds_sum"),
                    "bytes": ("vllm:kv_connector_load_bytes_sum", "vllm:nixl_bytes_transferred_sum"),
                    "count": ("vllm:kv_connector_load_seconds_count", "vllm:nixl_xfer_time_seconds_count"),
                }.items()
            }
            if moved["count"]:
                print(
                    f"  transfers: {moved['count']:.0f}, {moved['bytes'] / 1e6:.1f} MB, "
                    f"{moved['seconds'] / moved['count'] * 1e3:.1f} ms each"
                )
            checks.append(
                (
                    f"D took at least {a.min_external:.0%} of prompt tokens from the connector",
                    ext >= a.min_external * total,
                )
            )
            if not a.router:
                checks.append(
                    ("every prefill answer had kv_transfer_params", bool(trace) and all(p for _, p in trace))
                )
            if a.edge:
                checks += await edge_cases(a, url, P, D)
            if a.bad_input:
                checks += await bad_input(a, P, D)
            if a.hold:
                print(
                    f"  holding for {a.hold} s: PREFILL_PORT={P.port} DECODE_PORT={D.port} PROXY_PORT={ports[4]}",
                    flush=True,
                )
                await asyncio.sleep(a.hold)
        else:
            checks.append(("no wrong token", count["WRONG"] == 0))
            checks.append((f"no answer later than {a.hang_limit:.0f} s", count["hang"] == 0))
            if a.fault == "stop-p":
                P.signal_all(signal.SIGCONT)
                print("  P continues")
            if a.fault in ("kill-p", "stop-p"):
                checks.append(("D is alive", D.healthy(10)))
                print(f"  errors: {sorted({(r[1] or '')[:110] for r in res if r[1]})[:4]}")
                if a.policy == "recompute":
                    checks.append(
                        (
                            "policy recompute: every request whose prefill had ended got equal tokens",
                            all(v in ("equal", "no-prefill") for v in verdict),
                        )
                    )
            else:
                checks.append(("P is alive", P.healthy(10)))
            if a.fault in ("kill-p", "kill-d"):
                dead = P if a.fault == "kill-p" else D
                dead.stop()
                print(f"  {dead.name} starts again on the same ports")
                dead.start().wait()
            prompts, want = prompts[: a.prompts], want[: a.prompts]
            again, wall = await drive(url, prompts, a, a.concurrency)
            report["after_recovery"] = show("after recovery", again, wall)
            v2 = judge(again, want)
            print("  tokens after recovery:", ", ".join(f"{v2.count(k)} {k}" for k in KINDS))
            checks.append(("after recovery every answer is equal", v2.count("equal") == len(prompts)))
            if v2.count("equal") != len(prompts):
                print(f"    {sorted({(r[1] or '')[:200] for r in again if r[1]})[:3]}")
        if not a.no_leak_check:
            for e in (P, D):
                s = settle(e, a.settle_s, e.name)
                checks.append(
                    (
                        f"{e.name}'s KV usage is 0 within {a.settle_s} s" + (f" ({s:.1f} s)" if s is not None else ""),
                        s is not None,
                    )
                )
        if a.show_metrics:
            for e in (P, D):
                for k, v in sorted(e.metrics().items()):
                    if (
                        any(x in k for x in ("nixl", "external", "by_source", "kv_transfer", a.show_metrics))
                        and "bucket" not in k
                        and "created" not in k
                        and v
                    ):
                        print(f"    {e.name} {k} {v:g}")
        for e in (P, D):
            e.mem_end = pss_mib(tree(e.proc.pid))
            bad = [l for l in open(e.log, errors="replace") if "Traceback" in l or " ERROR " in l]
            print(f"  {e.name}: {e.mem_end} MiB at the end, {len(bad)} error lines in {os.path.basename(e.log)}")
            report[e.name] = dict(start_s=e.start_s, mib=e.mem, mib_end=e.mem_end, error_lines=len(bad))
    finally:
        await runner.cleanup()
    ok = all(c for _, c in checks if c is not None)
    for text, c in checks:
        print(f"  [{'--' if c is None else 'ok' if c else 'NO'}] {text}")
    if a.negative_control:
        # Here wrong answers are what must be seen.
        ok = "WRONG" in verdict
    report["checks"], report["pass"] = checks, ok
    if a.json:
        json.dump(report, open(a.json, "w"), indent=1)
    if a.negative_control:
        caught = verdict.count("WRONG")
        print(f"{'PASS' if caught else 'FAIL'}: negative control, {caught}/{len(prompts)} wrong answers were seen")
        return 0 if caught else 1
    print(f"{'PASS' if ok else 'FAIL'}: {a.connector}, {len(verdict)} requests, fault {a.fault}, policy {a.policy}")
    return 0 if ok else 1


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    g = ap.add_argument
    g("--model", required=True, help="folder from make_model.py")
    g("--connector", default="KvConnector")
    g(
        "--module-path",
        default="kv_connector.vllm",
        help="kv_connector_module_path; empty for a connector of vLLM's own",
    )
    g("--pythonpath", action="append", default=[], help="folder put first on the engines' PYTHONPATH (repeatable)")
    g("--extra", default="{}", help="kv_connector_extra_config as JSON, P and D")
    g("--p-extra", default="{}"), g("--d-extra", default="{}")
    g("--p-role", default="kv_producer"), g("--d-role", default="kv_consumer")
    g("--policy", default="fail", choices=["fail", "recompute"], help="kv_load_failure_policy")
    g("--env", action="append", default=[], metavar="K=V", help="environment of P and D (repeatable)")
    g("--engine-arg", action="append", default=[], help="one more argument for every engine (repeatable)")
    g("--p-arg", action="append", default=[], help="one more argument for P alone (repeatable)")
    g("--d-arg", action="append", default=[], help="one more argument for D alone (repeatable)")
    g("--prompts", type=int, default=24)
    g("--prompt-tokens", type=int, nargs=2, default=[40, 1500], metavar=("MIN", "MAX"))
    g("--max-tokens", type=int, default=24)
    g("--concurrency", type=int, default=4)
    g("--seed", type=int, default=1)
    g("--repeat", type=int, default=1, help="send the whole set this many times")
    g("--idle-s", type=float, default=3, help="length of the idle CPU measurement")
    g("--vocab", type=int, default=512)
    g("--dtype", default="float32")
    g("--block-size", type=int, default=32, help="the CPU attention backend takes multiples of 32")
    g("--max-model-len", type=int, default=4096)
    g("--max-batched", type=int, default=2048)
    g("--kv-gib", type=int, default=1)
    g("--kv-blocks", type=int, default=2048)
    g("--threads", type=int, default=1)
    g("--prefix-caching", action="store_true")
    g("--shared-prefix", type=int, default=0, help="common first tokens; use with --prefix-caching --min-external 0.1")
    g("--min-external", type=float, default=0.9)
    g("--edge", action="store_true", help="also send the edge cases; use with --prefix-caching")
    g("--strict", action="store_true", help="a second use of the same kv_transfer_params counts too")
    g("--bad-input", action="store_true", help="also send D kv_transfer_params of every kind that cannot be")
    g(
        "--hold",
        type=float,
        default=0,
        help="keep P, D and proxy up for so many seconds, e.g. for vLLM's own test_edge_cases.py",
    )
    g("--fault", default="none", choices=["none", "kill-p", "stop-p", "kill-d"])
    g(
        "--fault-delay-ms",
        type=float,
        default=-1,
        help="kill P this long after D's request went out (default: before it)",
    )
    g("--at-once", action="store_true", help="the proxy asks P and D at the same time; D asks P for the offer by name")
    g("--router", metavar="FILE", help="another router that asks both at once: vLLM's mooncake_connector_proxy.py")
    g("--hang-limit", type=float, default=120)
    g(
        "--prefill-timeout",
        type=float,
        default=None,
        help="the proxy gives up on P after this (default 30 s in fault runs, else the hang limit)",
    )
    g("--settle-s", type=float, default=60, help="time for KV usage to fall to 0 (the lease of the connector)")
    g("--no-leak-check", action="store_true")
    g("--negative-control", action="store_true", help="use a connector that loads nothing; wrong tokens must be seen")
    g("--fresh-reference", action="store_true")
    g("--show-metrics", default=None, metavar="WORD", help="print connector metrics and those with WORD")
    g("--real-yield", action="store_true", help="leave vLLM's sched_yield loops as they are (see sitecustomize.py)")
    g("--start-timeout", type=float, default=300)
    g("--logs", default="pd-logs")
    g("--tag", default=None, help="first part of the log files' names")
    g("--json", default=None)
    g("--verbose", action="store_true")
    a = ap.parse_args()
    a.model, a.logs = os.path.abspath(a.model), os.path.abspath(a.logs)
    a.pythonpath = [os.path.abspath(p) for p in a.pythonpath]
    os.makedirs(a.logs, exist_ok=True)
    if a.negative_control:
        a.connector, a.module_path, a.no_leak_check = "NoLoadConnector", "no_load", True
    if a.prefill_timeout is None:
        a.prefill_timeout = a.hang_limit if a.fault == "none" else 30
    if a.router and a.fault != "none":
        ap.error("--fault needs this folder's own proxy; use --at-once")
    a.tag = a.tag or f"{a.connector}-{a.fault}-{a.policy}"
    engines = []
    try:
        rc = asyncio.run(main_async(a, engines))
    finally:
        for e in engines:
            try:
                e.signal_all(signal.SIGCONT)
                e.stop()
            except Exception as x:  # noqa: BLE001
                print("while stopping", e.name, repr(x))
    sys.exit(rc)


if __name__ == "__main__":
    main()
