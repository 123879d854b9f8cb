"""What commands show: tables, JSON, progress, log lines."""
