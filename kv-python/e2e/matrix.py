#!/usr/bin/env python3
"""Many runs of pd_run.py, and one table of what they said.

  python matrix.py --model DIR --wide DIR --out FOLDER              every case once, with our connector
  python matrix.py ... --only plain large --stock --repeat 3        beside the stock connector, in turns
  python matrix.py --table FOLDER                                   the table of earlier runs again
  python matrix.py --list

Runs of the two connectors alternate, so that a noisy machine is noisy for both. Each writes a JSON file to FOLDER.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))

LARGE = ["--prompts", "8", "--prompt-tokens", "2500", "3900", "--max-tokens", "4", "--concurrency", "1"]
EDGE = ["--prefix-caching", "--edge", "--strict", "--policy", "recompute"]

# Name, arguments, and what is special: "wide" wants the model with much KV per token, "ours" is for our connector only.
CASES = {
    "plain": ([], ""),
    "async-scheduling": (["--engine-arg=--async-scheduling"], ""),
    "prefix-caching": (["--prefix-caching", "--shared-prefix", "160", "--min-external", "0.1"], ""),
    "chunked-prefill": (["--max-batched", "512"], ""),
    "small-pool": (["--kv-blocks", "140", "--concurrency", "8"], ""),
    "large": (LARGE, "wide"),
    "large-tcp": (LARGE, "wide"),
    "large-shm": ([*LARGE, "--extra", '{"transport": "shm"}'], "wide"),
    "shm": (["--extra", '{"transport": "shm"}'], "ours"),
    "auto": (["--extra", '{"transport": "auto"}'], "ours"),
    "shm-kill-p-reading": (
        [*LARGE, "--concurrency", "4", "--fault", "kill-p", "--fault-delay-ms", "5", "--policy", "recompute"]
        + ["--extra", '{"transport": "shm"}'],
        "ours wide",
    ),
    "bfloat16": (["--dtype", "bfloat16", "--concurrency", "1"], ""),
    "two-ranks": (["--engine-arg=--tensor-parallel-size", "--engine-arg=2"], ""),
    "ranks-1-2": (["--d-arg=--tensor-parallel-size", "--d-arg=2"], ""),
    "ranks-2-1": (["--p-arg=--tensor-parallel-size", "--p-arg=2"], ""),
    "blocks-32-64": (
        ["--d-arg=--block-size", "--d-arg=64", "--policy", "recompute", "--min-external", "0"],
        "ours",
    ),
    "at-once": (["--at-once"], "ours"),
    "at-once-kill-p": (["--at-once", "--fault", "kill-p", "--policy", "recompute"], "ours"),
    "at-once-stop-p": (
        ["--at-once", "--fault", "stop-p", "--policy", "recompute", "--prefill-timeout", "10", "--hang-limit", "60"],
        "ours",
    ),
    "checksums": (["--extra", '{"checksums": true}'], "ours"),
    "edge": (EDGE, ""),
    "bad-input": ([*EDGE, "--bad-input"], "ours"),
    "kill-p": (["--fault", "kill-p", "--policy", "recompute"], ""),
    "kill-p-fail": (["--fault", "kill-p", "--policy", "fail"], ""),
    "kill-p-reading": (
        [*LARGE, "--concurrency", "4", "--fault", "kill-p", "--fault-delay-ms", "5", "--policy", "recompute"],
        "wide",
    ),
    "stop-p": (["--fault", "stop-p", "--policy", "recompute", "--prefill-timeout", "10", "--hang-limit", "60"], ""),
    "stop-p-fail": (["--fault", "stop-p", "--policy", "fail", "--prefill-timeout", "10", "--hang-limit", "60"], ""),
    "kill-d": (["--fault", "kill-d"], ""),
    "multi-connector": (
        [
            "--connector",
            "MultiConnector",
            "--module-path",
            "",
            "--extra",
            '{"connectors": [{"kv_connector": "KvConnector", "kv_role": "kv_both"}]}',
        ],
        "ours",
    ),
    "another-model": (["--p-extra", '{"model": "another"}', "--policy", "recompute", "--min-external", "0"], "ours"),
    "negative-control": (["--negative-control"], "ours"),
}

STOCK = ["--connector", "NixlConnector", "--module-path", ""]


def run(args, name, whose, number):
    extra, special = CASES[name]
    model = args.wide if "wide" in special else args.model
    out = os.path.join(args.out, f"{name}.{whose}.{number}.json")
    command = [sys.executable, os.path.join(HERE, "pd_run.py"), "--model", model, "--json", out]
    command += ["--logs", os.path.join(args.out, "logs"), "--tag", f"{name}-{whose}-{number}", *extra]
    if whose == "stock":
        if "--extra" in extra:
            # What is ours means nothing to it.
            at = command.index("--extra")
            del command[at : at + 2]
        command += STOCK
        if name == "kill-d":
            command += ["--extra", '{"kv_lease_duration": 12}']
        if name == "large-tcp":
            # Left to itself the stock connector's transport reads the other process's memory directly on one host.
            command += ["--env", "UCX_TLS=tcp"]
    begun = time.time()
    with open(out.replace(".json", ".txt"), "w") as text:
        ended = subprocess.run(command, stdout=text, stderr=subprocess.STDOUT, timeout=900, check=False)
    passed = ended.returncode == 0
    print(f"{name:<18} {whose:<6} {number}  {'PASS' if passed else 'FAIL'}  {time.time() - begun:5.0f} s", flush=True)
    return passed


def spread(values, unit="", digits=2):
    """Median, and the range if there is more than one."""
    values = [v for v in values if v is not None and v == v]
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) > 1:
        middle += f" ({min(values):.{digits}f}-{max(values):.{digits}f})"
    return middle + unit


def table(folder):
    """Markdown, one line for each case and connector."""
    found = {}
    for file in sorted(os.listdir(folder)):
        parts = file.split(".")
        if len(parts) == 4 and parts[3] == "json":
            with open(os.path.join(folder, file)) as handle:
                found.setdefault((parts[0], parts[1]), []).append(json.load(handle))
    lines = [
        "| case | connector | runs passed | answers | D's tokens from P | TTFT p50, s | a transfer, ms | CPU P / D, s "
        "| idle P / D, cores |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in CASES:
        for whose in ("ours", "stock"):
            runs = found.get((name, whose))
            if not runs:
                continue
            verdicts = [v for r in runs for v in r.get("verdict", [])]
            words = ", ".join(f"{verdicts.count(k)} {k}" for k in dict.fromkeys(verdicts))
            external = [
                r["external_tokens"] / max(1, r["external_tokens"] + r["computed_tokens"])
                for r in runs
                if "external_tokens" in r
            ]
            ttft = [r["load"]["ttft_p50"] for r in runs if r.get("load")]
            cpu = [[r["cpu_s"][e] for r in runs if "cpu_s" in r] for e in ("P", "D")]
            idle = [[r["idle_cores"][e] for r in runs if "idle_cores" in r] for e in ("P", "D")]
            moved = [
                1e3 * r["transfer"]["seconds"] / r["transfer"]["count"]
                for r in runs
                if r.get("transfer", {}).get("count")
            ]
            lines.append(
                f"| {name} | {whose} | {sum(r['pass'] for r in runs)} of {len(runs)} | {words} "
                f"| {spread([100 * x for x in external], ' %', 0)} | {spread(ttft)} | {spread(moved, '', 0)} "
                f"| {spread(cpu[0], '', 1)} / {spread(cpu[1], '', 1)} | {spread(idle[0])} / {spread(idle[1])} |"
            )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder from make_model.py")
    parser.add_argument("--wide", help="a model with much KV a token: --layers 8 --kv-heads 4 --head-dim 128")
    parser.add_argument("--out", default="matrix")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=None, metavar="CASE")
    parser.add_argument("--stock", action="store_true", help="the stock connector in turns with ours")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--table", metavar="FOLDER", help="print the table of earlier runs and end")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    args = parser.parse_args()
    if args.list:
        for name, (extra, special) in CASES.items():
            print(f"{name:<18} {' '.join(extra)} {f'({special})' if special else ''}")
        return 0
    if args.table:
        print(table(args.table))
        return 0
    if not args.model:
        parser.error("--model is needed")
    os.makedirs(args.out, exist_ok=True)
    good = True
    for number in range(1, args.repeat + 1):
        for name in args.only or CASES:
            special = CASES[name][1]
            if "wide" in special and not args.wide:
                print(f"{name:<18} left out: it wants --wide")
                continue
            good &= run(args, name, "ours", number)
            if args.stock and "ours" not in special:
                # What the stock connector does is reported, not judged.
                run(args, name, "stock", number)
    print(table(args.out))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
