#!/bin/sh
# The demo behind `make demo`: prompts, a run with speculation, and what SQL says about it. All of it in ./demo.
set -eu
cd "$(dirname "$0")/.."

export NIGHTDRAFT_STORE="sqlite:///demo/nightdraft.db"
target=smollm2-135m

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
step() {
    say "\$ $*"
    "$@"
}

# A demo of older prompts or older code would be refused, since its job has another input or spec: start over.
if [ ! -e demo/prompts.parquet ] ||
    [ -n "$(find examples runner scheduler storage workers -name '*.py' -newer demo/prompts.parquet)" ] ||
    [ examples/demo.sh -nt demo/prompts.parquet ]; then
    rm -rf demo
    step python examples/make_prompts.py demo/prompts.parquet
fi

step nightdraft run demo/prompts.parquet --target "$target" --method ngram --max-tokens 96 --name demo --out demo

say "Acceptance by category"
step nightdraft sql "SELECT value AS category, num_results, mean_acceptance_length, draft_acceptance_rate
    FROM acceptance_by_carried WHERE column_name = 'category' AND job_name = 'demo' ORDER BY mean_acceptance_length DESC"

say "Acceptance by position in the draft"
step nightdraft sql "SELECT position, num_reached, num_accepted, draft_acceptance_rate, survival_rate
    FROM acceptance_by_position WHERE job_name = 'demo' ORDER BY position"

cat <<END

The answers are in demo/demo.parquet, the job and its statistics in demo/nightdraft.db. Try next:

  . .venv/bin/activate
  export NIGHTDRAFT_STORE=$NIGHTDRAFT_STORE
  nightdraft run demo/prompts.parquet --target $target --method none --max-tokens 96       # the same answers, undrafted
  nightdraft run demo/prompts.parquet --target $target --method ngram --temperature 0.7 --max-tokens 96
  nightdraft status
  nightdraft sql "SELECT job_name, mean_acceptance_length, draft_acceptance_rate FROM acceptance_by_job"
  nightdraft run YOUR.parquet --target YOUR-MODEL --dry-run
END
