"""From Parquet files to a stored job: columns checked, rows cut into chunks."""
