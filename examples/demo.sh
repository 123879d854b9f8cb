#!/bin/sh
# The demo behind `make demo`: prompts, a run with speculation, what SQL says about it, and the methods that need no
# training side by side. All of it in ./demo.
set -eu
cd "$(dirname "$0")/.."

export NIGHTDRAFT_STORE="sqlite:///demo/nightdraft.db"
target=smollm2-135m

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
skipped() { # KIND LAYER...: the sublayers by name
    kind=$1
    shift
    printf "$kind.%s, " "$@" | sed 's/, $//'
}
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

# Every step drafts: the tables are to show what drafts are worth, also where policy auto would rest.
step nightdraft run demo/prompts.parquet --target "$target" --method ngram --policy fixed --max-tokens 96 --name demo --out demo

say "Acceptance by category"
step nightdraft sql "SELECT value AS category, num_results, mean_acceptance_length, draft_acceptance_rate
    FROM acceptance_by_carried WHERE column_name = 'category' AND job_name = 'demo' ORDER BY mean_acceptance_length DESC"

say "Acceptance by position in the draft"
step nightdraft sql "SELECT position, num_reached, num_accepted, draft_acceptance_rate, survival_rate
    FROM acceptance_by_position WHERE job_name = 'demo' ORDER BY position"

say "Ways of speculating that need no training: 24 rows each, 4 at a time, drafts of fixed length, to compare them"
compare() {
    name=compare-$1
    shift
    set -- --name "$name" --limit 24 --max-tokens 48 --max-batch 4 "$@"
    say "\$ nightdraft run demo/prompts.parquet --target $target $*"
    nightdraft run demo/prompts.parquet --target "$target" "$@" >>demo/compare.log
}
compare none
compare ngram --method ngram --policy fixed
compare suffix --method suffix --policy fixed
compare int8 --draft target --draft-dtype int8 --policy fixed
# What is skipped was found by: nightdraft calibrate demo/prompts.parquet --method self --target smollm2-135m
compare self --method self --max-draft-tokens 2 --policy fixed \
    --set "engine.speculation.skip=[$(skipped attn 3 4 6 7 8 10 12), $(skipped mlp 1 2 3 4 5 6)]"

say "Tokens per second of drafting and verifying, and whether the answers are those of plain decoding"
step nightdraft sql "SELECT substr(j.name, 9) AS method,
        max(t.decode_tokens_per_second) AS tokens_per_second,
        CAST(sum(r.num_output_tokens) AS REAL) / sum(a.num_spec_steps) AS mean_acceptance_length,
        CASE WHEN sum(CAST(r.output_text = plain.output_text AS INTEGER)) = count(*) THEN 'yes' ELSE 'NO' END AS identical_outputs
    FROM results AS r
    JOIN acceptance AS a ON a.job_id = r.job_id AND a.row_index = r.row_index AND a.sample = r.sample
    JOIN jobs AS j ON j.id = r.job_id
    JOIN throughput AS t ON t.job_id = j.id
    JOIN jobs AS none ON none.name = 'compare-none'
    LEFT JOIN results AS plain ON plain.job_id = none.id AND plain.row_index = r.row_index AND plain.sample = r.sample
    WHERE j.name LIKE 'compare-%' GROUP BY j.name ORDER BY tokens_per_second DESC"
differing=$(nightdraft sql --format csv "SELECT count(*) AS differing
    FROM results AS r
    JOIN jobs AS j ON j.id = r.job_id
    JOIN jobs AS none ON none.name = 'compare-none'
    LEFT JOIN results AS plain ON plain.job_id = none.id AND plain.row_index = r.row_index AND plain.sample = r.sample
    WHERE j.name LIKE 'compare-%' AND r.output_text IS NOT plain.output_text" | tail -n 1 | tr -d '\r')
if [ "$differing" != 0 ]; then
    echo "$differing answers differ from plain decoding, which must not be: please report it" >&2
    exit 1
fi

say "Acceptance by position in the draft"
step nightdraft sql "SELECT substr(job_name, 9) AS method,
        max(CASE WHEN position = 1 THEN draft_acceptance_rate END) AS first,
        max(CASE WHEN position = 2 THEN draft_acceptance_rate END) AS second,
        max(CASE WHEN position = 3 THEN draft_acceptance_rate END) AS third,
        max(CASE WHEN position = 4 THEN draft_acceptance_rate END) AS fourth
    FROM acceptance_by_position WHERE job_name LIKE 'compare-%' GROUP BY job_name ORDER BY method"

cat <<END

The answers are in demo/demo.parquet, the job and its statistics in demo/nightdraft.db. Try next:

  . .venv/bin/activate
  export NIGHTDRAFT_STORE=$NIGHTDRAFT_STORE
  nightdraft run demo/prompts.parquet --target $target --method none --max-tokens 96       # the same answers, undrafted
  nightdraft run demo/prompts.parquet --target $target --method ngram --dtype bfloat16        # other weights, other answers
  nightdraft check-draft demo/prompts.parquet --target $target --draft target --draft-dtype int8
  nightdraft calibrate demo/prompts.parquet --target $target --method self                 # some minutes
  nightdraft run demo/prompts.parquet --target $target --method ngram --temperature 0.7 --max-tokens 96
  nightdraft status
  nightdraft sql "SELECT job_name, mean_acceptance_length, draft_acceptance_rate FROM acceptance_by_job"
  nightdraft run YOUR.parquet --target YOUR-MODEL --dry-run
END
