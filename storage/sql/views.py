"""The views that people query: the same names, columns and answers on SQLite and PostgreSQL. See docs/statistics.md.

Views are code, not data: every upgrade drops them all and creates them from this module. After a change here add a
migration (an empty one will do), so that existing databases are upgraded.
"""

from __future__ import annotations

import sqlalchemy as sa

_SQLITE = {
    "positions": "json_each(a.{array}) AS e",
    "position": "e.key",
    "item": "e.value",
    "accepted_item": "coalesce(a.accepted_per_position ->> e.key, 0)",
    "carried": "json_each(r.carried) AS e",
    # Numbers as they were written, where SQLite can name their place: by itself it shows 15 digits of a float.
    "carried_value": "CASE e.type WHEN 'null' THEN NULL WHEN 'true' THEN 'true' WHEN 'false' THEN 'false'"
    " WHEN 'text' THEN e.value"
    " ELSE coalesce(CASE WHEN instr(e.key, '\"') = 0 THEN r.carried -> e.fullkey END, CAST(e.value AS TEXT)) END",
    "elapsed": "(julianday(coalesce(j.finished_at, 'now')) - julianday(j.started_at)) * 86400.0",
    "minute": "substr(r.recorded_at, 1, 16)",
    "since_previous": "(julianday(s.sampled_at) - julianday(lag(s.sampled_at) OVER engine)) * 86400.0",
}

_POSTGRESQL = {
    "positions": "json_array_elements_text(a.{array}) WITH ORDINALITY AS e(item, ordinal)",
    "position": "e.ordinal - 1",
    "item": "CAST(e.item AS BIGINT)",
    "accepted_item": "coalesce(CAST(a.accepted_per_position ->> CAST(e.ordinal - 1 AS INTEGER) AS BIGINT), 0)",
    "carried": "json_each_text(r.carried) AS e(key, value)",
    "carried_value": "e.value",
    "elapsed": "CAST(extract(epoch FROM coalesce(j.finished_at, now()) - j.started_at) AS DOUBLE PRECISION)",
    "minute": "to_char(r.recorded_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')",
    "since_previous": "CAST(extract(epoch FROM s.sampled_at - lag(s.sampled_at) OVER engine) AS DOUBLE PRECISION)",
}


def _rate(numerator: str, denominator: str) -> str:
    """A quotient that is NULL where there is nothing to divide by."""
    return f"CAST({numerator} AS DOUBLE PRECISION) / nullif({denominator}, 0)"


_STEPS = "sum(a.num_spec_steps)"
_DRAFTED = "sum(a.num_draft_tokens)"
_ACCEPTED = "sum(a.num_accepted_draft_tokens)"
_SUMS = f"""
    count(a.job_id) AS num_results,
    coalesce({_STEPS}, 0) AS num_spec_steps,
    coalesce({_DRAFTED}, 0) AS num_draft_tokens,
    coalesce({_ACCEPTED}, 0) AS num_accepted_draft_tokens,
    coalesce(sum(a.num_trimmed_draft_tokens), 0) AS num_trimmed_draft_tokens,
    coalesce(sum(a.num_output_tokens), 0) AS num_output_tokens,
    {_rate(f"{_ACCEPTED} + {_STEPS}", _STEPS)} AS mean_acceptance_length,
    {_rate(_ACCEPTED, _DRAFTED)} AS draft_acceptance_rate"""
_WITH_RESULT = (
    "acceptance AS a JOIN results AS r"
    " ON r.job_id = a.job_id AND r.row_index = a.row_index AND r.sample = a.sample JOIN jobs AS j ON j.id = a.job_id"
)

