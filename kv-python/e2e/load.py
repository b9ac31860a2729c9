"""Prompts, requests, and what their answers are worth."""

import asyncio
import json
import random
import time


def make_prompts(a):
    rng = random.Random(a.seed)
    lo, hi = a.prompt_tokens
    out = []
    for i in range(a.prompts):
        # exact multiples of the block size, one over and one under, then anything
        n = [lo, a.block_size * 2, a.block_size * 2 + 1, a.block_size * 2 - 1][i] if i < 4 else rng.randint(lo, hi)
        out.append([rng.randint(2, a.vocab - 1) for _ in range(n)])
    if a.shared_prefix:
        # Two groups, each with its own common prefix: local prefix-cache hits on P and D.
        heads = [[rng.randint(2, a.vocab - 1) for _ in range(a.shared_prefix)] for _ in range(2)]
        out = [heads[i % 2] + p for i, p in enumerate(out)]
    return out


async def one(session, url, prompt, a, rid=None):
    """Streamed greedy completion: (token ids, error, time to first token, total, gaps)."""
    body = dict(
        model="m",
        prompt=prompt,
        max_tokens=a.max_tokens,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        stream=True,
    )
    t0, first, last, gaps, ids, err = time.perf_counter(), None, None, [], [], None
    try:
        async with session.post(
            url + "/v1/completions", json=body, headers={"x-request-id": rid or ""} if rid else {}
        ) as r:
            if r.status != 200:
                return [], f"http {r.status}: {(await r.text())[:300]}", None, time.perf_counter() - t0, []
            buf = b""
            async for chunk in r.content.iter_any():
                buf += chunk
                while b"\n\n" in buf:
                    ev, buf = buf.split(b"\n\n", 1)
                    ev = ev.strip()
                    if not ev.startswith(b"data: ") or ev == b"data: [DONE]":
                        continue
                    d = json.loads(ev[6:])
                    if "error" in d:
                        err = str(d["error"])[:300]
                        continue
                    c = d["choices"][0] if d.get("choices") else {}
                    if c.get("token_ids"):
                        now = time.perf_counter()
                        gaps.append(now - last) if last else None
                        first = first or now - t0
                        last = now
                        ids += c["token_ids"]
                    if c.get("finish_reason") == "error":
                        err = "finish_reason error"
    except asyncio.TimeoutError:
        err = "timeout"
    except Exception as e:  # noqa: BLE001  (report it, whatever it is)
        err = repr(e)[:300]
    return ids, err, first, time.perf_counter() - t0, gaps


async def drive(url, prompts, a, concurrency, on_done=None, limit=None):
    import aiohttp

    sem, res = asyncio.Semaphore(concurrency), [None] * len(prompts)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=limit or a.hang_limit + a.prefill_timeout),
        connector=aiohttp.TCPConnector(limit=0),
    ) as s:

        async def go(i):
            async with sem:
                res[i] = await one(s, url, prompts[i], a, f"q{i}-{random.getrandbits(32):08x}")
                if on_done:
                    on_done(i, res[i])

        t0 = time.perf_counter()
        await asyncio.gather(*(go(i) for i in range(len(prompts))))
    return res, time.perf_counter() - t0


def pct(v, p):
    v = sorted(v)
    return v[min(len(v) - 1, int(p / 100 * len(v)))] if v else float("nan")


def show(tag, res, wall):
    ok = [r for r in res if not r[1]]
    toks = sum(len(r[0]) for r in ok)
    ttft, itl = [r[2] for r in ok if r[2]], [g for r in ok for g in r[4]]
    print(
        f"  {tag}: {len(ok)}/{len(res)} answered, {toks} tokens in {wall:.2f} s = {toks / wall:.0f} tok/s, "
        f"{len(ok) / wall:.1f} req/s; TTFT p50 {pct(ttft, 50) * 1e3:.1f} p99 {pct(ttft, 99) * 1e3:.1f} ms; "
        f"ITL p50 {pct(itl, 50) * 1e3:.2f} p99 {pct(itl, 99) * 1e3:.2f} ms; E2E p50 "
        f"{pct([r[3] for r in ok], 50) * 1e3:.0f} ms",
        flush=True,
    )
    return dict(
        answered=len(ok),
        tokens=toks,
        wall_s=wall,
        ttft_p50=pct(ttft, 50),
        ttft_p99=pct(ttft, 99),
        itl_p50=pct(itl, 50),
        itl_p99=pct(itl, 99),
    )


KINDS = ("equal", "WRONG", "error", "hang", "no-prefill", "no-decode")


def judge(res, want):
    v = []
    for r, w in zip(res, want):
        if r is None:
            v.append("none")
        elif r[1] == "timeout" or r[1] and "decode timed out" in r[1]:
            v.append("hang")
        elif r[1] and '"prefill ' in r[1]:
            v.append("no-prefill")  # the proxy got no answer from P: not the connector's doing
        elif r[1] and "decode unreachable" in r[1]:
            v.append("no-decode")
        elif r[1]:
            v.append("error")
        else:
            v.append("equal" if r[0] == w else "WRONG")
    return v
