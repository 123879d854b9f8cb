"""From a row of Parquet to a request, or an error with a code."""
