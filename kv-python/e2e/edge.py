"""Requests at the edges of the protocol, and requests whose kv_transfer_params cannot be."""

import asyncio
import random
import time
import urllib.request

import aiohttp
from engines import free_ports, msum
from proxy import PREFILL_PARAMS


async def post(session, url, body, limit):
    """One non-streamed completion: (json or None, error or None)."""
    try:
        async with session.post(url + "/v1/completions", json=body, timeout=aiohttp.ClientTimeout(total=limit)) as r:
            d = await r.json(content_type=None)
            return (d, None) if r.status == 200 else (None, f"http {r.status}: {str(d)[:200]}")
    except asyncio.TimeoutError:
        return None, "timeout"
    except Exception as e:  # noqa: BLE001
        return None, repr(e)[:200]


async def edge_cases(a, url, P, D):
    """Requests at the edges of the protocol. Returns [(text, ok or None)]; None: for information."""
    rng, B = random.Random(77), a.block_size
    checks, session = [], aiohttp.ClientSession()

    def toks(n):
        return [rng.randint(2, a.vocab - 1) for _ in range(n)]

    def body(p, n=12, **kw):
        return dict(model="m", prompt=p, max_tokens=n, temperature=0, ignore_eos=True, return_token_ids=True, **kw)

    async def ids(base, p, **kw):
        d, e = await post(session, base, body(p, **kw), a.hang_limit)
        return (d["choices"][0]["token_ids"], None) if d else (None, e)

    async def same(text, p):
        got, e = await ids(url, p)
        want, e2 = await ids(P.url, p)
        checks.append((f"edge: {text}" + (f" ({e or e2})" if e or e2 else ""), got is not None and got == want))

    async def prefill(p):
        d, e = await post(session, P.url, body(p, 1, kv_transfer_params=dict(PREFILL_PARAMS)), a.hang_limit)
        return d["kv_transfer_params"] if d else None

    for n in (1, 2, B - 1, B, B + 1):
        await same(f"prompt of {n} token(s)", toks(n))
    p = toks(3 * B)
    await ids(D.url, p)
    await same("D computed the whole prompt before", p)
    p = toks(2 * B + 5)
    await ids(D.url, p)
    await same("D computed the first part before", p + toks(2 * B))
    p = toks(4 * B + 7)
    await same("a prompt, first time", p)
    await same("the same prompt again", p)
    big = toks(20 * B)
    await asyncio.gather(*(same(f"the same long prompt at once ({i})", big) for i in range(3)))

    params = await prefill(toks(5 * B))
    checks.append(("edge: prefill alone gives kv_transfer_params (D is never asked; see KV usage below)", bool(params)))
    for wait in (0.0, 0.02, 0.2):  # the client goes away
        t = asyncio.create_task(post(session, url, body(toks(10 * B), 400), a.hang_limit))
        await asyncio.sleep(wait)
        t.cancel()
    p = toks(6 * B)
    params = await prefill(p)
    t = asyncio.create_task(post(session, D.url, body(p, 400, kv_transfer_params=params), a.hang_limit))
    await asyncio.sleep(0.005)
    t.cancel()
    checks.append(("edge: engines alive after clients went away", P.healthy(20) and D.healthy(20)))

    p = toks(5 * B)
    want, _ = await ids(P.url, p)
    params = await prefill(p)
    first, e1 = await ids(D.url, p, kv_transfer_params=params)
    await asyncio.gather(
        *(ids(P.url, toks(40 * B)) for _ in range(max(4, a.kv_blocks // 40 + 2)))
    )  # P's blocks are used anew
    filler = toks(5 * B)
    await ids(D.url, filler)
    try:  # D must not answer from its own prefix cache
        urllib.request.urlopen(
            urllib.request.Request(D.url + "/reset_prefix_cache", b"", method="POST"), timeout=20
        ).read()
    except OSError:
        pass
    sources = [msum(D.metrics(), "vllm:prompt_tokens_by_source_total", s) for s in ("external", "local_compute")]
    again, e2 = await ids(D.url, p, kv_transfer_params=params)
    now = [msum(D.metrics(), "vllm:prompt_tokens_by_source_total", s) for s in ("external", "local_compute")]
    fresh = sum(now) - sum(sources) >= len(p) - B
    checks.append(("edge: the second time D does not answer from its own cache", fresh))
    checks.append(("edge: kv_transfer_params used once: equal" + (f" ({e1})" if e1 else ""), first == want))
    what = e2 or ("equal" if again == want else "WRONG TOKENS")
    checks.append(
        (
            f"edge: the same kv_transfer_params a second time, after P used its blocks anew: {what}",
            (what != "WRONG TOKENS" and what != "timeout") if a.strict else None,
        )
    )
    p = toks(5 * B)
    params = dict(params or {}, remote_port=free_ports(1)[0], remote_engine_id="00000000-dead-dead-dead-000000000000")
    t0 = time.time()
    got, e = await ids(D.url, p, kv_transfer_params=params)
    want, _ = await ids(P.url, p)
    checks.append(
        (
            f"edge: P at a dead port: {e or ('equal' if got == want else 'WRONG TOKENS')} after {time.time() - t0:.1f} s",
            e != "timeout" and (got is None or got == want),
        )
    )
    checks.append(("edge: engines alive at the end", P.healthy(20) and D.healthy(20)))
    await session.close()
    return checks


def bad_params(good):
    """kv_transfer_params as a client can make them: (what is wrong, the params)."""
    ours = good["kv_connector"]

    def top(**changes):
        return {**good, **changes}

    def inner(**changes):
        return {**good, "kv_connector": {**ours, **changes}}

    yield "no kv_connector", {k: v for k, v in good.items() if k != "kv_connector"}
    for name in good:
        yield f"{name} missing", {k: v for k, v in good.items() if k != name}
    for name, value in good.items():
        if name not in ("do_remote_prefill", "do_remote_decode"):
            yield f"{name} null", top(**{name: None})
            yield f"{name} of another type", top(**{name: {"x": [1, "y"]} if not isinstance(value, dict) else 7})
    for name in ours:
        yield f"kv_connector.{name} missing", {**good, "kv_connector": {k: v for k, v in ours.items() if k != name}}
        yield f"kv_connector.{name} of another type", inner(**{name: [[]]})
    for blocks in ([], [[]], [[-1]], [[2**40]], [["a"]], [[0] * 100_000], [[1], [2]], "blocks", [[1.5]]):
        yield f"remote_block_ids {str(blocks)[:20]}", top(remote_block_ids=blocks)
    for port in (-1, 0, 65_536, 1.5, "22"):
        yield f"remote_port {port!r}", top(remote_port=port)
    yield "remote_host of 300 letters", top(remote_host="x" * 300)
    yield "remote_host that is none", top(remote_host="no such host")
    yield "remote_engine_id empty", top(remote_engine_id="")
    yield "remote_num_tokens too many", top(remote_num_tokens=10**9)
    yield "tp_size 0", top(tp_size=0)
    yield "tp_size 1000", top(tp_size=1000)
    yield "both sides at once", top(do_remote_decode=True)
    yield "do_remote_prefill that is a word", top(do_remote_prefill="yes")
    yield "alternatives that are none", top(alternatives=7)
    yield "nothing but the flag", {"do_remote_prefill": True}
    yield "empty", {}
    yield "a key of 10,000 letters", top(**{"k" * 10_000: 1})
    nested = []
    for _ in range(200):
        nested = [nested]
    yield "nested 200 times", top(x=nested)


async def bad_input(a, P, D):
    """Each kind once, with a prompt of its own: an error or the right tokens, and D lives on."""
    rng, checks, session = random.Random(78), [], aiohttp.ClientSession()

    def body(prompt, tokens, **kw):
        return dict(
            model="m", prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, return_token_ids=True, **kw
        )

    async def prefilled():
        """A prompt that neither engine has seen, and what P answers for it."""
        prompt = [rng.randint(2, a.vocab - 1) for _ in range(2 * a.block_size + 5)]
        made, _ = await post(session, P.url, body(prompt, 1, kv_transfer_params=dict(PREFILL_PARAMS)), a.hang_limit)
        return prompt, made["kv_transfer_params"]

    async def right(prompt):
        answer, _ = await post(session, P.url, body(prompt, 8), a.hang_limit)
        return answer["choices"][0]["token_ids"]

    # Other blocks that P has, which it never offered for this prompt.
    kinds = [what for what, _ in bad_params((await prefilled())[1])] + ["another prompt's blocks"]
    good = refused = 0
    wrong = []
    for index, what in enumerate(kinds):
        prompt, params = await prefilled()
        if what == "another prompt's blocks":
            params["remote_block_ids"] = (await prefilled())[1]["remote_block_ids"]
        else:
            params = list(bad_params(params))[index][1]
        got, error = await post(session, D.url, body(prompt, 8, kv_transfer_params=params), a.hang_limit)
        if error and error.startswith(("http 4", "http 5")):
            refused += 1
        elif got and got["choices"][0]["token_ids"] == await right(prompt):
            good += 1
        else:
            wrong.append(f"{what}: {error or 'WRONG TOKENS'}")
    text = (
        f"bad input: {good} of {len(kinds)} kinds computed right, {refused} refused, {len(wrong)} neither {wrong[:3]}"
    )
    checks.append((text, not wrong and good + refused == len(kinds)))
    checks.append(("bad input: engines alive", P.healthy(20) and D.healthy(20)))
    # n answers of one prompt: several requests live by one offer. vLLM wants a temperature for it; top_k takes it back.
    twice = dict(n=2, temperature=1.0, top_k=1)
    prompt, params = await prefilled()
    two, error = await post(session, D.url, {**body(prompt, 8, kv_transfer_params=params), **twice}, a.hang_limit)
    want = await right(prompt)
    same = two is not None and [c["token_ids"] for c in two["choices"]] == [want, want]
    checks.append((f"n=2: both answers equal {error or ''}", same))
    await session.close()
    return checks