_VIEWS = {
    "acceptance_by_job": f"""
SELECT j.id AS job_id, j.name AS job_name,{_SUMS}
FROM jobs AS j LEFT JOIN acceptance AS a ON a.job_id = j.id
GROUP BY j.id, j.name""",
    "acceptance_by_speculator": f"""
SELECT j.id AS job_id, j.name AS job_name, r.method AS method,{_SUMS}
FROM {_WITH_RESULT}
GROUP BY j.id, j.name, r.method""",
    "acceptance_by_temperature": f"""
SELECT j.id AS job_id, j.name AS job_name, r.temperature AS temperature,{_SUMS}
FROM {_WITH_RESULT}
GROUP BY j.id, j.name, r.temperature""",
    "acceptance_by_carried": f"""
SELECT j.id AS job_id, j.name AS job_name, e.key AS column_name, {{carried_value}} AS value,{_SUMS}
FROM {_WITH_RESULT} CROSS JOIN {{carried}}
GROUP BY j.id, j.name, e.key, {{carried_value}}""",
    # Told apart: rows for which nothing was drafted (no rate), and rows whose drafts were all rejected (rate 0).
    "acceptance_by_row": f"""
SELECT j.id AS job_id, j.name AS job_name, r.row_index, r.sample, r.row_id, r.carried, r.method, r.temperature,
    r.finish_reason, a.num_spec_steps, a.num_draft_tokens, a.num_accepted_draft_tokens, a.num_trimmed_draft_tokens,
    a.num_output_tokens,
    CASE WHEN a.num_draft_tokens = 0 THEN 'none' WHEN a.num_accepted_draft_tokens > 0 THEN 'accepted'
        WHEN a.num_trimmed_draft_tokens = a.num_draft_tokens THEN 'trimmed' ELSE 'rejected' END AS drafts,
    {_rate("a.num_accepted_draft_tokens + a.num_spec_steps", "a.num_spec_steps")} AS mean_acceptance_length,
    {_rate("a.num_accepted_draft_tokens", "a.num_draft_tokens")} AS draft_acceptance_rate
FROM {_WITH_RESULT}""",
    # The job's name is in every part, so that a condition on it reaches the rows that are read.
    "acceptance_by_position": f"""
SELECT p.job_id, p.job_name, p.method, p.position + 1 AS position, t.num_spec_steps, p.num_reached, p.num_accepted,
    {_rate("p.num_accepted", "p.num_reached")} AS draft_acceptance_rate,
    {_rate("p.num_accepted", "t.num_spec_steps")} AS survival_rate
FROM (
    SELECT j.id AS job_id, j.name AS job_name, r.method AS method, {{position}} AS position,
        CAST(sum({{item}}) AS BIGINT) AS num_reached, CAST(sum({{accepted_item}}) AS BIGINT) AS num_accepted
    FROM {_WITH_RESULT} CROSS JOIN {{reached}}
    GROUP BY j.id, j.name, r.method, {{position}}
) AS p
JOIN (
    SELECT j.id AS job_id, j.name AS job_name, r.method AS method, sum(a.num_spec_steps) AS num_spec_steps
    FROM {_WITH_RESULT}
    GROUP BY j.id, j.name, r.method
) AS t ON t.job_id = p.job_id AND t.job_name = p.job_name AND t.method = p.method""",
    "acceptance_by_length": f"""
SELECT h.job_id, h.job_name, h.method, h.accepted_length, h.num_spec_steps,
    {_rate("h.num_spec_steps", "sum(h.num_spec_steps) OVER (PARTITION BY h.job_id, h.job_name, h.method)")}
        AS share_of_steps
FROM (
    SELECT j.id AS job_id, j.name AS job_name, r.method AS method, {{position}} AS accepted_length,
        CAST(sum({{item}}) AS BIGINT) AS num_spec_steps
    FROM {_WITH_RESULT} CROSS JOIN {{histogram}}
    GROUP BY j.id, j.name, r.method, {{position}}
) AS h""",
    "throughput": f"""
SELECT q.job_id, q.job_name, q.num_results, q.num_output_tokens, q.elapsed_seconds,
    {_rate("q.num_results", "q.elapsed_seconds")} AS results_per_second,
    {_rate("q.num_output_tokens", "q.elapsed_seconds")} AS output_tokens_per_second,
    q.engine_seconds, {_rate("q.num_output_tokens", "q.engine_seconds")} AS decode_tokens_per_second
FROM (
    SELECT j.id AS job_id, j.name AS job_name,
        CAST(sum(c.engine_microseconds) AS DOUBLE PRECISION) / 1000000 AS engine_seconds,
        CAST(coalesce(sum(c.num_ok + c.num_errors), 0) AS BIGINT) AS num_results,
        CAST(coalesce(sum(c.num_output_tokens), 0) AS BIGINT) AS num_output_tokens,
        {{elapsed}} AS elapsed_seconds
    FROM jobs AS j LEFT JOIN chunks AS c ON c.job_id = j.id
    GROUP BY j.id, j.name, j.started_at, j.finished_at
) AS q""",
    "throughput_by_minute": """
SELECT j.id AS job_id, j.name AS job_name, {minute} AS minute,
    count(*) AS num_results,
    coalesce(sum(r.num_output_tokens), 0) AS num_output_tokens,
    CAST(coalesce(sum(r.num_output_tokens), 0) AS DOUBLE PRECISION) / 60 AS output_tokens_per_second
FROM results AS r JOIN jobs AS j ON j.id = r.job_id
GROUP BY j.id, j.name, {minute}""",
    "engine_throughput": f"""
SELECT q.worker_id, q.sampled_at, q.job_id, j.name AS job_name, q.num_running, q.num_waiting, q.kv_usage, q.seconds,
    {_rate("q.num_output_tokens", "q.seconds")} AS output_tokens_per_second,
    {_rate("q.num_accepted_draft_tokens + q.num_spec_steps", "q.num_spec_steps")} AS mean_acceptance_length,
    {_rate("q.num_accepted_draft_tokens", "q.num_draft_tokens")} AS draft_acceptance_rate
FROM (
    SELECT s.worker_id, s.sampled_at, s.job_id, s.num_running, s.num_waiting,
        {_rate("s.num_kv_blocks_used", "s.num_kv_blocks")} AS kv_usage,
        {{since_previous}} AS seconds,
        s.num_output_tokens - lag(s.num_output_tokens) OVER engine AS num_output_tokens,
        s.num_spec_steps - lag(s.num_spec_steps) OVER engine AS num_spec_steps,
        s.num_draft_tokens - lag(s.num_draft_tokens) OVER engine AS num_draft_tokens,
        s.num_accepted_draft_tokens - lag(s.num_accepted_draft_tokens) OVER engine AS num_accepted_draft_tokens
    FROM engine_samples AS s
    WINDOW engine AS (PARTITION BY s.worker_id ORDER BY s.sampled_at)
) AS q LEFT JOIN jobs AS j ON j.id = q.job_id
WHERE q.num_spec_steps IS NULL OR q.num_spec_steps >= 0""",
    "job_errors": """
SELECT j.id AS job_id, j.name AS job_name, e.error_code AS error_code,
    e.num_errors AS num_errors, e.row_index AS first_row_index, e.error_message AS example_message
FROM (
    SELECT r.job_id, r.error_code, r.row_index, r.error_message,
        count(*) OVER (PARTITION BY r.job_id, r.error_code) AS num_errors,
        row_number() OVER (PARTITION BY r.job_id, r.error_code ORDER BY r.row_index, r.sample) AS place
    FROM results AS r
    WHERE r.status = 'error'
) AS e JOIN jobs AS j ON j.id = e.job_id
WHERE e.place = 1""",
}

NAMES = tuple(_VIEWS)


def create(connection: sa.Connection) -> None:
    """Create every view."""
    words = dict(_SQLITE if connection.dialect.name == "sqlite" else _POSTGRESQL)
    positions = words.pop("positions")
    words |= {
        "reached": positions.format(array="reached_per_position"),
        "histogram": positions.format(array="acceptance_histogram"),
    }
    for name, select in _VIEWS.items():
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {select.format(**words)}")


def drop(connection: sa.Connection) -> None:
    """Drop the views that are there."""
    for name in reversed(sa.inspect(connection).get_view_names()):
        if name in _VIEWS:
            connection.exec_driver_sql(f"DROP VIEW {name}")
