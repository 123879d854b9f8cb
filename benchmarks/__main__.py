"""`make bench`: every measurement of speed, side by side in one run. `python -m benchmarks NAME` runs one.

`python -m benchmarks chaos --kills 100` is a study of the second promise: ten minutes, with all services.
`python -m benchmarks exactness` and `python -m benchmarks resuming` are studies of the first promise: half an hour and
five minutes on two cores, and an hour or two for `exactness --everything`, with every method in small batches too.
"""

from __future__ import annotations

import argparse

from benchmarks import chaos, decoding, exactness, jobs, resuming, speculation


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "name",
        nargs="?",
        choices=("decoding", "speculation", "jobs", "exactness", "resuming", "chaos", "all"),
        default="all",
    )
    parser.add_argument("--repeats", type=int, default=3, help="paired runs of each comparison")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the jobs measurement")
    parser.add_argument("--everything", action="store_true", help="exactness: every method in every setting")
    parser.add_argument("--kills", type=int, default=100, help="chaos: kills in all")
    parser.add_argument("--seed", type=int, default=1, help="chaos: what the dice show")
    parser.add_argument("--on", nargs="+", choices=chaos.DEPLOYMENTS, default=chaos.DEPLOYMENTS, help="chaos: on these")
    options = parser.parse_args()
    if options.name in ("decoding", "all"):
        decoding.run(options.repeats)
    if options.name in ("speculation", "all"):
        speculation.run(options.repeats)
    if options.name in ("jobs", "all"):
        jobs.run(options.rows)
    if options.name == "exactness":
        exactness.run(everything=options.everything)
    if options.name == "resuming":
        resuming.run()
    if options.name == "chaos" and not chaos.run(options.kills, options.seed, tuple(options.on)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
