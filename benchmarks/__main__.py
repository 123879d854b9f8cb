"""`make bench`: every measurement of speed, side by side in one run. `python -m benchmarks NAME` runs one.

`python -m benchmarks exactness` is a study of its own: it takes half an hour on two cores.
"""

from __future__ import annotations

import argparse

from benchmarks import decoding, exactness, jobs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", nargs="?", choices=("decoding", "jobs", "exactness", "all"), default="all")
    parser.add_argument("--repeats", type=int, default=3, help="paired runs of each comparison")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the jobs measurement")
    options = parser.parse_args()
    if options.name in ("decoding", "all"):
        decoding.run(options.repeats)
    if options.name in ("jobs", "all"):
        jobs.run(options.rows)
    if options.name == "exactness":
        exactness.run()


if __name__ == "__main__":
    main()
