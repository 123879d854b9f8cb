"""The job level: Parquet to chunks to dispatch; leases, reaping, retry, cancel, resume, finalising."""
