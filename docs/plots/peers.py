#!/usr/bin/env python3
"""Draws rows of a run in which several transfer libraries took turns: medians over the rounds, with their range.

    python docs/plots/peers.py rows.jsonl --shape bulk-64k > docs/plots/peers-64k.svg

A row is a JSON object a line with `config`, `shape` and `gbps`, as `kvx bench --peers-row` prints them. One whose
`others_busy_cores` says that others used the machine is left out if its configuration has quieter ones; what stands behind a
bar is how many of its rounds were quiet. A configuration that brought a wrong byte (`verified` is false) is not drawn.
"""

import argparse
import collections
import json
import statistics
import sys
from xml.sax.saxutils import escape

WIDTH, LEFT, ROW, TOP = 760, 190, 24, 46
OURS, FLOOR, PEER = "#1f6f54", "#8a8f98", "#b5651d"
FLOORS = {"memcpy", "shm-copy", "pvm-readv", "tcp-raw-1", "tcp-raw-2"}


def read(path, shape, quiet_limit):
    """GB/s by configuration, each with how many of its rounds were quiet, and how many there are."""
    good, wrong = collections.defaultdict(list), collections.defaultdict(set)
    with open(path) as rows:
        for line in rows:
            row = json.loads(line)
            config = row.get("config")
            if row.get("verified") is False:
                # Its bytes are compared in one round only, so its other rounds prove nothing; other shapes do not suffer.
                wrong[row.get("shape")].add(config)
            if row.get("shape") == shape and row.get("gbps") and "error" not in row:
                good[config].append(row)
    for config in wrong[shape]:
        print(f"{config} is not drawn: it brought wrong bytes of {shape}", file=sys.stderr)
        good.pop(config, None)
    found = {}
    for config, rows in good.items():
        calm = [row for row in rows if (row.get("others_busy_cores") or 0) < quiet_limit]
        found[config] = ([row["gbps"] for row in calm or rows], len(calm), len(rows))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="file of rows, one JSON object a line")
    parser.add_argument("--shape", default="bulk-64k")
    parser.add_argument("--quiet-limit", type=float, default=0.25, help="cores that others may use in a quiet round")
    args = parser.parse_args()
    found = read(args.rows, args.shape, args.quiet_limit)
    if not found:
        parser.error(f"{args.rows} has no rows of shape {args.shape}")
    bars = sorted(((statistics.median(v), min(v), max(v), k) for k, (v, _, _) in found.items()), reverse=True)
    scale = (WIDTH - LEFT - 120) / max(high for _, _, high, _ in bars)
    height = TOP + ROW * len(bars) + 12
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f'<text x="12" y="22" font-size="15">{escape(args.shape)}: GB/s, median and range over the rounds (quiet of all)'
        "</text>"
        f'<text x="12" y="39" fill="{FLOOR}">grey: the machine itself; <tspan fill="{OURS}">green: ours</tspan>; '
        f'<tspan fill="{PEER}">brown: NIXL, Mooncake</tspan></text>'
    )
    for number, (middle, low, high, name) in enumerate(bars):
        y, (_, calm, rounds) = TOP + ROW * number, found[name]
        colour = OURS if name.startswith("kv-") else FLOOR if name in FLOORS else PEER
        print(
            f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{LEFT}" y="{y + 4}" width="{middle * scale:.1f}" height="{ROW - 9}" fill="{colour}"/>'
            f'<line x1="{LEFT + low * scale:.1f}" x2="{LEFT + high * scale:.1f}" y1="{y + 11.5}" y2="{y + 11.5}" '
            'stroke="black" stroke-width="1.5"/>'
            f'<text x="{LEFT + high * scale + 8:.1f}" y="{y + 16}">{middle:.2f} ({calm} of {rounds})</text>'
        )
    print("</svg>")


if __name__ == "__main__":
    main()
