"""Input and output files: locations, Parquet reading, export."""
